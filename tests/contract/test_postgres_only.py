"""What only PostgreSQL promises: what a call costs, which locks it takes, and how its rows are found."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import psycopg
import pytest
import sqlalchemy as sa
from psycopg import pq, sql

from pgref.clock import ManualClock
from pgref.contracts.effects import (
    Action,
    EffectRecord,
    EffectStore,
    Granted,
    InFlight,
    Lease,
    ReconcileClaim,
    Renewal,
    Resolution,
    RetrySafety,
)
from pgref.embedded import PostgresServer
from pgref.errors import FingerprintMismatch
from pgref.memory import MemoryEffectStore
from pgref.postgres import PostgresEffectStore, Stores, drop_schema, new_schema

HOUR = 3600.0
DAY = 24 * HOUR
MANY_ROWS = 20_000
POLLS_MAX = 10_000
Connection = psycopg.Connection[Any]
Sent = tuple[str, Sequence[Any]]


@pytest.fixture(scope="module")
def one_connection(engine: sa.Engine) -> Iterator[sa.Engine]:
    """Return an engine that has a single connection, to be watched."""
    one = sa.create_engine(engine.url, pool_size=1, max_overflow=0)
    yield one
    one.dispose()


@pytest.fixture(scope="module")
def store(one_connection: sa.Engine, schema: str) -> PostgresEffectStore:
    return Stores.open(one_connection, schema=schema).effects


@pytest.fixture
def session(postgres: PostgresServer) -> Iterator[Connection]:
    """Return a connection beside the store's. A wait for a lock ends as an error."""
    with psycopg.connect(postgres.conninfo, options="-c lock_timeout=5s") as connection:
        yield connection


def an_action(on: str | None = None, **parts: Any) -> Action:
    name = uuid4().hex
    return Action(name, on or name, retry_safety=RetrySafety.SAFE, **parts)


def granted(store: PostgresEffectStore, action: Action) -> Lease:
    outcome = store.acquire(action, HOUR)
    assert isinstance(outcome, Granted)
    return outcome.lease


def marked(store: PostgresEffectStore, action: Action) -> Lease:
    lease = granted(store, action)
    store.mark_uncertain(action, lease, "timeout")
    return lease


def claimed(store: PostgresEffectStore, action: Action) -> Lease:
    lease = marked(store, action)
    store.begin_reconcile(action, HOUR, holder=lease.holder)
    return lease


def a_claim(action: Action, lease: Lease) -> ReconcileClaim:
    return ReconcileClaim(action.key, action.resource, lease.fence + 1, lease.holder, lease.expires_at)


def an_uncertain_record() -> EffectRecord:
    store, action = MemoryEffectStore(), Action("key 1", "resource 1")
    outcome = store.acquire(action, HOUR)
    assert isinstance(outcome, Granted)
    store.mark_uncertain(action, outcome.lease, "timeout")
    return store.backlog(1)[0]


def done(store: PostgresEffectStore, action: Action) -> Lease:
    lease = granted(store, action)
    store.complete(action, lease, "result")
    return lease


def sent_by(store: PostgresEffectStore, call: Callable[[], object]) -> Sent:
    """Make ``call`` and return the one statement that it sent, with its parameters."""
    database = store._database
    with patch.object(database, "call", wraps=database.call) as spy:
        call()
    [(arguments, _options)] = spy.call_args_list
    statement, parameters = arguments
    return statement, parameters


# Refusals take no lock and write nothing (G1, G5, G10)


def _refused_done(store: PostgresEffectStore) -> Action:
    action = an_action()
    done(store, action)
    return action


def _refused_uncertain(store: PostgresEffectStore) -> Action:
    action = an_action()
    marked(store, action)
    return action


def _refused_in_flight(store: PostgresEffectStore) -> Action:
    action = an_action()
    granted(store, action)
    return action


def _refused_contended(store: PostgresEffectStore) -> Action:
    action = an_action()
    granted(store, action)
    return an_action(on=action.resource)


def _refused_other_input(store: PostgresEffectStore) -> Action:
    action = an_action(fingerprint="one")
    done(store, action)
    return replace(action, fingerprint="two")


