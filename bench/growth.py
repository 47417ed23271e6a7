"""What a grown store, and a worker that has run for long, cost."""

from __future__ import annotations

import resource
import statistics
import time
from typing import NamedTuple

import sqlalchemy as sa

from bench.operations import Operations, fresh_names
from pgref.contracts.effects import Action, Granted
from pgref.postgres import Stores

__all__ = ["HotUpdates", "acquire_seconds", "fill", "hot_updates", "memory_growth_bytes"]

FILL = """
WITH made AS (
  INSERT INTO pgref.effect_resource (fence, granted_fence, resource, action_key)
  SELECT 1, 1, md5(n::text), md5(n::text) FROM generate_series(%(low)s::int, %(high)s::int) n RETURNING resource
)
INSERT INTO pgref.effect_action (
  fence, created_at, granted_at, expires_at, completed_at, holder, attempt, state, retry_safe, key, resource, result)
SELECT 1, t, t, t, t, gen_random_uuid(), 1, 3, true, resource, resource, '1'
FROM made, LATERAL (SELECT clock_timestamp() AS t) now
"""


class HotUpdates(NamedTuple):
    """Updates of a table, and how many of them touched no index."""

    table: str
    updates: int
    hot: int


def fill(stores: Stores, low: int, high: int) -> None:
    """Add done keys by number, and let the server settle."""
    with stores.engine.begin() as connection:
        connection.exec_driver_sql(FILL, {"low": low, "high": high})
    with stores.database.raw() as connection_:
        connection_.execute("VACUUM (ANALYZE) pgref.effect_action, pgref.effect_resource")


def acquire_seconds(stores: Stores, count: int) -> float:
    """Return the median time of granting a new key, and complete it."""
    times = []
    for name in fresh_names(count):
        action = Action(name, name)
        started = time.perf_counter()
        outcome = stores.effects.acquire(action, 60)
        times.append(time.perf_counter() - started)
        assert isinstance(outcome, Granted)
        stores.effects.complete(action, outcome.lease, "1")
    return statistics.median(times)


def memory_growth_bytes(stores: Stores, effects: int) -> int:
    """Return by how much the most memory this process has ever used grows over so many effects."""
    operations = Operations(stores)
    for name in fresh_names(1000):
        operations.acquire_complete(name)
    before = _peak_bytes()
    for _ in range(effects):
        operations.acquire_complete(*fresh_names(1))
    return _peak_bytes() - before


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def hot_updates(engine: sa.Engine) -> list[HotUpdates]:
    """Return what the server has counted for the gate's tables."""
    query = """SELECT relname, n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables
        WHERE schemaname = 'pgref' AND n_tup_upd > 0 ORDER BY relname"""
    with engine.connect() as connection:
        return [HotUpdates(*row) for row in connection.exec_driver_sql(query)]
