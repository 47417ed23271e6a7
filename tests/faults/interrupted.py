"""A process whose main thread is interrupted by real signals at any moment, as `test_signals` starts it.

Each line on its output says that the next signal may come; the last one says how often which step was interrupted.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NamedTuple
from uuid import uuid4

import sqlalchemy as sa

from pgref.contracts.effects import (
    Action,
    Done,
    EffectRecord,
    Granted,
    InFlight,
    Lease,
    Outcome,
    ReconcileClaim,
    Renewal,
    Resolution,
    State,
)
from pgref.errors import LeaseLost
from pgref.postgres import Stores
from tests.faults.state import assert_clean

__all__: list[str] = []

TTL = 3600.0
PATHS = ("done", "many", "withdrawn", "ruled", "within", "single")
APPLIED = Resolution(applied=True, result="ruled")


class SoftTimeLimitError(Exception):
    """What Celery raises in the main thread of a task that takes too long."""


def raise_soft_limit(signum: int, frame: FrameType | None) -> None:
    raise SoftTimeLimitError


def raise_system_exit(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


class Life:
    """One key from its grant to its end: steps that can be repeated, and the state that each of them leaves."""

    def __init__(self, stores: Stores, path: str) -> None:
        self.stores = stores
        self.effects = stores.effects
        self.action = Action(uuid4().hex, uuid4().hex)
        self.holder, self.reconciler = uuid4(), uuid4()
        self.lease: Lease | None = None
        self.claim: ReconcileClaim | None = None
        self.path = path

    def steps(self) -> Iterator[tuple[Callable[[], object], State]]:
        """Yield each step with the state after it."""
        if self.path == "single":
            yield self.single_commit, State.DONE
            return
        yield self.acquire, State.IN_FLIGHT
        yield self.renew, State.IN_FLIGHT
        yield self.renew_many, State.IN_FLIGHT
        yield from getattr(self, self.path)()

    def done(self) -> Iterator[tuple[Callable[[], object], State]]:
        yield self.write_fenced, State.IN_FLIGHT
        yield self.complete, State.DONE

    def many(self) -> Iterator[tuple[Callable[[], object], State]]:
        yield self.acquire_many, State.IN_FLIGHT
        yield self.sweep, State.IN_FLIGHT
        yield self.complete_many, State.DONE

    def withdrawn(self) -> Iterator[tuple[Callable[[], object], State]]:
        yield self.abandon, State.FREE

    def ruled(self) -> Iterator[tuple[Callable[[], object], State]]:
        yield self.mark_uncertain, State.UNCERTAIN
        yield self.release, State.UNCERTAIN
        yield self.begin_reconcile, State.UNCERTAIN
        yield self.defer_reconcile, State.UNCERTAIN
        yield self.resolve_uncertain, State.DONE

    def within(self) -> Iterator[tuple[Callable[[], object], State]]:
        yield self.database_effect, State.DONE

    def acquire(self) -> None:
        outcome = self.effects.acquire(self.action, TTL, holder=self.holder)
        assert isinstance(outcome, Granted)
        self.lease = outcome.lease

    def granted(self) -> Lease:
        assert self.lease is not None
        return self.lease

    def renew(self) -> None:
        self.lease = self.effects.renew(self.action, self.granted(), TTL)

    def renew_many(self) -> None:
        self.effects.renew_many([(self.action, self.granted())], TTL)

    def acquire_many(self) -> None:
        (outcome,) = self.effects.acquire_many([self.action], TTL, holders=[self.holder])
        assert isinstance(outcome, Granted)
        self.lease = outcome.lease

    def sweep(self) -> None:
        assert self.effects.expire_intents(10) == 0
        claimed = self.effects.claim_backlog(10, TTL)  # what interrupted lives left
        assert self.action.key not in {record.key for record, _ in claimed}
        attempt = (self.action.key, self.granted().fence)
        assert self.effects.renew_running([attempt], TTL) in ([Renewal.RENEWED], [Renewal.BUSY])
        assert self.effects.claim_due(10, TTL) == []
        assert self.effects.retain(TTL, 10) == 0

    def complete_many(self) -> None:
        assert self.effects.complete_many([(self.action, self.granted(), "r")]) == ["r"]

    def write_fenced(self) -> None:
        self.stores.sinks.write_fenced(self.action.resource, self.granted().fence, lambda _: None)

    def complete(self) -> None:
        assert self.effects.complete(self.action, self.granted(), "r") == "r"

    def database_effect(self) -> None:
        ways = self.effects.complete_within, self.effects.complete_and_commit
        complete = ways[int(self.action.key, 16) % 2]
        try:
            with self.stores.database.transaction() as connection:
                self.write(connection)
                complete(connection, self.action, self.granted(), "r")
        except LeaseLost:
            assert self.record().state is State.DONE

    def single_commit(self) -> None:
        outcome: Outcome = InFlight(0)
        while isinstance(outcome, InFlight):  # the server has yet to notice that an interrupted one is gone
            with self.stores.database.transaction() as connection:
                outcome = self.effects.acquire_within(connection, self.action)
                if isinstance(outcome, Granted):
                    self.write(connection)
                    self.effects.complete_acquired(connection, self.action, outcome.lease, "r")
        assert isinstance(outcome, Granted | Done)

    def write(self, connection: sa.Connection) -> None:
        """Write the row of the database effect."""
        statement = f'INSERT INTO "{self.stores.schema}".fault_data VALUES (%s)'
        connection.exec_driver_sql(statement, (self.action.key,))

    def abandon(self) -> None:
        self.effects.abandon(self.action, self.granted())

    def mark_uncertain(self) -> None:
        self.effects.mark_uncertain(self.action, self.granted(), "why")

    def release(self) -> None:
        self.effects.release(self.action, self.granted())

    def begin_reconcile(self) -> None:
        self.claim = self.effects.begin_reconcile(self.action, TTL, holder=self.reconciler)

    def defer_reconcile(self) -> None:
        assert self.claim is not None
        self.effects.defer_reconcile(self.claim, None, note="ask")

    def resolve_uncertain(self) -> None:
        assert self.effects.resolve_uncertain(self.action, APPLIED).applied

    def record(self) -> EffectRecord:
        record = self.effects.lookup(self.action.key)
        assert record is not None
        return record

    def state(self) -> State:
        """Return the state, *free* for a key that was never granted."""
        record = self.effects.lookup(self.action.key)
        return State.FREE if record is None else record.state

    def written(self) -> int:
        """Count the rows of the database effect."""
        with self.stores.engine.connect() as connection:
            statement = f'SELECT count(*) FROM "{self.stores.schema}".fault_data WHERE value = %s'
            return int(connection.exec_driver_sql(statement, (self.action.key,)).scalar_one())


class Moment(NamedTuple):
    """The step that is being done, and the state of its key before and after it."""

    life: Life
    step: Callable[[], object]
    before: State
    after: State


class Process:
    """Lives through keys, and checks after each interruption what is left of the call and of the pool."""

    def __init__(self, stores: Stores, seed: int) -> None:
        self.stores = stores
        self.interruptions: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._moment = Moment(Life(stores, "done"), lambda: None, State.FREE, State.FREE)

    def run(self, rounds: int) -> None:
        """Take ``rounds`` signals."""
        for _ in range(rounds):
            try:
                say("ready")
                self._live()
            except (SoftTimeLimitError, SystemExit, sa.exc.StatementError) as error:
                if isinstance(error, sa.exc.StatementError) and not isinstance(error.orig, SoftTimeLimitError):
                    raise  # SQLAlchemy wraps what interrupts a statement of the body
                self.interruptions[f"{self._moment.step.__name__}, {type(error).__name__}"] += 1
            self._check()

    def _live(self) -> None:
        while True:
            life = Life(self.stores, self._random.choice(PATHS))
            before = State.FREE
            for step, after in life.steps():
                self._moment = Moment(life, step, before, after)
                step()
                before = after

    def _check(self) -> None:
        assert_clean(self.stores.engine)
        life, step, before, after = self._moment
        assert life.state() in {before, after}
        step()
        assert life.state() is after
        assert life.written() == (life.path in {"within", "single"} and after is State.DONE)
        assert_clean(self.stores.engine)


def say(word: str) -> None:
    os.write(sys.stdout.fileno(), f"{word}\n".encode())


def main() -> None:
    url, schema, rounds, seed = sys.argv[1:]
    stores = Stores.open(sa.create_engine(url, pool_size=2, max_overflow=0, pool_timeout=5), schema=schema)
    stores.effects.lookup("warm")
    signal.signal(signal.SIGUSR1, raise_soft_limit)
    signal.signal(signal.SIGTERM, raise_system_exit)
    process = Process(stores, int(seed))
    process.run(int(rounds))
    say(f"interrupted {dict(process.interruptions)}")


if __name__ == "__main__":
    main()
