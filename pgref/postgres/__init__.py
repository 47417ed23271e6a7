"""The stores on PostgreSQL behind one façade: `Stores.open`."""

from __future__ import annotations

import sqlalchemy as sa

from pgref.clock import Clock
from pgref.postgres import schema as _schema
from pgref.postgres._connection import SETTLE_SECONDS, Database, engine_of
from pgref.postgres.effects import PostgresEffectStore
from pgref.postgres.schema import (
    drop_schema,
    ensure_schema,
    grant_application,
    migration_sql,
    new_schema,
    verify_schema,
)
from pgref.postgres.sinks import PostgresSink

__all__ = [
    "PostgresEffectStore",
    "PostgresSink",
    "Stores",
    "drop_schema",
    "ensure_schema",
    "grant_application",
    "migration_sql",
    "new_schema",
    "verify_schema",
]


class Stores:
    """All stores of one schema, over one engine. Safe to open before a fork and to use after it."""

    def __init__(
        self, engine: sa.Engine, *, schema: str, clock: Clock | None, settle_seconds: float = SETTLE_SECONDS
    ) -> None:
        self.engine = engine
        self.schema = _schema.valid_schema(schema)
        self.database = Database(engine, settle_seconds=settle_seconds)
        self.effects = PostgresEffectStore(self.database, schema=schema, clock=clock)
        self.sinks = PostgresSink(self.database, schema=schema)

    @classmethod
    def open(
        cls,
        source: sa.Engine | sa.URL | str,
        *,
        schema: str = "pgref",
        clock: Clock | None = None,
        settle_seconds: float = SETTLE_SECONDS,
    ) -> Stores:
        """Return the stores for an engine or DSN. Connects at first use. Raises `InvalidArgument`.

        Behind a pooler in transaction mode nothing is prepared on the server: that is found out at each new
        connection. ``?prepare_threshold=none`` in the DSN says so beforehand, ``connect_args`` in an engine of yours.
        ``clock`` is for tests; by default the database's own clock judges (G23). A call that was not answered is
        settled or given up after ``settle_seconds`` (G26).
        """
        return cls(engine_of(source), schema=schema, clock=clock, settle_seconds=settle_seconds)

    def ensure_schema(self) -> None:
        """Create or migrate the schema; see `pgref.postgres.ensure_schema`."""
        ensure_schema(self.engine, self.schema)

    def close(self) -> None:
        """Close the pooled connections of this process."""
        self.engine.dispose()
