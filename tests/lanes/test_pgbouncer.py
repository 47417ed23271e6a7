"""Through PgBouncer in transaction mode, where any server session may answer the next statement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from pgref.contracts.effects import Action, Done, Granted, Resolution, State
from pgref.errors import InvalidArgument, Unavailable
from pgref.postgres import Stores, drop_schema, verify_schema
from pgref.postgres._connection import engine_of
from tests.contract import test_effects_postgres, test_sinks_postgres
from tests.plugins.pgbouncer import POOL_SIZE, PgBouncer

TTL_SECONDS = 60.0
EXECUTIONS = 12
"""More than twice as often as psycopg waits before it prepares a statement."""


@pytest.fixture(scope="module")
def engine(pgbouncer: PgBouncer) -> Iterator[sa.Engine]:
    """In this module every other fixture goes through the pooler too."""
    engine = engine_of(pgbouncer.dsn)
    yield engine
    engine.dispose()


@pytest.fixture
def connect(pgbouncer: PgBouncer, schema: str) -> Iterator[Callable[..., Stores]]:
    """Return stores over engines of their own."""
    opened: list[Stores] = []

    def connect(query: str = "") -> Stores:
        opened.append(Stores.open(f"{pgbouncer.dsn}{query}", schema=schema))
        return opened[-1]

    yield connect
    for stores in opened:
        stores.close()


def server_statements(pgbouncer: PgBouncer) -> int:
    """Return how many prepared statements one of the server sessions holds."""
    with psycopg.connect(pgbouncer.conninfo, autocommit=True, prepare_threshold=None) as connection:
        row = connection.execute("SELECT count(*) FROM pg_prepared_statements").fetchone()
    assert row is not None
    return int(row[0])


class TestEffectsThroughPgBouncer(test_effects_postgres.TestPostgresEffectStore):
    """With more callers at once than the pooler has server sessions."""


class TestSinksThroughPgBouncer(test_sinks_postgres.TestPostgresSink):
    """The fence is compared, and the data written, in one server session."""


@pytest.mark.parametrize("query", ["", "?prepare_threshold=none"])
def test_two_clients_repeat_every_statement(
    connect: Callable[..., Stores], pgbouncer: PgBouncer, key: str, query: str
) -> None:
    """Neither meets what the other has prepared: nothing is."""
    clients = [connect(query), connect(query)]
    for n in range(EXECUTIONS):
        for m, stores in enumerate(clients):
            every_method(stores, f"{key}/{n}/{m}")
    assert server_statements(pgbouncer) == 0


def every_method(stores: Stores, name: str) -> None:
    effects = stores.effects
    first, second = Action(name, name), Action(f"{name}/2", name)
    outcome = effects.acquire(first, TTL_SECONDS)
    assert isinstance(outcome, Granted)
    effects.renew(first, outcome.lease, TTL_SECONDS)
    effects.mark_uncertain(first, outcome.lease, "timeout", by="worker")
    effects.begin_reconcile(first, TTL_SECONDS)
    effects.resolve_uncertain(first, Resolution(applied=True, result="ruled", by="ann", why="saw it"))
    assert effects.acquire(first, TTL_SECONDS) == Done("ruled")
    complete_beside_an_entry(stores, second)
    assert [entry.event for entry in effects.history(name)] == ["marked", "ruled_applied"]
    stores.sinks.seal(name, 7)
    assert stores.sinks.seen_fence(name) == 7


def complete_beside_an_entry(stores: Stores, action: Action) -> None:
    """Complete in the transaction of the effect, as `@fenced_task` does."""
    outcome = stores.effects.acquire(action, TTL_SECONDS)
    assert isinstance(outcome, Granted)
    with stores.database.transaction() as connection:
        connection.execute(sa.text("CREATE TEMPORARY TABLE entry (n int) ON COMMIT DROP"))
        connection.execute(sa.text("INSERT INTO entry VALUES (:n)"), {"n": 1})
        stores.effects.complete_within(connection, action, outcome.lease, "within")
    record = stores.effects.lookup(action.key)
    assert record is not None
    assert (record.state, record.result) == (State.DONE, "within")


def test_what_is_prepared_meets_what_another_client_prepared(pgbouncer: PgBouncer) -> None:
    """Why nothing is prepared: this pooler does not keep clients' statements apart."""
    with ExitStack() as opened, pytest.raises(psycopg.errors.DuplicatePreparedStatement):
        prepare_as_others(pgbouncer, opened)


def prepare_as_others(pgbouncer: PgBouncer, opened: ExitStack) -> None:
    """Prepare a statement in each of more clients than there are server sessions."""
    for n in range(POOL_SIZE + 1):
        client = psycopg.connect(pgbouncer.conninfo, autocommit=True, prepare_threshold=0)
        opened.enter_context(client).execute(f"SELECT {n}")


def test_a_server_itself_may_prepare(postgres: Any) -> None:
    """Only a pooler changes the threshold."""
    engine = engine_of(postgres.dsn)
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        assert driver.prepare_threshold == 5
        assert driver.autocommit is False
    engine.dispose()


@pytest.mark.parametrize(("query", "expected"), [("7", 7), ("0", 0), ("none", None)])
def test_threshold_in_the_dsn(postgres: Any, query: str, expected: int | None) -> None:
    engine = engine_of(f"{postgres.dsn}?prepare_threshold={query}")
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        assert driver.prepare_threshold == expected
    engine.dispose()


@pytest.mark.parametrize("threshold", ["off", "-1", "1.5", "²", "1&prepare_threshold=2"])
def test_threshold_that_is_none(threshold: str) -> None:
    with pytest.raises(InvalidArgument, match="prepare_threshold"):
        engine_of(f"postgresql://nobody@localhost/none?prepare_threshold={threshold}")


@pytest.mark.parametrize("connect_args", [{}, {"prepare_threshold": None}], ids=["found out", "said"])
def test_an_engine_of_the_user_is_protected_too(
    pgbouncer: PgBouncer, schema: str, connect_args: dict[str, None]
) -> None:
    """Whatever it is used for besides, and however often stores are opened over it."""
    engine = sa.create_engine(pgbouncer.dsn, connect_args=connect_args)
    for _ in range(2):
        stores = Stores.open(engine, schema=schema)
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        assert driver.prepare_threshold is None
    stores.close()


def test_schema_through_the_pooler(engine: sa.Engine, key: str) -> None:
    """G70."""
    stores = Stores.open(engine, schema=key[:60])
    stores.ensure_schema()
    stores.ensure_schema()
    verify_schema(engine, stores.schema)
    drop_schema(engine, stores.schema)


def test_a_pooler_without_its_server(pgbouncer: PgBouncer) -> None:
    stores = Stores.open(f"{pgbouncer.dsn}_absent")
    with pytest.raises(Unavailable):
        stores.sinks.seen_fence("resource")
