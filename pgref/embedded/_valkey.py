from __future__ import annotations

import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from pgref.embedded import _binaries
from pgref.embedded._home import Home
from pgref.embedded._server import SHORT_DIRECTORY, Server

_ANSWER_SECONDS_MAX = 5.0


class ValkeyServer(Server):
    """Valkey on 127.0.0.1, in memory only unless ``appendonly``: a restart then keeps the data.

    ``binaries`` is a directory with ``valkey-server`` or ``redis-server``, ``port`` 0 means a free one, ``settings``
    are added to the server's configuration (``{"appendfsync": "always"}``), ``directory`` holds the server's temporary
    directory and must be short. Raise ``MissingBinary``, and ``ValueError`` for too long a directory.
    """

    name = "Valkey"
    _stop_signals: ClassVar[Sequence[signal.Signals]] = (signal.SIGTERM,)
    _socket_name = "valkey.sock"

    def __init__(
        self,
        *,
        binaries: Path | None = None,
        port: int = 0,
        appendonly: bool = False,
        settings: Mapping[str, str] | None = None,
        directory: Path = SHORT_DIRECTORY,
    ) -> None:
        super().__init__(port=port, settings=settings, directory=directory)
        self._program = _binaries.valkey_program(binaries)
        self._appendonly = appendonly

    @property
    def url(self) -> str:
        """URL of database 0, for Celery and redis-py."""
        return f"redis://{self.host}:{self.port}/0"

    def _prepare(self, home: Home) -> None:
        """Do nothing: an empty directory is enough."""

    def _launch(self, home: Home) -> None:
        settings = {
            "bind": self.host,
            "port": str(self.port),
            "unixsocket": str(home.path / self._socket_name),
            "dir": str(home.path),
            "save": "",
            "appendonly": "yes" if self._appendonly else "no",
            **self._settings,
        }
        options = [word for name, value in settings.items() for word in (f"--{name}", value)]
        home.launch([str(self._program), *options], identity="self", signals=self._stop_signals)

    def _answers(self, home: Home) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(_ANSWER_SECONDS_MAX)
                connection.connect(str(home.path / self._socket_name))
                connection.sendall(b"PING\r\n")
                answer = connection.recv(64)
        except OSError:
            return False
        return bool(answer) and not answer.startswith(b"-LOADING")