REFUSALS = {
    "done": _refused_done,
    "uncertain": _refused_uncertain,
    "in flight": _refused_in_flight,
    "contended": _refused_contended,
    "other input": _refused_other_input,
}


class Cost:
    """Runs a statement in a transaction that stays open, and says what it cost."""

    def __init__(self, connection: Connection, statement: str, parameters: Sequence[Any]) -> None:
        self._connection = connection
        explained = f"EXPLAIN (ANALYZE, WAL, FORMAT JSON) {statement}"
        cursor = psycopg.ClientCursor(connection)
        self.plan = cursor.execute(explained, parameters).fetchall()[0][0][0]["Plan"]

    @property
    def wal_records(self) -> int:
        return int(self.plan["WAL Records"])

    @property
    def transaction_id(self) -> str | None:
        [(assigned,)] = self._connection.execute("SELECT pg_current_xact_id_if_assigned()::text").fetchall()
        return None if assigned is None else str(assigned)

    @property
    def locks(self) -> set[str]:
        """Return the modes of the locks on tables and rows; to lock a row takes a lock on its table, too."""
        rows = self._connection.execute(
            "SELECT DISTINCT mode FROM pg_locks WHERE pid = pg_backend_pid() AND locktype IN ('relation', 'tuple')"
        )
        return {mode for (mode,) in rows}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("many", [False, True], ids=["acquire", "acquire_many"])
def test_a_refusal_writes_and_locks_nothing(
    store: PostgresEffectStore, session: Connection, name: str, *, many: bool
) -> None:
    """G1, G2, G4, G5, G10: a refusal takes no transaction id, writes no WAL and holds no row."""
    action = REFUSALS[name](store)
    asked: Callable[[], object] = lambda: store.acquire_many([action], HOUR)  # noqa: E731
    statement, parameters = sent_by(store, asked) if many else _sent_by_refused(store, action)
    cost = Cost(session, statement, parameters)
    assert (cost.wal_records, cost.transaction_id, cost.locks) == (0, None, {"AccessShareLock"})


def _sent_by_refused(store: PostgresEffectStore, action: Action) -> Sent:
    def ask() -> None:
        with suppress(FingerprintMismatch):
            assert not isinstance(store.acquire(action, HOUR), Granted)

    return sent_by(store, ask)


def test_a_batch_of_refusals_writes_and_locks_nothing(store: PostgresEffectStore, session: Connection) -> None:
    """G1, G2, G4, G5, G10: nor does a batch of all kinds of refusals."""
    actions = [refuse(store) for refuse in REFUSALS.values()]
    cost = Cost(session, *sent_by(store, lambda: store.acquire_many(actions, HOUR)))
    assert (cost.wal_records, cost.transaction_id, cost.locks) == (0, None, {"AccessShareLock"})


def test_looking_writes_and_locks_nothing(store: PostgresEffectStore, session: Connection) -> None:
    """G10: nor does a look at a key."""
    action = _refused_done(store)
    cost = Cost(session, *sent_by(store, lambda: store.lookup(action.key)))
    assert (cost.wal_records, cost.transaction_id, cost.locks) == (0, None, {"AccessShareLock"})


def test_a_grant_is_seen_to_write(store: PostgresEffectStore, session: Connection) -> None:
    """G6: the same probe sees what a grant writes."""
    statement, parameters = sent_by(store, lambda: store.acquire(an_action(), HOUR))
    cost = Cost(session, statement, [uuid4().hex, uuid4().hex, *parameters[2:]])
    assert cost.wal_records > 0
    assert cost.transaction_id is not None
    assert "RowExclusiveLock" in cost.locks


# One statement, one transaction


