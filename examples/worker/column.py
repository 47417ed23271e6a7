"""Runs the load through one column: place, deliver, kill, restart, until everything settled; then count."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from celery import Celery
from redis import Redis
from sqlalchemy import Engine

from examples.worker.crew import Crew, DemoError
from examples.worker.load import Delivery, Order
from examples.worker.processor import read_charges
from examples.worker.progress import Progress
from examples.worker.settings import celery_settings
from examples.worker.tables import Entry, PlainEntry, orders_booked
from examples.worker.tally import Left, Result, tally, wrong

__all__ = ["Column", "Load", "Pace", "run"]

TICK_SECONDS = 0.05
LOOK_EVERY_SECONDS = 0.3
START_SECONDS_MAX = 40.0
PLACING_SECONDS_MAX = 30.0
CALM_SECONDS = 2.0
CALM_WITH_BACKLOG_SECONDS = 6.0
"""A lease, a sweep and the run that the sweep dispatched: whatever is still uncertain then waits for a person."""


@dataclass(frozen=True, slots=True)
class Column:
    """Where one column's things are."""

    title: str
    module: str
    broker_url: str
    charges_file: Path
    engine: Engine
    entries: type[Entry | PlainEntry]
    backlog: Callable[[], Sequence[Left]]


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things may take. Placing alone lasts about 22 kills, so that at least 20 happen while there is work."""

    kill_every_seconds: float
    placing_seconds: float
    chaos_seconds_max: float
    quiet_seconds_max: float

    @classmethod
    def of(cls, orders: int, kill_every_seconds: float) -> Pace:
        placing = min(PLACING_SECONDS_MAX, 22 * kill_every_seconds)
        return cls(kill_every_seconds, placing, placing + 20 + 0.2 * orders, 30 + 0.2 * orders)


@dataclass(frozen=True, slots=True)
class Load:
    """What both columns are given."""

    orders: Sequence[Order]
    plan: Sequence[Delivery]
    pace: Pace
    seed: int


@dataclass(frozen=True, slots=True)
class _Look:
    """What can be seen from outside at one moment."""

    charges: tuple[int, ...] = ()
    bookings: tuple[int, ...] = ()
    left: tuple[Left, ...] = ()
    waiting: int = 1


@dataclass(slots=True)
class _Run:
    column: Column
    crew: Crew
    orders: Sequence[Order]
    pending: list[Delivery]
    pace: Pace
    rng: random.Random
    progress: Progress
    started: float = field(default_factory=time.monotonic)
    placed: int = 0
    kill_due: float = 0.0
    look_due: float = 0.0
    look: _Look = field(default_factory=_Look)
    changed: float = 0.0

    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def chaos(self) -> None:
        """Place and deliver, and kill all the while."""
        self.kill_due = self._next_kill()
        with Celery("orders", broker=self.column.broker_url, set_as_current=False) as publisher:
            publisher.conf.update(celery_settings(self.column.module))
            while not self._settled() and self.elapsed() < self.pace.chaos_seconds_max:
                self._publish(publisher)
                self._kill()
                self._tick("killing")

    def quiet(self) -> None:
        """Let everything settle that can settle."""
        end = self.elapsed() + self.pace.quiet_seconds_max
        while not self._calm() and self.elapsed() < end:
            self._tick("settling")

    def result(self) -> Result:
        self._look_now()
        look = self.look
        seen = ([order.id for order in self.orders], look.charges, look.bookings, look.left)
        return Result(
            title=self.column.title,
            tally=tally(*seen),
            kills=self.crew.kills,
            left=look.left,
            seconds=self.elapsed(),
            waiting=look.waiting,
            wrong=wrong(*seen),
        )

    def _publish(self, publisher: Celery) -> None:
        position = self.elapsed() / self.pace.placing_seconds
        while self.pending and self.pending[-1].position <= position:
            delivery = self.pending.pop()
            order = delivery.order
            publisher.send_task(
                f"{self.column.module}.{delivery.task}",
                kwargs={"order_id": order.id, "account_id": order.account_id, "cents": order.cents},
                task_id=delivery.message_id,
                queue=self.column.module,
            )
            self.placed = max(self.placed, order.id)

    def _kill(self) -> None:
        if self.elapsed() < self.kill_due:
            return
        self.kill_due = self._next_kill() if self.crew.kill_one(self.rng) else self.elapsed() + TICK_SECONDS

    def _next_kill(self) -> float:
        return self.elapsed() + self.pace.kill_every_seconds * self.rng.uniform(0.5, 1.5)

    def _tick(self, phase: str) -> None:
        self.crew.mend()
        if self.elapsed() >= self.look_due:
            self._look_now()
            self.progress.show(self._line(phase))
        time.sleep(TICK_SECONDS)

    def _look_now(self) -> None:
        before, self.look = self.look, _look(self.column)
        if self.look != before:
            self.changed = self.elapsed()
        self.look_due = self.elapsed() + LOOK_EVERY_SECONDS

    def _settled(self) -> bool:
        return not self.pending and self.look.waiting == 0 and (not self.look.left or self._calm())

    def _calm(self) -> bool:
        enough = CALM_WITH_BACKLOG_SECONDS if self.look.left else CALM_SECONDS
        return self.look.waiting == 0 and self.elapsed() - self.changed >= enough

    def _line(self, phase: str) -> str:
        look = self.look
        return (
            f"{self.column.title}: {phase} {self.elapsed():3.0f} s  placed {self.placed}/{len(self.orders)}"
            f"  charges {len(look.charges)}  bookings {len(look.bookings)}  uncertain {len(look.left)}"
            f"  waiting {look.waiting}  kills {self.crew.kills.total}"
        )


def run(column: Column, crew: Crew, load: Load, progress: Progress) -> Result:
    """Run the load while the crew is being killed, and count."""
    _await_crew(column.title, crew, progress)
    progress.say(f"{column.title}: {len(load.orders)} orders, {len(load.plan)} messages, two workers, kill -9")
    rng = random.Random(f"kills:{load.seed}")
    running = _Run(column, crew, load.orders, list(reversed(load.plan)), load.pace, rng, progress)
    running.chaos()
    running.quiet()
    return running.result()


def _await_crew(title: str, crew: Crew, progress: Progress) -> None:
    end = time.monotonic() + START_SECONDS_MAX
    while not crew.ready:
        crew.mend()
        if time.monotonic() > end:
            raise DemoError(
                f"the workers of {title} did not start within {START_SECONDS_MAX:.0f} s: is the machine busy?"
            )
        progress.show(f"{title}: starting workers")
        time.sleep(TICK_SECONDS)


def _look(column: Column) -> _Look:
    return _Look(
        charges=tuple(charge.order for charge in read_charges(column.charges_file)),
        bookings=tuple(sorted(orders_booked(column.engine, column.entries))),
        left=tuple(sorted(column.backlog(), key=lambda left: left.key)),
        waiting=_waiting(column.broker_url, column.module),
    )


def _waiting(broker_url: str, queue: str) -> int:
    """Return how many messages the broker holds for ``queue``, delivered but unacked ones included."""
    with Redis.from_url(broker_url) as broker:
        unacked: list[bytes] = list(broker.hvals("unacked"))
        queued = cast(int, broker.llen(queue))
        return queued + sum(1 for entry in unacked if json.loads(entry)[2] == queue)
