"""SQLAlchemy engine in, psycopg connection out; one statement, one round trip, one transaction."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
import sqlalchemy as sa
from psycopg.pq import TransactionStatus

from pgref.errors import InvalidArgument, OutcomeUnknown, PgrefError, SchemaError, Unavailable
from pgref.postgres._errors import Failure, classify

__all__ = ["Database", "engine_of"]

SETTLE_SECONDS = 10.0
RECONNECT_PAUSE_SECONDS = 0.1

_databases: weakref.WeakSet[Database] = weakref.WeakSet()


def engine_of(source: sa.Engine | sa.URL | str) -> sa.Engine:
    """Return ``source`` if it is an engine, else an engine for that DSN. Raises `InvalidArgument`."""
    if isinstance(source, sa.Engine):
        if source.dialect.driver != "psycopg":
            raise InvalidArgument(f"engine must use the psycopg driver, not {source.dialect.driver}")
        return source
    try:
        url = sa.make_url(source)
    except sa.exc.ArgumentError:
        raise InvalidArgument("dsn must be a URL such as postgresql+psycopg://user@host/database") from None
    if url.drivername not in {"postgres", "postgresql", "postgresql+psycopg"}:
        raise InvalidArgument(f"dsn must begin with postgresql+psycopg://, not {url.drivername}://")
    return sa.create_engine(
        url.set(drivername="postgresql+psycopg"),
        pool_use_lifo=True,
        connect_args={
            "application_name": "pgref",
            "connect_timeout": 10,
            "keepalives_idle": 30,
            "keepalives_interval": 10,
            "keepalives_count": 3,
            "tcp_user_timeout": 60_000,
        }
        | dict(url.query),
    )


class Database:
    """Calls SQL functions on a pooled connection of the current process."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine
        self._reads_committed: bool | None = None
        _databases.add(self)

    def call(self, statement: str, parameters: Sequence[object]) -> list[tuple[Any, ...]]:
        """Run one function call in a READ COMMITTED transaction of its own and return its rows.

        A call whose answer was lost is asked again on another connection: each function gives a repeated question
        the same answer, under its row lock (G26). Raises `Unavailable` (nothing written), `OutcomeUnknown` (lost,
        and not settled within `SETTLE_SECONDS`), `SchemaError` or `InvalidArgument`.
        """
        lost: BaseException | None = None
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            try:
                return self._once(statement, parameters)
            except Unavailable as error:
                if lost is None:
                    raise
                if time.monotonic() > deadline:
                    raise OutcomeUnknown(f"the answer was lost and the database stayed away: {error}") from lost
                time.sleep(RECONNECT_PAUSE_SECONDS)
            except psycopg.Error as error:
                failure = classify(error)
                if failure is Failure.AMBIGUOUS:
                    lost = error
                elif failure is not Failure.REPEAT:
                    raise _translated(error, failure) from error
                if time.monotonic() > deadline:
                    if lost is None:
                        raise Unavailable(f"given up after {SETTLE_SECONDS:.0f} s: {error}") from error
                    raise OutcomeUnknown(f"the answer was lost: {error}") from error

    def _once(self, statement: str, parameters: Sequence[object]) -> list[tuple[Any, ...]]:
        with self.raw() as connection, connection.cursor(binary=True) as cursor:
            if self._reads_committed is None:
                isolation = cursor.execute("SHOW default_transaction_isolation").fetchone()
                self._reads_committed = isolation == ("read committed",)
            if self._reads_committed:
                return cursor.execute(statement, parameters).fetchall()
            with connection.pipeline():
                connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
                cursor.execute(statement, parameters)
                connection.execute("COMMIT")
            return cursor.fetchall()

    @contextmanager
    def raw(self) -> Iterator[psycopg.Connection[Any]]:
        """Lend a psycopg connection in autocommit mode. One that an error left in doubt leaves the pool."""
        fairy = self._checkout()
        connection: Any = fairy.driver_connection
        try:
            autocommit = connection.autocommit
            if not autocommit:
                connection.autocommit = True
            yield connection
            if not autocommit:
                connection.autocommit = False
        except BaseException:
            if connection.info.transaction_status != TransactionStatus.IDLE:
                fairy.invalidate()
            else:
                connection.autocommit = autocommit
            raise
        finally:
            fairy.close()

    def _checkout(self) -> sa.PoolProxiedConnection:
        try:
            return self.engine.raw_connection()
        except (sa.exc.DBAPIError, sa.exc.TimeoutError, psycopg.Error) as error:
            raise unreachable(self.engine, error) from error

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """Open a READ COMMITTED transaction that commits when the block ends well.

        READ COMMITTED whatever the engine says: under a frozen snapshot the renewal of a lease would make its own
        completion fail. Raises `Unavailable` when there is no connection.
        """
        try:
            connection = self.engine.connect().execution_options(isolation_level="READ COMMITTED")
        except (sa.exc.DBAPIError, sa.exc.TimeoutError) as error:
            raise unreachable(self.engine, error) from error
        with connection:
            try:
                with connection.begin():
                    yield connection
            except BaseException:
                # After a signal or a lost connection nobody knows what the session is in the middle of.
                if not connection.invalidated and not connection.closed and _in_doubt(connection):
                    connection.invalidate()
                raise


def unreachable(engine: sa.Engine, error: BaseException) -> Unavailable:
    """Return a one-line `Unavailable` that names the database without its password."""
    reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
    return Unavailable(f"database {engine.url.render_as_string(hide_password=True)} is not reachable: {reason}")


def _in_doubt(connection: sa.Connection) -> bool:
    driver: Any = connection.connection.driver_connection
    return bool(driver.info.transaction_status != TransactionStatus.IDLE)


def _translated(error: psycopg.Error, failure: Failure) -> PgrefError | psycopg.Error:
    text = str(error).strip().splitlines()[0]
    match failure:
        case Failure.UNAVAILABLE:
            return Unavailable(text)
        case Failure.SCHEMA:
            return SchemaError(f"{text}: run the migrations, and grant the application its role")
        case Failure.ARGUMENT:
            return InvalidArgument(text)
        case _:
            return error


def _forget_parents_connections() -> None:
    for database in list(_databases):
        database.engine.dispose(close=False)


os.register_at_fork(after_in_child=_forget_parents_connections)