Prepare = Callable[[PostgresEffectStore, Action], Lease]
METHODS: dict[str, tuple[Prepare, Callable[[PostgresEffectStore, Action, Lease], object]]] = {
    "acquire": (granted, lambda store, *_: store.acquire(an_action(), HOUR)),
    "acquire_many": (granted, lambda store, *_: store.acquire_many([an_action(), an_action()], HOUR)),
    "complete": (granted, lambda store, action, lease: store.complete(action, lease)),
    "complete_many": (granted, lambda store, action, lease: store.complete_many([(action, lease, None)])),
    "renew": (granted, lambda store, action, lease: store.renew(action, lease, HOUR)),
    "renew_many": (granted, lambda store, action, lease: store.renew_many([(action, lease)], HOUR)),
    "mark_uncertain": (granted, lambda store, action, lease: store.mark_uncertain(action, lease, "timeout")),
    "release": (granted, lambda store, action, lease: store.release(action, lease)),
    "abandon": (granted, lambda store, action, lease: store.abandon(action, lease)),
    "begin_reconcile": (marked, lambda store, action, _: store.begin_reconcile(action, HOUR)),
    "resolve_uncertain": (
        marked,
        lambda store, action, _: store.resolve_uncertain(action, Resolution(applied=True)),
    ),
    "raise_fences": (granted, lambda store, *_: store.raise_fences(1)),
    "retain": (done, lambda store, *_: store.retain(DAY, 10)),
    "lookup": (done, lambda store, action, _: store.lookup(action.key)),
    "history": (marked, lambda store, action, _: store.history(action.key)),
    "evidence": (done, lambda store, action, _: store.evidence(action.key)),
    "expire_intents": (granted, lambda store, *_: store.expire_intents(10)),
    "backlog": (marked, lambda store, *_: store.backlog(10)),
    "tallies": (marked, lambda store, *_: store.tallies()),
    "now": (marked, lambda store, *_: store.now()),
    "claim_backlog": (marked, lambda store, *_: store.claim_backlog(10, HOUR)),
    "defer_reconcile": (claimed, lambda store, action, lease: store.defer_reconcile(a_claim(action, lease), HOUR)),
    "renew_running": (granted, lambda store, action, lease: store.renew_running([(action.key, lease.fence)], HOUR)),
    "claim_due": (granted, lambda store, *_: store.claim_due(10, HOUR)),
}


def test_every_method_is_counted() -> None:
    assert set(METHODS) == {name for name in vars(EffectStore) if not name.startswith("_")}


@pytest.mark.parametrize("name", METHODS)
def test_one_statement_in_one_transaction(store: PostgresEffectStore, one_connection: sa.Engine, name: str) -> None:
    """G10, G26: a method is one statement, executed once, in one transaction, in one round trip."""
    prepare, method = METHODS[name]
    action = an_action(payload="p")
    lease = prepare(store, action)
    with tempfile.TemporaryFile("w+") as trace:
        wire = one_connection.raw_connection()
        driver: Any = wire.driver_connection
        wire.close()
        driver.pgconn.trace(trace.fileno())
        driver.pgconn.set_trace_flags(pq.Trace.SUPPRESS_TIMESTAMPS)
        try:
            method(store, action, lease)
        finally:
            driver.pgconn.untrace()
        trace.seek(0)
        messages = [line.split("\t") for line in trace if "\t" in line]
    said = [message[2] for message in messages if message[0] == "F"]
    heard = [message[2] for message in messages if message[0] == "B"]
    assert (said.count("Execute") + said.count("Query"), said.count("Sync")) in {(1, 1), (1, 0)}
    assert heard.count("CommandComplete") == heard.count("ReadyForQuery") == 1


# Rows and indexes


def test_finishing_and_renewing_touch_no_index(one_connection: sa.Engine) -> None:
    """G12, G13: completing and renewing, alone and in small batches, are HOT updates."""
    schema = new_schema(one_connection)
    store = Stores.open(one_connection, schema=schema, clock=ManualClock()).effects  # no grant is dated anew
    pairs = [(action, granted(store, action)) for action in (an_action() for _ in range(5))]
    store.renew_many(pairs, HOUR)
    store.complete_many([(action, lease, "result") for action, lease in pairs])
    for _ in range(60):
        action = an_action()
        lease = granted(store, action)
        store.renew(action, lease, HOUR)
        store.complete(action, lease, "result")
    assert _updates(one_connection, schema) == (2 * 65, 2 * 65)
    drop_schema(one_connection, schema)


