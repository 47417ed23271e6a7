"""The application's role may call the functions and see the overview; everything else is refused."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
import sqlalchemy as sa

from pgref.contracts.effects import Action, Granted, Kind, Resolution, RetrySafety, State
from pgref.errors import InvalidArgument, SchemaError
from pgref.postgres import Stores, grant_application, verify_schema
from pgref.postgres.schema import ensure_schema

ROLE = 'app "role"'

FORBIDDEN = [
    "SELECT * FROM {s}.effect_action",
    "SELECT count(*) FROM {s}.effect_resource",
    "SELECT * FROM {s}.effect_history",
    "SELECT * FROM {s}.effect_evidence",
    "SELECT * FROM {s}.effect_store",
    "SELECT * FROM {s}.sink_fence",
    "INSERT INTO {s}.effect_resource VALUES (9, 9, 'r', 'k')",
    "UPDATE {s}.effect_action SET state = 3",
    "UPDATE {s}.effect_resource SET fence = fence + 1",
    "UPDATE {s}.sink_fence SET fence = 1",
    "UPDATE {s}.effect_overview SET attempt = 0",
    "UPDATE {s}.pgref_version SET version_num = 'x'",
    "DELETE FROM {s}.effect_action",
    "DELETE FROM {s}.effect_history",
    "TRUNCATE {s}.effect_action",
    "SELECT {s}.effect_raise_fences(100, '', '')",
    "SELECT {s}.effect_flip('k', now())",
    "LOCK TABLE {s}.effect_action IN ACCESS EXCLUSIVE MODE",
    "CREATE TABLE {s}.mine (x int)",
    "CREATE FUNCTION {s}.mine() RETURNS int LANGUAGE sql RETURN 1",
    "CREATE OR REPLACE FUNCTION {s}.sink_seen(p_resource text) RETURNS bigint LANGUAGE sql RETURN 1",
    "ALTER FUNCTION {s}.effect_retain SECURITY INVOKER",
    "ALTER TABLE {s}.effect_action DISABLE TRIGGER ALL",
    "DROP TRIGGER fence_rises ON {s}.effect_resource",
    "DROP SCHEMA {s} CASCADE",
]

HELPERS = {
    "effect_flip",
    "effect_intent_fault",
    "effect_is_held",
    "effect_judge_many",
    "effect_lease_fault",
    "refuse_lower_fence",
}


@pytest.fixture(scope="module")
def application(engine: sa.Engine, schema: str) -> Iterator[sa.Engine]:
    quoted = '"' + ROLE.replace('"', '""') + '"'
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {quoted} LOGIN")
    grant_application(engine, ROLE, schema)
    application = sa.create_engine(engine.url.set(username=ROLE))
    yield application
    application.dispose()
    with engine.begin() as connection:
        connection.exec_driver_sql(f"DROP OWNED BY {quoted}")
        connection.exec_driver_sql(f"DROP ROLE {quoted}")


def test_the_application_can_do_its_work(application: sa.Engine, schema: str) -> None:
    verify_schema(application, schema)
    stores = Stores.open(application, schema=schema)
    action = Action("privileges", "privileges", retry_safety=RetrySafety.SAFE)
    granted = stores.effects.acquire(action, 10)
    assert isinstance(granted, Granted)
    stores.effects.renew_many([(action, granted.lease)], 10)
    stores.effects.mark_uncertain(action, granted.lease, "test")
    claim = stores.effects.begin_reconcile(action, 10)
    stores.effects.defer_reconcile(claim, None)
    assert stores.effects.claim_backlog(1, 10) == []
    assert [tally.kind for tally in stores.effects.tallies()] == [Kind.PARKED]
    assert [entry.key for entry in stores.effects.backlog(10)] == ["privileges"]
    stores.effects.resolve_uncertain(action, Resolution(applied=False))
    with stores.database.transaction() as connection:
        again = stores.effects.acquire(action, 10)
        assert isinstance(again, Granted)
        stores.effects.complete_within(connection, action, again.lease, "1")
    stores.sinks.write_fenced("privileges", 1, lambda _: None)
    assert stores.effects.retain(1000, 10) == 0
    record = stores.effects.lookup("privileges")
    assert record is not None
    assert record.state is State.DONE


def test_the_application_can_watch(application: sa.Engine, schema: str) -> None:
    Stores.open(application, schema=schema).effects.acquire(Action("watched", "watched"), 10)
    with application.connect() as connection:
        query = f"SELECT state, attempt FROM \"{schema}\".effect_overview WHERE key = 'watched'"
        assert connection.exec_driver_sql(query).one() == ("in_flight", 1)


@pytest.mark.parametrize("statement", FORBIDDEN)
def test_everything_else_is_refused(application: sa.Engine, schema: str, statement: str) -> None:
    with application.connect() as connection, pytest.raises(sa.exc.DBAPIError) as refused:
        connection.exec_driver_sql(statement.format(s=f'"{schema}"').replace("%", "%%"))
    assert isinstance(refused.value.orig, psycopg.errors.InsufficientPrivilege)


def test_a_role_without_the_grant_is_told_what_is_missing(engine: sa.Engine, schema: str) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE ROLE stranger LOGIN")
    stranger = sa.create_engine(engine.url.set(username="stranger"))
    with pytest.raises(SchemaError, match="grant the application its role"):
        Stores.open(stranger, schema=schema).effects.lookup("k")
    stranger.dispose()
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP ROLE stranger")


def test_a_fence_never_goes_down_not_even_by_the_owners_hand(engine: sa.Engine, schema: str) -> None:
    """G8."""
    stores = Stores.open(engine, schema=schema)
    stores.effects.acquire(Action("lowered", "lowered"), 10)
    stores.sinks.write_fenced("lowered", 7, lambda _: None)
    for table, column in (("effect_resource", "fence"), ("effect_resource", "granted_fence"), ("sink_fence", "fence")):
        with engine.begin() as connection, pytest.raises(sa.exc.IntegrityError, match="never goes down"):
            connection.exec_driver_sql(f"UPDATE \"{schema}\".{table} SET {column} = 0 WHERE resource = 'lowered'")


def test_every_function_of_the_contract_pins_its_search_path(engine: sa.Engine, schema: str) -> None:
    query = """SELECT proname FROM pg_proc p JOIN pg_namespace n ON n.oid = pronamespace WHERE nspname = :schema
        AND prosecdef AND NOT coalesce(proconfig @> ARRAY['search_path=' || :schema || ', pg_temp'], false)"""
    with engine.connect() as connection:
        assert connection.execute(sa.text(query), {"schema": schema}).all() == []


def test_nobody_else_may_call_a_function(engine: sa.Engine, schema: str) -> None:
    query = """SELECT proname FROM pg_proc p JOIN pg_namespace n ON n.oid = pronamespace
        WHERE nspname = :schema AND has_function_privilege('public', p.oid, 'EXECUTE')"""
    with engine.connect() as connection:
        assert connection.execute(sa.text(query), {"schema": schema}).all() == []


def test_only_helpers_are_out_of_the_applications_reach(application: sa.Engine, engine: sa.Engine, schema: str) -> None:
    """Every function of the contract runs with the owner's rights. To raise fences is the owner's alone."""
    query = """SELECT proname::text FROM pg_proc p JOIN pg_namespace n ON n.oid = pronamespace
        WHERE nspname = :schema AND NOT (prosecdef AND has_function_privilege(:role, p.oid, 'EXECUTE'))"""
    with engine.connect() as connection:
        rows = connection.execute(sa.text(query), {"schema": schema, "role": ROLE}).scalars()
        assert set(rows) == HELPERS | {"effect_raise_fences"}


@pytest.mark.parametrize("bad", ["", "x" * 64, "a\0b", None])
def test_a_bad_role_is_refused_before_anything_is_sent(bad: object) -> None:
    engine = sa.create_engine("postgresql+psycopg://nobody@127.0.0.1:1/none")
    with pytest.raises(InvalidArgument, match="^role must"):
        grant_application(engine, bad)  # type: ignore[arg-type]


def test_migrating_again_keeps_the_grants(application: sa.Engine, engine: sa.Engine, schema: str) -> None:
    ensure_schema(engine, schema)
    assert Stores.open(application, schema=schema).effects.lookup("unknown") is None
