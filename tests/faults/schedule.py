"""Two sessions step by step: A holds its locks, B is watched in the server's own catalog until it waits or is through.

Run as a module it is a crowd of processes that ask for one key at the same instant.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import datetime
from threading import Event
from typing import Any, ParamSpec, TypeVar

import psycopg
import sqlalchemy as sa

from pgref.clock import Clock
from pgref.contracts.effects import Action
from pgref.errors import PgrefError, Refused
from pgref.postgres import PostgresEffectStore, Stores
from pgref.postgres._connection import Database

__all__ = ["BARRIER", "TTL_SECONDS", "Stage", "Watch", "answer_of", "conninfo_of"]

BARRIER = 0x70677265
TTL_SECONDS = 60.0
PAUSE_SECONDS = 0.002
POLLS_MAX = 10_000

P = ParamSpec("P")
T = TypeVar("T")

# A resource that was made for a grant that then was refused has never been granted: it is as good as none.
_ROWS = """
SELECT jsonb_build_array(
  (SELECT jsonb_agg(to_jsonb(a) ORDER BY key) FROM {schema}.effect_action a),
  (SELECT jsonb_agg(to_jsonb(r) ORDER BY resource) FROM {schema}.effect_resource r
    WHERE action_key <> '' OR fence > (SELECT fence_floor FROM {schema}.effect_store)),
  (SELECT jsonb_agg(to_jsonb(h) - 'id' ORDER BY key, id) FROM {schema}.effect_history h),
  (SELECT jsonb_agg(to_jsonb(e) ORDER BY key, fence, holder) FROM {schema}.effect_evidence e),
  (SELECT jsonb_agg(fence_floor) FROM {schema}.effect_store),
  (SELECT jsonb_agg(value) FROM {schema}.data))::text
"""
_EMPTY = """
DELETE FROM {schema}.effect_action;
DELETE FROM {schema}.effect_resource;
DELETE FROM {schema}.effect_history;
DELETE FROM {schema}.effect_evidence;
DELETE FROM {schema}.data;
UPDATE {schema}.effect_store SET granted_before = '-infinity', fence_floor = 0;
"""


class _OpenSession(Database):
    """A psycopg connection as the database of a store: calls run in the transaction that is open on it, if any."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection

    def call(self, statement: str, parameters: Any, *, patient: bool = False) -> list[tuple[Any, ...]]:
        with self.connection.cursor(binary=True) as cursor:
            return cursor.execute(statement.encode(), parameters).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        """Open a transaction, or a savepoint in the one that is open."""
        with self.connection.transaction():
            yield self.connection


def answer_of(call: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> Any:
    """Return the answer of ``call``, or its refusal, as something that can be compared. Other errors are raised."""
    try:
        return _comparable(call(*args, **kwargs))
    except Refused as refusal:
        return _comparable(refusal)


def _comparable(value: Any) -> Any:
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    return (type(value).__name__, str(value)) if isinstance(value, PgrefError) else value


def conninfo_of(dsn: str) -> str:
    """Return the address as libpq reads it."""
    return sa.make_url(dsn).set(drivername="postgresql").render_as_string(hide_password=False)


class Watch:
    """A session that looks on from outside and never waits for a lock."""

    def __init__(self, dsn: str, schema: str) -> None:
        self._schema = f'"{schema}"'
        self._connection = psycopg.connect(conninfo_of(dsn), autocommit=True)

    def close(self) -> None:
        self._connection.close()

    def sql(self, text: str) -> bytes:
        return text.replace("{schema}", self._schema).encode()

    def one(self, query: str, *parameters: object) -> Any:
        """Return the single value of ``query``."""
        row = self._connection.execute(self.sql(query), parameters).fetchone()
        assert row is not None
        return row[0]

    def until(self, query: str, *parameters: object) -> None:
        """Ask until the answer is true."""
        pause = Event()
        for _ in range(POLLS_MAX):
            if self.one(query, *parameters):
                return
            pause.wait(PAUSE_SECONDS)
        raise AssertionError(f"never came true: {query} {parameters}")

    def rows(self) -> str:
        """Return every row of the store, as text."""
        return str(self.one(_ROWS))


class Stage:
    """Session A on a bare connection, session B as a store in a thread, and one that watches them."""

    def __init__(self, dsn: str, schema: str, clock: Clock | None = None) -> None:
        self.watch = Watch(dsn, schema)
        self.a = psycopg.connect(conninfo_of(dsn), autocommit=True)
        self.a.execute(self.watch.sql("CREATE TABLE IF NOT EXISTS {schema}.data (value text)"))
        self.first = PostgresEffectStore(_OpenSession(self.a), schema=schema, clock=clock)
        engine = sa.create_engine(dsn, pool_size=1, max_overflow=0)
        self.stores = Stores.open(engine, schema=schema, clock=clock)
        self.second = self.stores.effects
        with self.stores.database.raw() as connection:
            self.b_pid = connection.info.backend_pid
        self._thread = ThreadPoolExecutor(1)

    def close(self) -> None:
        self.a.close()
        self._thread.shutdown()
        self.stores.close()
        self.watch.close()

    def empty(self) -> None:
        """Forget every key."""
        self.a.execute(self.watch.sql(_EMPTY))

    def now(self) -> datetime:
        """Return the time of the database."""
        moment = self.watch.one("SELECT clock_timestamp()")
        assert isinstance(moment, datetime)
        return moment

    @contextmanager
    def holding(self, ending: str) -> Iterator[None]:
        """Open a transaction in session A; after the body it ends by COMMIT or ROLLBACK."""
        self.a.execute("BEGIN")
        try:
            yield
        except BaseException:
            self.a.execute("ROLLBACK")
            raise
        self.a.execute(ending.encode())

    def has_locked(self) -> bool:
        """Return whether A's transaction has locked or written any row: only that gives it an id."""
        return self.a.execute("SELECT pg_current_xact_id_if_assigned() IS NOT NULL").fetchone() == (True,)

    def start(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start ``call`` in session B."""
        return self._thread.submit(call, *args, **kwargs)

    def waits(self, call: Future[Any]) -> bool:
        """Return whether B waits for A (True) or is through (False), as soon as one of them is so."""
        for _ in range(POLLS_MAX):
            if self.watch.one("SELECT %s = ANY (pg_blocking_pids(%s))", self.a.info.backend_pid, self.b_pid):
                return True
            if wait([call], timeout=PAUSE_SECONDS).done:
                return False
        raise AssertionError("B neither waits for A nor ends")

    def blocked(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start ``call`` in session B and return when it waits for A."""
        future = self.start(call, *args, **kwargs)
        assert self.waits(future), future.result()
        return future


def _crowd(dsn: str, schema: str, count: int) -> None:
    """Fork ``count`` processes that wait for the barrier and then ask for one key; print what each was told."""
    children = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            _ask(dsn, schema)
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)


def _ask(dsn: str, schema: str) -> None:
    try:
        stores = Stores.open(dsn, schema=schema)
        with stores.database.raw() as connection:
            connection.execute("SELECT pg_advisory_lock_shared(%s)", (BARRIER,))
        answer = type(stores.effects.acquire(Action("crowd", "crowd"), TTL_SECONDS)).__name__
    except BaseException as error:
        answer = repr(error)
    os.write(sys.stdout.fileno(), f"{answer}\n".encode())


if __name__ == "__main__":
    _crowd(sys.argv[1], sys.argv[2], int(sys.argv[3]))
