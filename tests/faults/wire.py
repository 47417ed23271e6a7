"""A TCP proxy in front of PostgreSQL that understands frames, and cuts the wire or falls silent at a chosen one."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from threading import Lock, Thread
from types import TracebackType
from typing import Self

__all__ = ["Cut", "Direction", "Wire"]

_CHUNK_BYTES = 65536


class Direction(Enum):
    """Who speaks."""

    CLIENT = "client"
    SERVER = "server"


@dataclass(frozen=True, slots=True)
class Cut:
    """Drop a connection at the n-th ``message`` of one direction, ``before`` or after that has passed.

    ``silent``: hold on to the connection instead, and pass nothing any more. ``for_good``: do so with later ones.
    """

    direction: Direction
    message: int
    before: bool = False
    silent: bool = False
    for_good: bool = False

    def __str__(self) -> str:
        kind = "silent" if self.silent else "cut"
        place = f"{'before' if self.before else 'after'} message {self.message} of the {self.direction.value}"
        return f"{kind} {place}{', for good' if self.for_good else ''}"


# Asks for what the server has to say so far. A pipeline sends as many as it comes to look for answers too early.
_FLUSH = b"H\0\0\0\4"


class Wire:
    """The proxy. Messages (but flushes) are counted, and a cut is waited for, over all connections from `arm` on."""

    def __init__(self, host: str, port: int) -> None:
        self._server = (host, port)
        self._lock = Lock()
        self._cut: Cut | None = None
        self._dead: Cut | None = None
        self._passed = dict.fromkeys(Direction, 0)
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host, self.port = self._listener.getsockname()

    def __enter__(self) -> Self:
        Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()

    def arm(self, cut: Cut | None = None) -> None:
        """Count anew and wait for the place of ``cut``; without one, let everything pass again."""
        with self._lock:
            self._cut, self._dead = cut, None
            self._passed = dict.fromkeys(Direction, 0)

    @property
    def passed(self) -> dict[Direction, int]:
        """How many messages passed since `arm`."""
        with self._lock:
            return dict(self._passed)

    @property
    def armed(self) -> bool:
        """Whether the place of the cut has not come yet."""
        with self._lock:
            return self._cut is not None

    def drop(self) -> None:
        """Drop every connection there is, mute ones too."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        _drop(*sockets)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._dead is None:
                    self._connect(client)
                elif self._dead.silent:
                    self._keep(client)
                else:
                    client.close()

    def _connect(self, client: socket.socket) -> None:
        server = socket.create_connection(self._server)
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._keep(client, server)
        link = _Link()
        for pair in ((client, server, Direction.CLIENT), (server, client, Direction.SERVER)):
            Thread(target=self._pump, args=(link, *pair), daemon=True).start()

    def _keep(self, *sockets: socket.socket) -> None:
        with self._lock:
            self._sockets.update(sockets)

    def _pump(self, link: _Link, source: socket.socket, target: socket.socket, direction: Direction) -> None:
        with suppress(OSError):
            for message in _messages(source, startup=direction is Direction.CLIENT):
                cut = None if message == _FLUSH else self._reached(direction)
                if link.cut is None and (cut is None or not cut.before):
                    target.sendall(message)
                link.cut = link.cut or cut
                if link.cut is not None:
                    break
        if link.cut is None or not link.cut.silent:
            _drop(source, target)

    def _reached(self, direction: Direction) -> Cut | None:
        """Count a message, and return the cut if this is its place."""
        with self._lock:
            cut = self._cut
            if cut is None or cut.direction is not direction or cut.message > self._passed[direction] + 1:
                self._passed[direction] += 1
                return None
            self._cut, self._dead = None, cut if cut.for_good else None
            return cut


class _Link:
    """A connection through the wire; both directions end with its cut."""

    cut: Cut | None = None


def _messages(source: socket.socket, *, startup: bool) -> Iterator[bytes]:
    """Yield whole messages: the start-up message begins with its length, all others with a type byte before it."""
    buffer = b""
    while chunk := source.recv(_CHUNK_BYTES):
        buffer += chunk
        while (size := _size(buffer, type_bytes=0 if startup else 1)) <= len(buffer):
            yield buffer[:size]
            buffer, startup = buffer[size:], False


def _size(buffer: bytes, *, type_bytes: int) -> int:
    """Return the size of the message that begins the buffer, as far as one can tell."""
    head = type_bytes + 4
    if len(buffer) < head:
        return head
    return type_bytes + int(struct.unpack_from("!I", buffer, type_bytes)[0])


def _drop(*sockets: socket.socket) -> None:
    for one in sockets:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
