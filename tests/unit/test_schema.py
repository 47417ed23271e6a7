"""G70, G71: making, checking and dropping the schema, on a real server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from pgref.contracts.effects import Action, Granted
from pgref.embedded import PostgresServer
from pgref.errors import InvalidArgument, SchemaError, Unavailable
from pgref.postgres import Stores, drop_schema, ensure_schema, migration_sql, new_schema, verify_schema

PROCESSES = 12
ENSURE = """
import sys, sqlalchemy as sa
from pgref.postgres import ensure_schema
sys.stdin.read()
ensure_schema(sa.create_engine(sys.argv[1]), sys.argv[2])
"""


@pytest.fixture
def name(engine: sa.Engine) -> Iterator[str]:
    name = 'sch"ema ü; --'
    yield name
    drop_schema(engine, name)


def objects(engine: sa.Engine) -> dict[str, int]:
    """Count the relations and functions of every schema."""
    query = """
        SELECT nspname, (SELECT count(*) FROM pg_class WHERE relnamespace = n.oid)
          + (SELECT count(*) FROM pg_proc WHERE pronamespace = n.oid)
        FROM pg_namespace n WHERE nspname NOT LIKE 'pg_%'"""
    with engine.connect() as connection:
        rows = connection.exec_driver_sql(query.replace("%", "%%")).all()
    return {row[0]: row[1] for row in rows}


def test_many_processes_at_once_make_one_schema(engine: sa.Engine, name: str) -> None:
    """G70: all succeed."""
    dsn = engine.url.render_as_string(hide_password=False)
    processes = [
        subprocess.Popen([sys.executable, "-c", ENSURE, dsn, name], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(PROCESSES)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    ends = [(process.wait(), process.stderr.read() if process.stderr else b"") for process in processes]
    assert ends == [(0, b"")] * PROCESSES
    verify_schema(engine, name)


def test_making_it_again_changes_nothing(engine: sa.Engine, name: str) -> None:
    ensure_schema(engine, name)
    before = objects(engine)
    ensure_schema(engine, name)
    assert objects(engine) == before


def test_nothing_outside_the_schema_is_touched(engine: sa.Engine, name: str) -> None:
    before = objects(engine)
    ensure_schema(engine, name)
    after = objects(engine)
    assert after.pop(name) > 0
    assert after == before


def test_a_dropped_schema_is_gone_and_dropping_it_again_is_no_error(engine: sa.Engine) -> None:
    name = new_schema(engine)
    drop_schema(engine, name)
    drop_schema(engine, name)
    assert name not in objects(engine)


def test_no_search_path_matters(engine: sa.Engine, name: str) -> None:
    """G70: neither a strange path of the session nor a table of the same name before ours."""
    ensure_schema(engine, name)
    hostile = sa.create_engine(engine.url, connect_args={"options": "-c search_path=pg_temp,public"})
    with hostile.begin() as connection:
        connection.exec_driver_sql("CREATE TEMP TABLE effect_action (key text)")
        connection.exec_driver_sql("CREATE TEMP TABLE effect_resource (resource text)")
    outcome = Stores.open(hostile, schema=name).effects.acquire(Action("k", "r"), 10)
    hostile.dispose()
    assert isinstance(outcome, Granted)


def test_an_absent_schema_is_said_to_be_absent(engine: sa.Engine) -> None:
    with pytest.raises(SchemaError, match="run the migrations"):
        verify_schema(engine, "absent")
    with pytest.raises(SchemaError, match="run the migrations"):
        Stores.open(engine, schema="absent").effects.lookup("k")


def test_a_schema_of_a_newer_release_is_left_alone(engine: sa.Engine, name: str) -> None:
    ensure_schema(engine, name)
    with engine.begin() as connection:
        version = sa.Table("pgref_version", sa.MetaData(), sa.Column("version_num"), schema=name)
        connection.execute(sa.update(version).values(version_num="pgref_9999"))
    with pytest.raises(SchemaError, match="newer than this release"):
        ensure_schema(engine, name)


@pytest.mark.parametrize(
    "bad", ["", "x" * 64, "ü" * 32, "pg_mine", "information_schema", "a\0b", "a%s", "a:b", "\ud800", None, 7]
)
def test_a_bad_name_is_refused_before_anything_is_sent(bad: object) -> None:
    engine = sa.create_engine("postgresql+psycopg://nobody@127.0.0.1:1/none")
    with pytest.raises(InvalidArgument, match="^schema must"):
        ensure_schema(engine, bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="^schema must"):
        Stores.open(engine, schema=bad)  # type: ignore[arg-type]


def test_the_sql_can_be_printed_and_run_by_hand(postgres: PostgresServer) -> None:
    engine = sa.create_engine(postgres.create_database("by_hand"))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.connection.cursor().execute(migration_sql().encode())
    verify_schema(engine)
    assert isinstance(Stores.open(engine).effects.acquire(Action("k", "r"), 10), Granted)
    engine.dispose()


@pytest.mark.parametrize(
    ("dsn", "message"),
    [
        ("nonsense", "^dsn must be a URL"),
        ("mysql://localhost/db", "^dsn must begin with"),
        (sa.create_engine("sqlite://"), "^engine must use the psycopg driver"),
    ],
)
def test_a_bad_dsn_is_refused(dsn: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Stores.open(dsn)


def test_an_unreachable_database_is_named_without_its_password() -> None:
    stores = Stores.open("postgresql://me:secret@127.0.0.1:1/none")
    with pytest.raises(Unavailable, match=r"^database postgresql\+psycopg://me:\*\*\*@127.0.0.1:1/none is") as caught:
        stores.effects.lookup("k")
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)
