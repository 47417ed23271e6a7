"""What PostgreSQL and Valkey have in common: life cycle, port, log."""

from __future__ import annotations

import random
import signal
import socket
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

from pgref.embedded._errors import ServerFailed
from pgref.embedded._home import Home, require_short

# Socket paths must be short, and TMPDIR may be long. The directory made in it is private.
SHORT_DIRECTORY = Path("/tmp")  # noqa: S108
_START_SECONDS_MAX = 60.0
_LOOK_SECONDS = 0.01
_PORT_TRIES = 5
# Below the kernel's default range for outgoing connections: none of those can take the port during a restart, and a
# client that retries cannot connect to itself.
_PORTS = range(20_000, 32_000)


def free_port(host: str) -> int:
    """Return a port nobody listens on at this moment."""
    while True:
        port = random.SystemRandom().choice(_PORTS)  # the shared generator may be seeded, alike in several processes
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
        return port


class Server(ABC):
    """A server process with a directory of its own. Use it as a context manager, or ``start()`` and ``close()``.

    ``stop()`` and ``kill()`` keep directory and port for the next ``start()``; ``close()``, leaving the context and the
    end of this process (also by SIGKILL) end the server and remove its directory. In a fork of this process ``start``,
    ``stop``, ``kill`` and ``close`` are not for use; it may end without harm to the server.
    """

    name: ClassVar[str]
    host: ClassVar[str] = "127.0.0.1"
    _stop_signals: ClassVar[Sequence[signal.Signals]]
    _socket_name: ClassVar[str]

    def __init__(self, *, port: int, settings: Mapping[str, str] | None, directory: Path) -> None:
        require_short(directory, self._socket_name.format(port=65535))
        self.port = port
        self._port_settled = port != 0
        self._settings = dict(settings or {})
        self._directory = directory
        self._home: Home | None = None
        self._started_before = False

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> Self:
        """Start, and return when the server answers. Nothing, if it runs. Raise ``ServerFailed``, ``MissingBinary``."""
        if self.running:
            return self
        try:
            self._boot(self._home or self._new_home())
        except BaseException:
            if not self._started_before:
                self.close()
            raise
        self._started_before = self._port_settled = True
        return self

    def stop(self) -> None:
        """Stop in order; directory, data and port are kept."""
        if self._home:
            self._home.stop(self._stop_signals[0])

    def kill(self) -> None:
        """End the server and its children with SIGKILL, as a crash would; directory, data and port are kept."""
        if self._home:
            self._home.stop(signal.SIGKILL)

    def restart(self) -> None:
        """Stop and start on the same port and data."""
        self.stop()
        self.start()

    def close(self) -> None:
        """Stop and remove the data; the next ``start()`` begins anew."""
        if self._home:
            self._finalizer()
        self._home, self._started_before = None, False

    @property
    def running(self) -> bool:
        """Whether the server process lives."""
        return self._home is not None and self._home.running

    @property
    def pid(self) -> int:
        """The server's process id. Raise ``ServerFailed`` if it does not run."""
        if not self.running or self._home is None or self._home.pid is None:
            raise ServerFailed.with_log(f"{self.name} is not running", self.log_text())
        return self._home.pid

    def log_text(self) -> str:
        """All that the server has logged since its directory was made; empty before the start and after ``close()``."""
        return self._home.log_text() if self._home else ""

    @abstractmethod
    def _prepare(self, home: Home) -> None: ...

    @abstractmethod
    def _launch(self, home: Home) -> None: ...

    @abstractmethod
    def _answers(self, home: Home) -> bool:
        """Ask over the unix socket: on the port a stranger might answer.

        Both servers open the socket after the port, and end if they cannot have the port.
        """

    def _new_home(self) -> Home:
        self._home = Home(self._directory)
        # The data goes anyway, so the quickest signal will do.
        self._finalizer = weakref.finalize(self, self._home.close, self._stop_signals[-1])
        self._prepare(self._home)
        return self._home

    def _boot(self, home: Home) -> None:
        for tries_left in reversed(range(_PORT_TRIES)):
            if not self._port_settled:
                self.port = free_port(self.host)
            try:
                self._launch_and_wait(home)
            except ServerFailed as failure:
                if self._port_settled or not tries_left or "already in use" not in str(failure):
                    raise
            else:
                return

    def _launch_and_wait(self, home: Home) -> None:
        self._launch(home)
        deadline = time.monotonic() + _START_SECONDS_MAX
        while not self._answers(home):
            if home.ended_within(_LOOK_SECONDS) is not None:
                raise ServerFailed.with_log(f"{self.name} did not start", home.log_text())
            if time.monotonic() > deadline:
                home.stop(signal.SIGKILL)
                raise ServerFailed.with_log(f"{self.name} did not answer in {_START_SECONDS_MAX} s", home.log_text())
