"""``metrics``: serve them to Prometheus."""

from __future__ import annotations

import os
import threading
from importlib.util import find_spec

import click

from celery_integration.cli.output import app_of

__all__ = ["metrics"]


@click.command
@click.option("--port", type=click.IntRange(0, 65535), default=9464, show_default=True, help="0 takes a free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on. There is no password.")
@click.pass_context
def metrics(context: click.Context, *, port: int, host: str) -> None:
    """Serve metrics to Prometheus: the backlog, and what the workers' processes counted."""
    if find_spec("prometheus_client") is None:
        raise click.ClickException("install pgref[prometheus]")
    from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415  an extra

    from celery_integration.prometheus import BacklogCollector, registry  # noqa: PLC0415

    app = app_of(context)
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        served = registry(app)
    else:
        click.echo("PROMETHEUS_MULTIPROC_DIR is not set: only the backlog is served, not what workers count", err=True)
        served = CollectorRegistry()
        served.register(BacklogCollector(app))
    server, thread = start_http_server(port, addr=host, registry=served)
    click.echo(f"serving http://{host}:{server.server_port}/metrics")
    try:
        threading.Event().wait()
    finally:
        server.shutdown()
        thread.join()
