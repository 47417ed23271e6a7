"""SQLAlchemy engine in, psycopg connection out; one statement, one round trip, one transaction."""

from __future__ import annotations

import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import psycopg
import sqlalchemy as sa
from psycopg.pq import PipelineStatus, TransactionStatus

from pgref.errors import InvalidArgument, OutcomeUnknown, PgrefError, Unavailable, cause_of
from pgref.keys import valid_ttl
from pgref.postgres._errors import Failure, classify, first_line, translated
from pgref.signals import held, hold, let_through

__all__ = ["Database", "engine_of"]

SETTLE_SECONDS = 10.0
CONNECT_SECONDS = 5
PATIENT_SECONDS = 600.0
LOOK_UP_SECONDS = 0.1
RECONNECT_PAUSE_SECONDS = 0.1
PREPARE_THRESHOLD_OF_PSYCOPG = 5
BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"
_CURSOR = "pgref_cursor"
_LENT = "pgref_lent"

L = TypeVar("L", bound="_Loan")

_databases: weakref.WeakSet[Database] = weakref.WeakSet()


def engine_of(source: sa.Engine | sa.URL | str) -> sa.Engine:
    """Return ``source`` if it is an engine, else an engine for that DSN. Raises `InvalidArgument`."""
    if isinstance(source, sa.Engine):
        if source.dialect.driver != "psycopg":
            raise InvalidArgument(f"engine must use the psycopg driver, not {source.dialect.driver}")
        return _listening(source)
    if not isinstance(source, str | sa.URL):
        raise InvalidArgument(f"source must be an engine, a URL or a str, not {type(source).__name__}")
    try:
        url = sa.make_url(source)
    except (sa.exc.ArgumentError, ValueError):
        raise InvalidArgument("dsn must be a URL such as postgresql+psycopg://user@host/database") from None
    if url.drivername not in {"postgres", "postgresql", "postgresql+psycopg"}:
        raise InvalidArgument(f"dsn must begin with postgresql+psycopg://, not {url.drivername}://")
    engine = sa.create_engine(
        url.set(drivername="postgresql+psycopg"),
        pool_use_lifo=True,
        connect_args={
            "application_name": "pgref",
            "connect_timeout": CONNECT_SECONDS,
            "keepalives_idle": 30,
            "keepalives_interval": 10,
            "keepalives_count": 3,
            "tcp_user_timeout": 60_000,
        }
        | _connect_options(url),
    )
    return _listening(engine)


def _connect_options(url: sa.URL) -> dict[str, object]:
    """Return the query of the URL for psycopg, whose ``prepare_threshold`` is a number or None, which a URL spells."""
    options: dict[str, object] = dict(url.query)
    threshold = options.get("prepare_threshold")
    if threshold == "none":
        options["prepare_threshold"] = None
    elif threshold is not None:
        if not (isinstance(threshold, str) and threshold.isascii() and threshold.isdigit()):
            raise InvalidArgument("prepare_threshold must be a whole number or none")
        options["prepare_threshold"] = int(threshold)
    return options


def _listening(engine: sa.Engine) -> sa.Engine:
    # The same listener again is one listener.
    sa.event.listen(engine, "connect", _prepare_nothing_behind_a_pooler)
    sa.event.listen(engine, "do_execute", _begin_with_the_first_statement)
    return engine


def _prepare_nothing_behind_a_pooler(connection: Any, _record: object) -> None:
    """Prepare no statements where another server session may answer the next one.

    Clients name prepared statements alike (``_pg3_0``), so one could run what another has prepared. A pooler such as
    PgBouncer hands out process numbers of its own. A threshold that is not psycopg's default is left as it is.
    """
    if connection.prepare_threshold != PREPARE_THRESHOLD_OF_PSYCOPG:
        return
    _limit(connection, time.monotonic() + CONNECT_SECONDS)
    autocommit, connection.autocommit = connection.autocommit, True
    try:
        row = connection.execute("SELECT pg_backend_pid()").fetchone()
        connection.autocommit = autocommit
    except BaseException:
        connection.close()
        raise
    _unlimit(connection)
    if row != (connection.info.backend_pid,):
        connection.prepare_threshold = None


