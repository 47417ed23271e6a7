"""pytest-celery's nodes over local processes: a process stands where pytest-celery expects a Docker container."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import celery
from pytest_celery import CeleryTestBackend, CeleryTestBroker, CeleryTestWorker

from celery_integration.testing.rabbitmq import RabbitMQServer
from celery_integration.testing.worker import WorkerProcess
from pgref.embedded import ValkeyServer
from pgref.embedded._server import Server

__all__ = ["LocalContainer", "LocalWorker", "RabbitMQBroker", "ValkeyBackend", "ValkeyBroker", "running_worker"]

_LOOK_SECONDS = 0.02


class LocalContainer:
    """What pytest-celery asks of a container, answered by a local process. What only Docker can do, it does not have.

    Two nodes may share one container, as broker and backend do on one Valkey.
    """

    def __init__(self, server: Server) -> None:
        self.server = server

    @property
    def name(self) -> str:
        """What the process is."""
        return self.server.name

    @property
    def id(self) -> str:
        """The process id, or an empty text if it does not run."""
        return str(self.server.pid) if self.server.running else ""

    @property
    def status(self) -> str:
        """``running`` or ``exited``."""
        return "running" if self.server.running else "exited"

    def ready(self) -> bool:
        """Start the process, if it does not run, and wait until it answers. Raises ``ServerFailed``."""
        self.server.start()
        return True

    def reload(self) -> None:
        """Do nothing: nothing is cached."""

    def logs(self) -> str:
        """All that the process has logged."""
        return self.server.log_text()

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """Send a signal. SIGKILL ends the children too, and is waited for. Raises ``ServerFailed`` if it is gone."""
        number = _number(signal)
        if number == _number("SIGKILL"):
            self.server.kill()
        else:
            os.kill(self.server.pid, number)

    def wait(self, timeout: float = 60.0) -> None:
        """Wait until the process has ended by itself. Raises ``TimeoutError``."""
        deadline = time.monotonic() + timeout
        while self.server.running:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} still runs after {timeout} s")
            time.sleep(_LOOK_SECONDS)

    def restart(self, timeout: float = 0.0) -> None:  # noqa: ARG002  Docker's
        """Stop, gently, and start again. Raises ``ServerFailed``."""
        self.server.restart()

    def teardown(self) -> None:
        """End the process and remove its data."""
        self.server.close()


def _number(name: str | int) -> int:
    return signal.Signals[name] if isinstance(name, str) else name


class _Broker(LocalContainer):
    server: ValkeyServer | RabbitMQServer

    @property
    def celeryconfig(self) -> dict[str, Any]:
        """Where Celery finds it. Docker tells inside from outside; here both are one."""
        url, host, port = self.server.url, self.server.host, self.server.port
        return {"url": url, "host_url": url, "hostname": host, "port": port, "vhost": url.rpartition("/")[2]}


class ValkeyBroker(CeleryTestBroker):  # type: ignore[misc]
    """Valkey as a broker."""

    def __init__(self, server: ValkeyServer, app: celery.Celery | None = None) -> None:
        super().__init__(_Broker(server), app)


class ValkeyBackend(CeleryTestBackend):  # type: ignore[misc]
    """Valkey as a result backend; it may be the broker's."""

    def __init__(self, server: ValkeyServer, app: celery.Celery | None = None) -> None:
        super().__init__(_Broker(server), app)


class RabbitMQBroker(CeleryTestBroker):  # type: ignore[misc]
    """RabbitMQ as a broker."""

    def __init__(self, server: RabbitMQServer, app: celery.Celery | None = None) -> None:
        super().__init__(_Broker(server), app)


class _Worker(LocalContainer):
    server: WorkerProcess

    def version(self) -> str:
        return str(celery.__version__)

    def log_level(self) -> str:
        return "INFO"

    def worker_name(self) -> str:
        return self.server.hostname.partition("@")[0]

    def worker_queue(self) -> str:
        return self.server.queue


class LocalWorker(CeleryTestWorker):  # type: ignore[misc]
    """A worker. ``kill()`` ends its children too, ``container.wait()`` waits for the end of a shutdown."""

    def __init__(self, process: WorkerProcess, app: celery.Celery | None = None) -> None:
        super().__init__(_Worker(process), app)

    @property
    def pool(self) -> str:
        """The name of its pool."""
        return str(self.container.server.pool)

    def hostname(self) -> str:
        """Its node name, as ``inspect`` and ``control`` know it."""
        return str(self.container.server.hostname)


@contextmanager
def running_worker(
    app: str,
    broker: CeleryTestBroker,
    backend: CeleryTestBackend,
    *,
    pool: str = "prefork",
    environment: Mapping[str, str] | None = None,
) -> Iterator[LocalWorker]:
    """Run a worker of ``app`` between nodes of whatever kind. Raises ``ServerFailed`` with the end of its log."""
    nodes = {"BROKER_URL": broker.config()["host_url"], "RESULT_BACKEND": backend.config()["host_url"]}
    # Without the prefix they are options of the command line, which win over all else that names a broker.
    urls = {f"{prefix}{name}": url for name, url in nodes.items() for prefix in ("", "CELERY_")}
    with WorkerProcess(app, pool=pool, environment={**urls, **(environment or {})}) as process:
        yield LocalWorker(process)
