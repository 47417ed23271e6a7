"""A network between client and server: each message takes its time, and round trips are counted."""

from __future__ import annotations

import multiprocessing
import socket
import time
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, Self

__all__ = ["Network"]

_CHUNK_BYTES = 1 << 16

Way = SimpleQueue[tuple[float, bytes]]
"""What is under way, each with the time when it is due."""


class Network:
    """A proxy in a process of its own, in front of a server on 127.0.0.1, that delays what passes in each direction."""

    def __init__(self, port: int, *, round_trip_seconds: float = 0.0) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(port, round_trip_seconds / 2, theirs), daemon=True)
        self._process.start()
        self.port: int = self._pipe.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()

    @property
    def round_trips(self) -> int:
        """How often a client has spoken after its server had, or first."""
        self._pipe.send("count")
        return int(self._pipe.recv())


class _Link:
    """A connection through the network."""

    def __init__(self) -> None:
        self.round_trips = 0
        self.answered = True


def _serve(port: int, delay_seconds: float, pipe: Any) -> None:
    links: list[_Link] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        Thread(target=_accept, args=(listener, port, delay_seconds, links), daemon=True).start()
        pipe.send(listener.getsockname()[1])
        while pipe.recv():
            pipe.send(sum(link.round_trips for link in links))


def _accept(listener: socket.socket, port: int, delay_seconds: float, links: list[_Link]) -> None:
    while True:
        client, _ = listener.accept()
        server = socket.create_connection(("127.0.0.1", port))
        link = _Link()
        links.append(link)
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for source, target in ((client, server), (server, client)):
            way: Way = SimpleQueue()
            Thread(target=_receive, args=(link, source, way, delay_seconds, source is client), daemon=True).start()
            Thread(target=_deliver, args=(target, way), daemon=True).start()


def _receive(link: _Link, source: socket.socket, way: Way, delay_seconds: float, from_client: bool) -> None:
    with suppress(OSError):
        while chunk := source.recv(_CHUNK_BYTES):
            way.put((time.monotonic() + delay_seconds, chunk))
            if from_client and link.answered:
                link.round_trips += 1
            link.answered = not from_client
    way.put((0.0, b""))


def _deliver(target: socket.socket, way: Way) -> None:
    with suppress(OSError):
        while True:
            due, chunk = way.get()
            if not chunk:
                break
            time.sleep(max(0.0, due - time.monotonic()))
            target.sendall(chunk)
        target.shutdown(socket.SHUT_WR)