def _begin_with_the_first_statement(cursor: Any, statement: str, parameters: Any, context: Any) -> bool:
    """Send BEGIN and the first statement of a transaction that `Database.transaction` lent in one round trip.

    Not those without parameters: they may be several in one text, which a pipeline does not take.
    """
    if not parameters or type(cursor) is not psycopg.Cursor or not _is_idle(cursor.connection):
        return False
    if not context.root_connection.get_execution_options().get(_LENT):
        return False
    _begin_with(cursor, statement, parameters)
    return True


def _begin_with(cursor: Any, statement: str, parameters: Sequence[object]) -> None:
    # In autocommit mode, or psycopg sends a BEGIN of its own and waits for the answer. What follows is in the
    # transaction all the same.
    cursor.connection.autocommit = True
    with _pipeline(cursor.connection):
        cursor.connection.execute(BEGIN)
        cursor.execute(statement, parameters)


@contextmanager
def _pipeline(connection: Any) -> Iterator[None]:
    """Send what the block executes together. What interrupts it is raised, not that leaving it then fails."""
    handled = sys.exc_info()[1]
    try:
        with connection.pipeline():
            yield
    except psycopg.OperationalError as error:
        interruption = error.__context__
        if interruption is None or interruption is handled:
            raise
        raise interruption from error


class _Loan(Protocol):
    """Something borrowed from the pool."""

    def give_back(self) -> None:
        """Return it to the pool if it is idle, out of the pool if not: nobody knows what it is in the middle of."""