def _updates(one_connection: sa.Engine, schema: str) -> tuple[int, int]:
    """Return how many rows of actions were updated, and how many of these without touching an index."""
    with one_connection.connect() as connection:
        connection.exec_driver_sql("SELECT pg_stat_force_next_flush()")
        connection.commit()
        query = sa.text(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables"
            " WHERE schemaname = :schema AND relname = 'effect_action'"
        )
        updates, hot = connection.execute(query, {"schema": schema}).one()
    return updates, hot


def test_no_index_names_what_finishing_changes(engine: sa.Engine, schema: str) -> None:
    """G12: no index of effect_action has state, expiry or completion in its columns, expressions or condition."""
    query = sa.text(
        "SELECT pg_get_indexdef(indexrelid) FROM pg_index"
        " WHERE indrelid = format('%I.effect_action', CAST(:schema AS text))::regclass"
    )
    with engine.connect() as connection:
        definitions = connection.execute(query, {"schema": schema}).scalars().all()
    assert len(definitions) >= 4
    words = {word for definition in definitions for word in definition.replace("(", " ").replace(")", " ").split()}
    assert not {word.strip(",") for word in words} & {"state", "expires_at", "completed_at", "released", "result"}


def test_renew_many_waits_for_nobody(store: PostgresEffectStore, schema: str, session: Connection) -> None:
    """G13: a lease whose row is locked is answered busy at once, the others are renewed, and it can be asked again."""
    pairs = [(action, granted(store, action)) for action in (an_action(), an_action())]
    locked = sql.SQL("SELECT FROM {}.effect_action WHERE key = %s FOR UPDATE").format(sql.Identifier(schema))
    session.execute(locked, [pairs[0][0].key])
    assert store.renew_many(pairs, HOUR) == [Renewal.BUSY, Renewal.RENEWED]
    session.rollback()
    assert store.renew_many(pairs, HOUR) == [Renewal.RENEWED, Renewal.RENEWED]


# How rows are found among many


FILL = """
INSERT INTO {schema}.effect_action (fence, created_at, granted_at, expires_at, completed_at, uncertain_at, due_at,
    holder, attempt, state, retry_safe, key, resource, payload)
  SELECT n, at, at, at, CASE state WHEN 3 THEN at END, CASE state WHEN 2 THEN at END, CASE state WHEN 0 THEN at END,
    gen_random_uuid(), 1, state, true, 'key ' || n, 'resource ' || n %% 100, 'p'
  FROM generate_series(1, %s + 60) n, LATERAL (SELECT
    now() - n * interval '10 minutes' AS at,
    CASE WHEN n > 60 THEN 3 ELSE n %% 3 END AS state) s
"""


@pytest.fixture(scope="module")
def filled(one_connection: sa.Engine, postgres: PostgresServer) -> Iterator[PostgresEffectStore]:
    """Return a store with many done keys, and a few of each other state."""
    schema = new_schema(one_connection)
    table = sql.SQL("VACUUM ANALYZE {}.effect_action").format(sql.Identifier(schema))
    with psycopg.connect(postgres.conninfo, autocommit=True) as connection:
        connection.execute(sql.SQL(FILL).format(schema=sql.Identifier(schema)), [MANY_ROWS])
        connection.execute(table)
    store = Stores.open(one_connection, schema=schema).effects
    store.expire_intents(1000)
    yield store
    drop_schema(one_connection, schema)


SWEEPS: dict[str, Callable[[PostgresEffectStore], object]] = {
    "lookup": lambda store: store.lookup("key 1"),
    "acquire": lambda store: store.acquire(Action("key 1", "resource 1"), HOUR),
    "acquire_many": lambda store: store.acquire_many([Action(f"key {n}", f"resource {n}") for n in (1, 2, 3)], HOUR),
    "expire_intents": lambda store: store.expire_intents(100),
    "backlog": lambda store: store.backlog(100),
    "backlog, a page": lambda store: store.backlog(10, after=an_uncertain_record(), prefix="key 1"),
    "tallies": lambda store: store.tallies(),
    "claim_backlog": lambda store: store.claim_backlog(100, HOUR),
    "claim_due": lambda store: store.claim_due(100, HOUR),
    "retain": lambda store: store.retain(30 * DAY, 100),
}


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("name", SWEEPS)
def test_rows_are_found_by_an_index(
    filled: PostgresEffectStore, postgres: PostgresServer, name: str, mode: str
) -> None:
    """G25, G3, G18: among many done keys no call reads the whole table, whichever kind of plan is chosen."""
    statement, parameters = sent_by(filled, lambda: SWEEPS[name](filled))
    plans = _plans(postgres, mode, statement, parameters)
    scans = [node for plan in plans for node in _nodes(plan) if node.get("Relation Name") == "effect_action"]
    assert {node["Node Type"] for node in scans} <= {"Index Scan", "Index Only Scan", "Bitmap Heap Scan", "ModifyTable"}
    assert scans


