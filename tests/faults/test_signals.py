"""Exceptions from signal handlers leave neither a dirty connection nor a torn key, whenever they come (FC-11).

PGREF_SIGNALS sets how many signals are sent; 3,000 take about a minute.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys

from pgref.embedded import PostgresServer
from tests.faults.state import Observer

SIGNALS = int(os.environ.get("PGREF_SIGNALS", "300"))
SEED = int(os.environ.get("PGREF_SEED", "7"))
DELAY_SECONDS_MAX = 0.012
STUCK_SECONDS = 60.0
KINDS = (signal.SIGUSR1, signal.SIGTERM)


class Interrupted:
    """The process, and when it is struck."""

    def __init__(self, url: str, schema: str) -> None:
        command = [sys.executable, "-m", "tests.faults.interrupted", url, schema, str(SIGNALS), str(SEED)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
        self._random = random.Random(SEED)

    def line(self) -> str:
        """Return what it says next; nothing if it has ended."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], STUCK_SECONDS)[0], "stuck"
        return self.process.stdout.readline().decode().strip()

    def strike(self) -> None:
        """Send a signal at some moment of the next milliseconds."""
        select.select([], [], [], self._random.uniform(0, DELAY_SECONDS_MAX))
        self.process.send_signal(self._random.choice(KINDS))


def test_signals_at_any_moment(postgres: PostgresServer, schema: str) -> None:
    """G10, G26: after each the pool is clean, the key is before or after the call, and the call can be repeated."""
    observer = Observer(postgres.conninfo, schema)
    interrupted = Interrupted(postgres.dsn, schema)
    struck = 0
    while (line := interrupted.line()) == "ready":
        interrupted.strike()
        struck += 1
    _, errors = interrupted.process.communicate(timeout=STUCK_SECONDS)
    observer.close()
    assert (struck, interrupted.process.returncode) == (SIGNALS, 0), errors.decode()
    assert line.startswith("interrupted"), line
