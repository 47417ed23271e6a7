"""A fenced sink in PostgreSQL: fence and data commit together (G30-G34)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import psycopg
import sqlalchemy as sa

from pgref.errors import FenceStale, cause_of
from pgref.keys import shown, valid_callable, valid_fence, valid_key
from pgref.postgres._connection import Database
from pgref.postgres._errors import rolled_back
from pgref.postgres.schema import quoted

__all__ = ["PostgresSink"]

T = TypeVar("T")


class PostgresSink:
    """`FencedSink` whose ``write`` gets a SQLAlchemy connection inside the fenced transaction."""

    def __init__(self, database: Database, *, schema: str = "pgref") -> None:
        self._database = database
        self._schema = quoted(schema)

    def write_fenced(self, resource: str, fence: int, write: Callable[[sa.Connection], T]) -> T:
        valid_key(resource, "resource")
        valid_fence(fence)
        valid_callable(write, "write")
        with self._database.transaction() as connection:
            self._admit(connection, resource, fence)
            return write(connection)

    def seal(self, resource: str, fence: int) -> None:
        """Raise the seen fence to ``fence`` without writing, so that lower writers are refused from now on (G27)."""
        self.write_fenced(resource, fence, lambda _: None)

    def seen_fence(self, resource: str) -> int:
        rows = self._database.call(f"SELECT {self._schema}.sink_seen(%s)", (valid_key(resource, "resource"),))
        return int(rows[0][0])

    def _admit(self, connection: sa.Connection, resource: str, fence: int) -> None:
        # Not through SQLAlchemy, which would wrap what a signal handler raises meanwhile.
        cursor: Any = connection.connection.cursor()
        try:
            cursor.execute(f"SELECT {self._schema}.sink_admit(%s, %s)", (resource, fence))
        except psycopg.Error as error:
            ours = rolled_back(error)
            raise ours from cause_of(ours, error)
        (seen,) = cursor.fetchone()
        if seen > fence:
            raise FenceStale(f"{shown(resource)} has seen fence {seen}", fence=fence, seen=seen)