class Database:
    """Calls SQL functions on a pooled connection of the current process.

    Limits of time: a call ends ``settle_seconds`` after its start, and the time that the engine takes to notice that
    it cannot connect. Half of that is what one try waits for its answer. The functions wait for locks for less still
    (`lock_timeout` in sql/effects.sql), so that of a row held for long the server says that nothing was written.
    """

    def __init__(self, engine: sa.Engine, *, settle_seconds: float = SETTLE_SECONDS) -> None:
        self.engine = engine
        self.settle_seconds = valid_ttl(settle_seconds, "settle_seconds")
        self._reads_committed: bool | None = None
        _databases.add(self)

    def call(self, statement: str, parameters: Sequence[object], *, patient: bool = False) -> list[tuple[Any, ...]]:
        """Run one function call in a READ COMMITTED transaction of its own and return its rows.

        A call whose answer was lost or late is asked again on another connection: each function gives a repeated
        question the same answer, under its row lock (G26). A ``patient`` call waits `PATIENT_SECONDS` for its answer.
        Raises `Unavailable` (nothing written), `OutcomeUnknown` (lost, and not settled in time), `SchemaError` or
        `InvalidArgument`.
        """
        lost = False
        deadline = time.monotonic() + self.settle_seconds
        while True:
            try:
                return self._once(statement, parameters, self._answer_by(deadline, patient=patient))
            except (Unavailable, psycopg.Error) as error:
                failure = classify(error)
                if not lost and failure not in {Failure.AMBIGUOUS, Failure.REPEAT}:
                    ours = translated(error)
                    raise ours from cause_of(ours, error)
                if patient and not lost:
                    deadline = time.monotonic() + self.settle_seconds
                again = lost and failure is not Failure.REPEAT
                lost = lost or failure is Failure.AMBIGUOUS
                if time.monotonic() > deadline:
                    raise _given_up(error, lost=lost) from error
            if again:
                time.sleep(RECONNECT_PAUSE_SECONDS)

    def _answer_by(self, deadline: float = math.inf, *, patient: bool = False) -> float:
        now = time.monotonic()
        return now + PATIENT_SECONDS if patient else min(deadline, now + self.settle_seconds / 2)

    def _once(self, statement: str, parameters: Sequence[object], answer_by: float) -> list[tuple[Any, ...]]:
        with _lent(_RawLoan, self.engine) as loan:
            connection, cursor = loan.connection, loan.cursor
            _limit(connection, answer_by)
            if self._reads_committed is None:
                isolation = cursor.execute("SHOW default_transaction_isolation").fetchone()
                self._reads_committed = isolation == ("read committed",)
            if self._reads_committed:
                return cursor.execute(statement, parameters).fetchall()
            with _pipeline(connection):
                connection.execute(BEGIN)
                cursor.execute(statement, parameters)
                connection.execute("COMMIT")
            return cursor.fetchall()

    @contextmanager
    def raw(self) -> Iterator[psycopg.Connection[Any]]:
        """Lend a psycopg connection in autocommit mode. One that an error left in doubt leaves the pool."""
        with _lent(_RawLoan, self.engine) as loan:
            yield loan.connection

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """Open a READ COMMITTED transaction that commits when the block ends well.

        READ COMMITTED whatever the engine says: under a frozen snapshot the renewal of a lease would make its own
        completion fail. Signals wait while it commits. Raises `Unavailable` when there is no connection,
        `OutcomeUnknown` when the commit was not answered, and what the block raises.
        """
        with _lent(_SessionLoan, self.engine) as loan:
            connection, driver = loan.connection, loan.driver
            committing = False
            transaction = connection.begin()
            try:
                yield connection
                with held():
                    _limit(driver, self._answer_by())
                    committing = True
                    transaction.commit()
            except BaseException as error:
                self._roll_back(connection, driver)
                if committing and isinstance(error, sa.exc.DBAPIError) and classify(error) is Failure.AMBIGUOUS:
                    raise OutcomeUnknown(f"the commit was not answered: {first_line(error)}") from error
                raise

    def _roll_back(self, connection: sa.Connection, driver: Any) -> None:
        """Roll back without a word: the error that led here is the one to tell."""
        with held():
            _limit(driver, self._answer_by())
            with suppress(psycopg.Error):
                driver.rollback()
            if not _is_idle(driver) and not connection.closed:
                connection.invalidate()

    def ask(
        self, connection: sa.Connection | psycopg.Connection[Any], statement: str, parameters: Sequence[object]
    ) -> tuple[Any, ...]:
        """Return the row of a statement in the caller's transaction, as whose first one it carries the BEGIN with it.

        On a connection lent by `transaction`, this and each later answer is waited for as long as one try of `call`.
        Raises the driver's errors.
        """
        driver: Any = connection
        lent = False
        if isinstance(connection, sa.Connection):
            driver = connection.connection.driver_connection
            lent = bool(connection.get_execution_options().get(_LENT))
        if lent:
            _limit(driver, each_seconds=self.settle_seconds / 2)
        with driver.cursor() as cursor:
            if lent and _is_idle(driver):
                _begin_with(cursor, statement, parameters)
            else:
                cursor.execute(statement, parameters)
            row: tuple[Any, ...] = cursor.fetchone()
            return row

    def commit(self, connection: sa.Connection, statement: str, parameters: Sequence[object]) -> None:
        """Run a last statement and COMMIT in one round trip, on a connection lent by `transaction`.

        Signals wait meanwhile. Raises `OutcomeUnknown` when that was not answered, and else the driver's errors:
        then nothing is committed.
        """
        driver: Any = connection.connection.driver_connection
        with held():
            _limit(driver, self._answer_by())
            try:
                if _is_idle(driver):
                    driver.autocommit = True  # nothing came before it
                    driver.execute(statement, parameters)
                    return
                with _pipeline(driver):
                    driver.execute(statement, parameters)
                    driver.execute("COMMIT")
            except psycopg.Error as error:
                if classify(error) is Failure.AMBIGUOUS:
                    raise OutcomeUnknown(f"the commit was not answered: {first_line(error)}") from error
                raise


class _RawLoan:
    """A psycopg connection in autocommit mode."""

    def __init__(self, engine: sa.Engine) -> None:
        self._fairy = _checked_out(engine)
        connection: Any = self._fairy.driver_connection
        self._autocommit = connection.autocommit
        if not self._autocommit:
            connection.autocommit = True
        self.connection: psycopg.Connection[Any] = connection

    @property
    def cursor(self) -> psycopg.Cursor[Any]:
        """A cursor that stays with the connection: making one costs half as much as a call with it."""
        kept = self._fairy.info
        cursor: psycopg.Cursor[Any] | None = kept.get(_CURSOR)
        if cursor is None:
            cursor = kept[_CURSOR] = self.connection.cursor(binary=True)
        return cursor

    def give_back(self) -> None:
        _unlimit(self.connection)
        if not _is_idle(self.connection):
            self._fairy.invalidate()
        elif not self._autocommit:
            self.connection.autocommit = False
        self._fairy.close()


