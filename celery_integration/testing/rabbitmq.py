"""RabbitMQ from the machine's package, as `pgref.embedded` starts its servers."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from pgref.embedded import MissingBinary
from pgref.embedded._home import Home
from pgref.embedded._server import SHORT_DIRECTORY, Server, free_port

__all__ = ["RabbitMQServer"]

# Not the one on PATH: that is a wrapper, which insists on the system's own broker user.
PROGRAM = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
_STARTED = "Server startup complete"

# A consumer timeout is only looked for at each tick, which is a minute otherwise and is no setting of rabbitmq.conf.
_ERLANG_ARGUMENTS = "-rabbit channel_tick_interval 1000 -kernel inet_dist_use_interface {127,0,0,1} +S 2:2"


class RabbitMQServer(Server):
    """RabbitMQ on 127.0.0.1 with user ``guest``; ``stop()``, ``kill()`` and ``restart()`` keep its queues.

    ``program`` is the package's own ``rabbitmq-server`` script, ``port`` 0 means a free one, ``settings`` are lines of
    its ``rabbitmq.conf`` (``{"consumer_timeout": "2000"}``). Data, node name, ports and ``epmd`` are its own, so that
    it meets no other broker of the machine. Raise ``MissingBinary``.
    """

    name = "RabbitMQ"
    _stop_signals: ClassVar[Sequence[signal.Signals]] = (signal.SIGTERM, signal.SIGKILL)
    _socket_name = ""

    def __init__(
        self,
        *,
        program: Path = PROGRAM,
        port: int = 0,
        settings: Mapping[str, str] | None = None,
        directory: Path = SHORT_DIRECTORY,
    ) -> None:
        super().__init__(port=port, settings=settings, directory=directory)
        if not program.is_file():
            raise MissingBinary(
                f"RabbitMQ not found: no {program}; install it on Debian with: "
                "apt-get install --no-install-recommends rabbitmq-server"
            )
        self._program = program
        self._epmd_port = self._distribution_port = 0
        self._log_before = 0

    @property
    def url(self) -> str:
        """URL of the virtual host ``/``, for Celery."""
        return f"amqp://guest:guest@{self.host}:{self.port}//"

    def _prepare(self, home: Home) -> None:  # noqa: ARG002
        """Choose the ports beside the broker's own."""
        self._epmd_port, self._distribution_port = free_port(self.host), free_port(self.host)

    def _launch(self, home: Home) -> None:
        self._log_before = len(home.log_text())
        configuration = home.path / "rabbitmq.conf"
        settings = {
            "log.console": "true",
            "log.file": "false",
            "disk_free_limit.absolute": "1MB",
            **self._settings,
        }
        configuration.write_text("".join(f"{name} = {value}\n" for name, value in settings.items()))
        environment = {
            "HOME": home.path,  # for the cookie
            "ERL_EPMD_ADDRESS": self.host,
            "ERL_EPMD_PORT": self._epmd_port,
            "RABBITMQ_NODENAME": f"pgref{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": self.host,
            "RABBITMQ_NODE_PORT": self.port,
            "RABBITMQ_DIST_PORT": self._distribution_port,
            "RABBITMQ_CONFIG_FILE": configuration,
            "RABBITMQ_ENABLED_PLUGINS_FILE": home.path / "enabled_plugins",
            "RABBITMQ_LOG_BASE": home.path / "logs",
            "RABBITMQ_MNESIA_BASE": home.path / "data",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": _ERLANG_ARGUMENTS,
        }
        assignments = [f"{name}={value}" for name, value in environment.items()]
        home.launch(["/usr/bin/env", *assignments, str(self._program)], identity="self", signals=self._stop_signals)

    def _answers(self, home: Home) -> bool:
        """Believe the log of this start: it has no unix socket to ask."""
        return _STARTED in home.log_text()[self._log_before :]
