"""What the fault tests look at: rows without their times, answers without their chance, pools without exception."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from datetime import datetime
from enum import Enum
from typing import Any
from uuid import UUID

import psycopg
import sqlalchemy as sa
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from pgref.errors import PgrefError

__all__ = ["Observer", "assert_clean", "plain"]

_ROWS = """
SELECT 'action', key, resource, fence, attempt, state, released, expired, ruling, reason, result,
    expires_at - granted_at > interval '500 seconds', due_at > granted_at + interval '5 seconds',
    uncertain_at IS NOT NULL, completed_at IS NOT NULL, reconcile_fence,
    looks, parked, note FROM {0}.effect_action;
SELECT 'resource', resource, fence, granted_fence, action_key FROM {0}.effect_resource WHERE action_key <> '';
SELECT 'history', key, event, fence, "by", why FROM {0}.effect_history ORDER BY id;
SELECT 'evidence', key, fence, result FROM {0}.effect_evidence;
SELECT 'floor', fence_floor FROM {0}.effect_store;
SELECT 'sink', resource, fence FROM {0}.sink_fence;
SELECT 'data', value FROM {0}.fault_data;
"""
_EMPTY = """
DELETE FROM {0}.effect_action;
DELETE FROM {0}.effect_resource;
DELETE FROM {0}.effect_history;
DELETE FROM {0}.effect_evidence;
DELETE FROM {0}.sink_fence;
DELETE FROM {0}.fault_data;
UPDATE {0}.effect_store SET granted_before = '-infinity', fence_floor = 0;
"""


class Observer:
    """A connection of its own that reads a schema, and what the server is at."""

    def __init__(self, conninfo: str, schema: str) -> None:
        self.connection = psycopg.connect(conninfo, autocommit=True, row_factory=tuple_row, application_name="observer")
        self.schema = schema
        self.connection.execute(self._sql("CREATE TABLE IF NOT EXISTS {0}.fault_data (value text)"))

    def close(self) -> None:
        self.connection.close()

    def _sql(self, text: str) -> psycopg.sql.Composed:
        return psycopg.sql.SQL(text).format(psycopg.sql.Identifier(self.schema))

    def empty(self) -> None:
        """Forget every key."""
        self.connection.execute(self._sql(_EMPTY))

    def rows(self) -> list[tuple[Any, ...]]:
        """Return every row."""
        cursor = self.connection.execute(self._sql(_ROWS))
        return [row for _ in cursor.results() for row in sorted(cursor.fetchall(), key=repr)]

    def one(self, query: str, *parameters: object) -> Any:
        """Return the single value of ``query``."""
        row = self.connection.execute(query.encode(), parameters).fetchone()
        assert row is not None
        return row[0]

    def until(self, query: str, *parameters: object) -> None:
        """Ask until the answer is true: waiting is on the server's own state."""
        while not self.one(query, *parameters):
            pass

    def until_past(self, moment: datetime) -> None:
        """Let the database's clock go past ``moment``."""
        self.until("SELECT clock_timestamp() > %s", moment)

    def until_gone(self, application: str) -> None:
        """Let every session of ``application`` end, also those whose client has gone."""
        self.until("SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = %s", application)


def plain(value: Any) -> Any:
    """Return an answer or error without times, holders and lengths of time."""
    if isinstance(value, PgrefError):
        return type(value).__name__
    if isinstance(value, datetime | UUID | float):
        return type(value).__name__
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, *(plain(getattr(value, field.name)) for field in fields(value))
    return value.value if isinstance(value, Enum) else value


def assert_clean(engine: sa.Engine) -> None:
    """Check that no connection is lent, and that every pooled one is idle, in its first mode, and unlimited."""
    pool = engine.pool
    assert isinstance(pool, sa.QueuePool)
    assert pool.checkedout() == 0
    idle = [engine.raw_connection() for _ in range(pool.checkedin())]
    for one in idle:
        connection: Any = one.driver_connection
        assert connection.pgconn.transaction_status == TransactionStatus.IDLE
        assert connection.pgconn.pipeline_status == PipelineStatus.OFF
        assert not connection.autocommit
        assert "wait" not in vars(connection)
    for one in idle:
        one.close()
