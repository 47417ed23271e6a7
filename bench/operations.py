"""What is measured, and what it is measured against: each operation with its floor, on one pool."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

import sqlalchemy as sa

from pgref.contracts.effects import Action, Granted, Lease, RetrySafety
from pgref.postgres import Stores, ensure_schema

__all__ = ["CASES", "MANY", "Case", "Operations", "fresh_names", "prepare"]

UPSERT = "INSERT INTO floor VALUES (%s, 1, 'x') ON CONFLICT (key) DO UPDATE SET n = floor.n + 1"
UPDATE = "UPDATE floor SET n = n + 1 WHERE key = %s"
SELECT = "SELECT * FROM pgref.effect_action WHERE key = %s"
KNOWN = Action("known", "known", retry_safety=RetrySafety.SAFE)
BUSINESS_ROWS = [f"row {number}" for number in range(1000)]
MANY = 100
"""Keys in one call of the batch methods."""


@dataclass(frozen=True)
class Case:
    """An operation beside its floor, both by the name of their method in `Operations`."""

    title: str
    operation: str
    floor: str
    keys: int = 1
    """How many effects one call of the operation makes; its rate counts them."""


CASES = (
    Case("acquire+complete / 2 upsert commits", "acquire_complete", "two_upserts"),
    Case("replay / primary-key SELECT", "replay", "select"),
    Case("lookup / primary-key SELECT", "lookup", "select"),
    Case("database effect / 2 UPDATE commits", "database_effect", "two_updates"),
    Case("single-commit form / 1 UPDATE commit", "single_commit", "update"),
    Case(f"{MANY} in 2 calls / acquire+complete", "acquire_complete_many", "acquire_complete", keys=MANY),
)


class Operations:
    """Each takes a fresh name, a hexadecimal number; replay, lookup and select use known rows."""

    def __init__(self, stores: Stores) -> None:
        self.stores = stores
        self.effects = stores.effects

    def acquire_complete(self, name: str) -> None:
        action = Action(name, name)
        self.effects.complete(action, self._grant(action), "1")

    def acquire_complete_many(self, name: str) -> None:
        actions = [Action(key, key) for key in (f"{name}{number}" for number in range(MANY))]
        granted = self.effects.acquire_many(actions, 60)
        leases = [outcome.lease for outcome in granted if isinstance(outcome, Granted)]
        self.effects.complete_many([(action, lease, "1") for action, lease in zip(actions, leases, strict=True)])

    def two_upserts(self, name: str) -> None:
        self._floor(UPSERT, name)
        self._floor(UPSERT, name)

    def replay(self, _: str) -> None:
        self.effects.acquire(KNOWN, 60)

    def lookup(self, _: str) -> None:
        self.effects.lookup(KNOWN.key)

    def select(self, _: str) -> None:
        with self.stores.database.raw() as connection:
            connection.execute(SELECT, (KNOWN.key,)).fetchall()

    def database_effect(self, name: str) -> None:
        action = Action(name, name)
        lease = self._grant(action)
        with self.stores.database.transaction() as connection:
            connection.exec_driver_sql(UPDATE, (_business_row(name),))
            self.effects.complete_and_commit(connection, action, lease, "1")

    def single_commit(self, name: str) -> None:
        action = Action(name, name)
        with self.stores.database.transaction() as connection:
            granted = self.effects.acquire_within(connection, action)
            assert isinstance(granted, Granted)
            connection.exec_driver_sql(UPDATE, (_business_row(name),))
            self.effects.complete_acquired(connection, action, granted.lease, "1")

    def update(self, name: str) -> None:
        self._floor(UPDATE, _business_row(name))

    def two_updates(self, name: str) -> None:
        for half in (name, name[::-1]):
            self._floor(UPDATE, _business_row(half))

    def _grant(self, action: Action) -> Lease:
        outcome = self.effects.acquire(action, 60)
        assert isinstance(outcome, Granted)
        return outcome.lease

    def _floor(self, statement: str, name: str) -> None:
        with self.stores.database.raw() as connection:
            connection.execute(statement, (name,))


def fresh_names(count: int) -> list[str]:
    """Return names for that many operations."""
    return [uuid.uuid4().hex for _ in range(count)]


def _business_row(name: str) -> str:
    return BUSINESS_ROWS[int(name[:8], 16) % len(BUSINESS_ROWS)]


def prepare(dsn: str) -> None:
    """Make the schema, the rows of the floors and the known key."""
    engine = sa.create_engine(dsn)
    ensure_schema(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE floor (key text PRIMARY KEY, n int, note text) WITH (fillfactor = 70)")
        connection.exec_driver_sql("CREATE EXTENSION pg_stat_statements")
        for name in (KNOWN.key, *BUSINESS_ROWS):
            connection.exec_driver_sql(UPSERT, (name,))
    effects = Stores.open(engine).effects
    granted = effects.acquire(KNOWN, 60)
    assert isinstance(granted, Granted)
    effects.complete(KNOWN, granted.lease, "1")
    engine.dispose()