class _SessionLoan:
    """A SQLAlchemy connection at READ COMMITTED."""

    def __init__(self, engine: sa.Engine) -> None:
        with _connecting(engine):
            connection = engine.connect()
        self.connection = connection.execution_options(**{_LENT: True})
        driver: Any = connection.connection.driver_connection
        self.driver = driver
        self._before = driver.autocommit, driver.isolation_level
        self._set(autocommit=False, isolation_level=psycopg.IsolationLevel.READ_COMMITTED)

    def give_back(self) -> None:
        _unlimit(self.driver)
        if not self.connection.closed and not self.connection.invalidated:
            if _is_idle(self.driver):
                autocommit, isolation_level = self._before
                self._set(autocommit=autocommit, isolation_level=isolation_level)
            else:
                self.connection.invalidate()
        self.connection.close()

    def _set(self, *, autocommit: bool, isolation_level: psycopg.IsolationLevel | None) -> None:
        if self.driver.autocommit != autocommit:
            self.driver.autocommit = autocommit
        if self.driver.isolation_level != isolation_level:
            self.driver.isolation_level = isolation_level


@contextmanager
def _lent(borrow: Callable[[sa.Engine], L], engine: sa.Engine) -> Iterator[L]:
    """Lend what is borrowed and give it back, also when a signal handler raises, wherever it does so.

    Every instruction that could be interrupted stands in a block whose `finally` gives the loan back.
    """
    loan: L | None = None
    mask = None
    try:
        mask = hold()
        try:
            loan = borrow(engine)
        finally:
            let_through(mask)
        yield loan
    finally:
        mask = None
        try:
            mask = hold()
        finally:
            try:
                if loan is not None:
                    loan.give_back()
            finally:
                let_through(mask)


def _checked_out(engine: sa.Engine) -> sa.PoolProxiedConnection:
    while True:
        with _connecting(engine):
            fairy = engine.raw_connection()
        connection: Any = fairy.driver_connection
        if not connection.closed:
            return fairy
        fairy.invalidate()
        fairy.close()


@contextmanager
def _connecting(engine: sa.Engine) -> Iterator[None]:
    try:
        yield
    except (sa.exc.DBAPIError, sa.exc.TimeoutError, psycopg.Error) as error:
        raise unreachable(engine, error) from error


def _is_idle(connection: Any) -> bool:
    driver = connection.pgconn
    return bool(driver.transaction_status == TransactionStatus.IDLE and driver.pipeline_status == PipelineStatus.OFF)


def _limit(connection: Any, answer_by: float = math.inf, *, each_seconds: float = math.inf) -> None:
    """From now on take the connection as lost when an answer has not come by ``answer_by`` or after ``each_seconds``.

    A server that went without a word, or a pooler that holds on to a dead one, never closes it. All waiting of a
    psycopg connection goes through its `wait`, whose timeout is an error without SQLSTATE.
    """
    wait: Callable[..., Any] = type(connection).wait

    def limited(answer: Generator[Any, Any, Any], interval: float = LOOK_UP_SECONDS, timeout: float = math.inf) -> Any:
        return wait(connection, answer, interval, min(timeout, each_seconds, answer_by - time.monotonic()))

    connection.wait = limited


def _unlimit(connection: Any) -> None:
    vars(connection).pop("wait", None)


def _given_up(error: Exception, *, lost: bool) -> PgrefError:
    if lost:
        return OutcomeUnknown(f"the answer was lost: {first_line(error)}")
    return Unavailable(f"given up: {first_line(error)}")


def unreachable(engine: sa.Engine, error: Exception) -> Unavailable:
    """Return a one-line `Unavailable` that names the database without its password."""
    where = engine.url.render_as_string(hide_password=True)
    return Unavailable(f"database {where} is not reachable: {first_line(error)}")


def _forget_parents_connections() -> None:
    for database in list(_databases):
        database.engine.dispose(close=False)


os.register_at_fork(after_in_child=_forget_parents_connections)