def _plans(postgres: PostgresServer, mode: str, statement: str, parameters: Sequence[Any]) -> list[Any]:
    """Return the plans of ``statement`` and of those in the functions that it calls."""
    notices: list[str] = []
    with psycopg.connect(postgres.conninfo) as connection:
        connection.execute("LOAD 'auto_explain'")
        settings = {
            "auto_explain.log_min_duration": "0",
            "auto_explain.log_nested_statements": "on",
            "auto_explain.log_format": "json",
            "auto_explain.log_level": "notice",
            "plan_cache_mode": mode,
        }
        for setting, value in settings.items():
            connection.execute("SELECT set_config(%s, %s, false)", [setting, value])
        connection.add_notice_handler(lambda notice: notices.append(notice.message_primary or ""))
        connection.execute(statement, parameters)
        connection.rollback()
    return [json.loads(notice[notice.index("{") :])["Plan"] for notice in notices if "plan:" in notice]


def _nodes(plan: Any) -> Iterator[Any]:
    yield plan
    for child in plan.get("Plans", []):
        yield from _nodes(child)


# Asked again, while the first question is still under way (G26)


def _blocked(session: Connection, future: Future[Any]) -> None:
    """Return when somebody waits for the transaction that ``session`` has open."""
    with psycopg.connect(session.info.dsn, autocommit=True) as observer:
        for _ in range(POLLS_MAX):
            [(waiting,)] = observer.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))",
                [session.info.backend_pid],
            ).fetchall()
            if waiting:
                return
            assert not future.done()
    raise AssertionError("nobody waits")


@pytest.mark.parametrize("many", [False, True], ids=["acquire", "acquire_many"])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_repeated_question_waits_for_the_first(
    store: PostgresEffectStore, session: Connection, end: str, *, many: bool
) -> None:
    """G26, G4: what was asked and not answered is settled under the lock: one grant, whether or not it committed."""
    action, holder = an_action(), uuid4()

    def ask() -> object:
        if many:
            return store.acquire_many([action], HOUR, holders=[holder])[0]
        return store.acquire(action, HOUR, holder=holder)

    statement, parameters = sent_by(store, lambda: store.acquire(an_action(), HOUR))
    session.execute(statement, [action.key, action.resource, *parameters[2:5], holder, *parameters[6:]])
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(ask)
        _blocked(session, again)
        getattr(session, end)()
        outcome = again.result()
    assert isinstance(outcome, Granted)
    record = store.lookup(action.key)
    assert record is not None
    assert (outcome.attempt, record.attempt, record.fence) == (1, 1, outcome.lease.fence)
    assert (outcome.lease.holder, outcome.lease.expires_at) == (holder, record.expires_at)


def test_a_batch_that_loses_its_first_key(store: PostgresEffectStore, session: Connection) -> None:
    """G5, G7: a key granted elsewhere meanwhile does not leave the next of its resource contended by nobody."""
    lost = an_action()
    wanted = replace(lost, resource=uuid4().hex)
    following = an_action(on=wanted.resource)
    statement, parameters = sent_by(store, lambda: store.acquire(an_action(), HOUR))
    session.execute(statement, [lost.key, lost.resource, *parameters[2:]])
    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(store.acquire_many, [wanted, following], HOUR)
        _blocked(session, batch)
        session.commit()
        first, second = batch.result()
    assert isinstance(first, InFlight)
    assert isinstance(second, Granted)
