"""``health``: for a supervisor that asks whether a worker lives, and whether it can do its work."""

from __future__ import annotations

import math

import click
from kombu.exceptions import OperationalError

from celery_integration.cli.output import app_of, command_errors
from celery_integration.process import gate_of
from celery_integration.results import told
from pgref.postgres import verify_schema

__all__ = ["health"]


@click.command
@click.argument("worker", required=False)
@click.option("--live", is_flag=True, help="Only whether the worker answers, not whether its database does.")
@click.option("--timeout", type=click.FloatRange(min=0.1), default=5.0, show_default=True, help="Seconds to answer in.")
@click.pass_context
@command_errors
def health(context: click.Context, *, worker: str | None, live: bool, timeout: float) -> None:
    """Ask WORKER (such as celery@host; any, if not given) whether it lives and can work. Exits with 1 if not.

    A worker whose database is away lives and is not ready: its tasks come back until it is. Do not restart it for that.
    """
    app = app_of(context)
    try:
        with app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=math.ceil(timeout))
        asked = [worker] if worker else None
        answers = app.control.broadcast("ping", destination=asked, reply=True, timeout=timeout, limit=1) or []
    except OperationalError as error:
        raise click.ClickException(f"the broker is away: {told(error)}") from error
    if not answers:
        raise click.ClickException(f"{worker} does not answer" if worker else "no worker answers")
    names = ", ".join(sorted(name for answer in answers for name in answer))
    if live:
        click.echo(f"{names}: alive")
        return
    gate = gate_of(app)
    gate.effects.now()
    verify_schema(gate.stores.engine, gate.settings.schema)
    click.echo(f"{names}: ready")
