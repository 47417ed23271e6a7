"""A real `celery worker` in a process of its own."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from pgref.embedded._home import Home
from pgref.embedded._server import SHORT_DIRECTORY, Server

__all__ = ["POOLS", "WorkerProcess"]

POOLS = ("prefork", "threads", "solo", "gevent")
"""The pools in which fenced tasks run."""


class WorkerProcess(Server):
    """A worker of ``app`` (as in ``celery -A``) that ends with this process, and its children with it.

    It imports what this process can import. ``environment`` is added to its environment, ``options`` to its command
    line. ``start()`` returns when it has logged that it is ready, for which its log level is INFO; ``stop()`` is a warm
    shutdown, which is cut short after ten seconds; ``kill()`` ends the worker and its children with SIGKILL.
    ``start()`` raises ``ServerFailed`` with the end of its log.
    """

    name = "Celery worker"
    _stop_signals: ClassVar[Sequence[signal.Signals]] = (signal.SIGKILL,)
    _socket_name = ""

    def __init__(
        self,
        app: str,
        *,
        pool: str = "prefork",
        concurrency: int = 4,
        queue: str = "celery",
        environment: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        directory: Path = SHORT_DIRECTORY,
    ) -> None:
        super().__init__(port=-1, settings=None, directory=directory)  # it listens nowhere
        self.app = app
        self.pool = pool
        self.concurrency = concurrency
        self.queue = queue
        self.hostname = f"worker-{secrets.token_hex(4)}@localhost"
        self.environment = dict(environment or {})
        self._options = list(options)
        self._log_before = 0

    def stop(self) -> None:
        """Shut down warmly: running tasks have ten seconds to end."""
        if self._home:
            self._home.stop(signal.SIGTERM)

    def _prepare(self, home: Home) -> None:
        """Do nothing: an empty directory is enough."""

    def _launch(self, home: Home) -> None:
        self._log_before = len(home.log_text())
        importable = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
        environment = {"PYTHONPATH": importable, **self.environment}
        worker = [sys.executable, "-m", "celery", "-A", self.app, "worker", "-l", "INFO", "-n", self.hostname]
        pool = ["--pool", self.pool, "-c", str(self.concurrency), "-Q", self.queue]
        quiet = ["--without-gossip", "--without-mingle"]
        assignments = [f"{name}={value}" for name, value in environment.items()]
        command = ["/usr/bin/env", *assignments, *worker, *pool, *quiet, *self._options]
        home.launch(command, identity="self", signals=self._stop_signals)

    def _answers(self, home: Home) -> bool:
        return f"{self.hostname} ready." in home.log_text()[self._log_before :]
