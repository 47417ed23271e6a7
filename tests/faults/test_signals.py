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
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from pgref.embedded import PostgresServer
from pgref.postgres import Stores, _connection
from tests.faults.interrupted import SoftTimeLimitError, raise_soft_limit
from tests.faults.state import Observer, assert_clean

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


@pytest.fixture
def soft_limit() -> Iterator[signal.Signals]:
    """A signal whose handler raises."""
    before = signal.signal(signal.SIGUSR1, raise_soft_limit)
    yield signal.SIGUSR1
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("step", ["_checked_out", "_unlimit"])
def test_a_signal_while_a_connection_changes_hands(
    engine: sa.Engine, schema: str, monkeypatch: pytest.MonkeyPatch, soft_limit: signal.Signals, step: str
) -> None:
    """G26: whatever a handler raises, it does so when the connection is surely lent, or surely given back."""
    stores = Stores.open(engine.url, schema=schema)
    stores.effects.lookup("warm")
    undisturbed = getattr(_connection, step)

    def struck(*args: object) -> object:
        answer = undisturbed(*args)
        signal.raise_signal(soft_limit)
        return answer

    monkeypatch.setattr(_connection, step, struck)
    with pytest.raises(SoftTimeLimitError) as interrupted:
        stores.effects.lookup("k")
    assert interrupted.tb is not None, "its frames keep what was lost from being collected into the pool"
    assert_clean(stores.engine)
    stores.close()
