"""The demo's view into the gate: its tables, and what it left for a person."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Engine

from examples.worker.tally import Left
from pgref.postgres import Stores, ensure_schema

__all__ = ["backlog", "prepare"]

BACKLOG_SHOWN_MAX = 100_000


def prepare(engine: Engine) -> None:
    """Create the gate's tables."""
    ensure_schema(engine)


def backlog(engine: Engine) -> Callable[[], list[Left]]:
    """Return a function that lists the uncertain keys with their reasons."""
    effects = Stores.open(engine).effects
    return lambda: [Left(record.key, record.reason or "") for record in effects.backlog(BACKLOG_SHOWN_MAX)]
