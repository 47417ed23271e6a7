"""Counts what happened to the orders of one column: pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Kills", "Left", "Result", "Tally", "order_of", "table", "tally", "task_of", "verdict", "wrong"]


@dataclass(frozen=True, slots=True)
class Left:
    """A key that was left uncertain: a person has to look."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Tally:
    """``duplicate_…`` counts what is too many; ``lost_…`` orders without any, which nobody was told about either."""

    orders: int
    charges: int
    bookings: int
    duplicate_charges: int
    duplicate_bookings: int
    lost_charges: int
    lost_bookings: int
    uncertain: int

    @property
    def duplicates(self) -> int:
        return self.duplicate_charges + self.duplicate_bookings

    @property
    def lost(self) -> int:
        return self.lost_charges + self.lost_bookings


@dataclass(frozen=True, slots=True)
class Kills:
    """What was killed."""

    pool_processes: int = 0
    workers: int = 0

    @property
    def total(self) -> int:
        return self.pool_processes + self.workers

    def __add__(self, other: Kills) -> Kills:
        return Kills(self.pool_processes + other.pool_processes, self.workers + other.workers)


@dataclass(frozen=True, slots=True)
class Result:
    """One column of the table."""

    title: str
    tally: Tally
    kills: Kills
    left: Sequence[Left]
    seconds: float
    waiting: int
    """Messages that the broker still held when the time was up."""
    wrong: Sequence[str] = ()
    """Each order that was charged or booked twice, or lost."""


def order_of(key: str) -> int | None:
    """Return the order that an effect's key names."""
    found = re.search(r"order:(\d+)$", key)
    return int(found[1]) if found else None


def task_of(key: str) -> str:
    """Return the task that an effect's key names: its scope is the task's name."""
    return "book" if "shop.book" in key else "charge"


def tally(orders: Collection[int], charges: Sequence[int], bookings: Sequence[int], left: Collection[Left]) -> Tally:
    """Count. ``charges`` and ``bookings`` name the order of each one applied, ``left`` the keys left uncertain."""
    return Tally(
        orders=len(orders),
        charges=len(charges),
        bookings=len(bookings),
        duplicate_charges=_too_many(charges),
        duplicate_bookings=_too_many(bookings),
        lost_charges=_missing(orders, charges, _orders_left(left, "charge")),
        lost_bookings=_missing(orders, bookings, _orders_left(left, "book")),
        uncertain=len(left),
    )


def _too_many(applied: Iterable[int]) -> int:
    return sum(times - 1 for times in Counter(applied).values())


def _missing(orders: Collection[int], applied: Collection[int], known: Collection[int | None]) -> int:
    return len(set(orders) - set(applied) - set(known))


def _orders_left(left: Iterable[Left], task: str) -> set[int | None]:
    return {order_of(item.key) for item in left if task_of(item.key) == task}


def wrong(
    orders: Collection[int], charges: Sequence[int], bookings: Sequence[int], left: Collection[Left]
) -> list[str]:
    """Name each order with a duplicate or a loss."""
    found = []
    for task, applied in (("charge", Counter(charges)), ("book", Counter(bookings))):
        known = _orders_left(left, task)
        found += [f"order {order}: {task} took place {n} times" for order, n in sorted(applied.items()) if n > 1]
        found += [f"order {n}: {task} is lost" for n in sorted(orders) if not applied[n] and n not in known]
    return found


def verdict(fenced: Result, plain: Result) -> tuple[int, str]:
    """Return the exit code and one sentence."""
    ours, theirs = fenced.tally, plain.tally
    if ours.duplicates or ours.lost:
        return 1, f"FAILED: {ours.duplicates} duplicates and {ours.lost} lost under the gate, there must be none"
    if not theirs.duplicates and not theirs.lost:
        return 0, "Plain Celery came through unharmed: the demo was too gentle, try a smaller --kill-every"
    if ours.uncertain:
        return (
            0,
            f"Nothing took place twice or was lost under the gate; {ours.uncertain} wait for a person, listed above",
        )
    return 0, "Everything took place exactly once under the gate"


def table(columns: Sequence[Result]) -> str:
    """Return the columns side by side as text."""
    rows = [("", *(column.title for column in columns))]
    rows += [(name, *(cells[index] for cells in map(_cells, columns))) for index, name in enumerate(_ROWS)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    head, *rest = (_line(row, widths) for row in rows)
    return "\n".join([head, "-" * len(head), *rest])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
    return "  ".join([cells[0].ljust(widths[0]), *padded[1:]])


_ROWS = (
    "orders",
    "charges seen by the processor",
    "bookings",
    "duplicates",
    "lost",
    "left uncertain",
    "kills",
    "seconds",
)


def _cells(result: Result) -> tuple[str, ...]:
    counts, kills = result.tally, result.kills
    return (
        str(counts.orders),
        str(counts.charges),
        str(counts.bookings),
        _split(counts.duplicates, counts.duplicate_charges, "charges", counts.duplicate_bookings, "bookings"),
        _split(counts.lost, counts.lost_charges, "charges", counts.lost_bookings, "bookings"),
        str(counts.uncertain),
        _split(kills.total, kills.pool_processes, "pool", kills.workers, "worker"),
        f"{result.seconds:.0f}",
    )


def _split(total: int, one: int, one_name: str, other: int, other_name: str) -> str:
    return f"{total} ({one} {one_name}, {other} {other_name})" if total else "0"
