"""Processes that each run the operations they are told, on connections of their own."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

from bench.operations import Operations, fresh_names
from pgref.postgres import Stores

__all__ = ["Clients"]


class Clients:
    """Client processes of one server."""

    def __init__(self, dsn: str, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes = []
        self._processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_client, args=(dsn, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers()

    def seconds(self, operation: str, operations: int) -> float:
        """Return the time that all clients together take for ``operations`` calls."""
        share = max(1, operations // len(self._pipes))
        started = time.perf_counter()
        for pipe in self._pipes:
            pipe.send((operation, share))
        self._answers()
        return (time.perf_counter() - started) * operations / (share * len(self._pipes))

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()

    def _answers(self) -> None:
        for pipe in self._pipes:
            pipe.recv()


def _client(dsn: str, pipe: Any) -> None:
    stores = Stores.open(dsn)
    operations = Operations(stores)
    pipe.send("ready")
    while order := pipe.recv():
        operation, count = order
        run = getattr(operations, operation)
        for name in fresh_names(count):
            run(name)
        pipe.send("done")
    stores.close()
