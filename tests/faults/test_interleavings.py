"""Schedules of two sessions, every pair of methods: A has run its method and not committed when B runs its own.

What is waited for is the server's word that B waits, or that the database's clock has passed a moment.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from threading import Barrier
from typing import Any
from uuid import NAMESPACE_OID, UUID, uuid5

import psycopg
import pytest
import sqlalchemy as sa

from pgref.clock import ManualClock
from pgref.contracts.effects import (
    Action,
    Contended,
    Granted,
    Lease,
    ReconcileClaim,
    Renewal,
    Resolution,
    RetrySafety,
    Ruling,
    State,
    Uncertain,
)
from pgref.embedded import PostgresServer
from pgref.postgres import PostgresEffectStore, Stores, ensure_schema
from tests.faults.schedule import BARRIER, TTL_SECONDS, Stage, Watch, answer_of, conninfo_of

ALL = 1000
SCHEMA = "schedules"
START = datetime(2030, 1, 1, tzinfo=UTC)
FIRST = UUID(int=9)
HOLDERS = {"a": UUID(int=1), "b": UUID(int=2)}
KEY = Action("key", "resource", retry_safety=RetrySafety.SAFE, payload="again")
SECOND = Action("second", "second")
THIRD = Action("third", "third")


@pytest.fixture(scope="module")
def dsn(postgres: PostgresServer) -> Iterator[str]:
    """A database of its own, so that what the server counts in it is ours."""
    with psycopg.connect(conninfo_of(postgres.dsn), autocommit=True) as connection:
        connection.execute("CREATE DATABASE schedules")
        url = sa.make_url(postgres.dsn).set(database="schedules")
        engine = sa.create_engine(url)
        ensure_schema(engine, SCHEMA)
        engine.dispose()
        yield url.render_as_string(hide_password=False)
        connection.execute("DROP DATABASE schedules WITH (FORCE)")


# Every pair


@dataclass(frozen=True)
class Scene:
    """The leases of `KEY`, which the scene is about, and of `SECOND`, which is live in all of them."""

    lease: Lease
    second: Lease


Call = Callable[[PostgresEffectStore, Scene, str], Any]


def _granted(store: PostgresEffectStore, action: Action = KEY, ttl: float = TTL_SECONDS) -> Lease:
    outcome = store.acquire(action, ttl, holder=FIRST)
    assert isinstance(outcome, Granted)
    return outcome.lease


def _new(_store: PostgresEffectStore, clock: ManualClock) -> Lease:
    return Lease(KEY.resource, 1, FIRST, clock.now())


def _live(store: PostgresEffectStore, _clock: ManualClock) -> Lease:
    return _granted(store)


def _expired(store: PostgresEffectStore, clock: ManualClock) -> Lease:
    lease = _granted(store)
    clock.tick(TTL_SECONDS)
    return lease


def _flipped(store: PostgresEffectStore, clock: ManualClock) -> Lease:
    lease = _expired(store, clock)
    assert store.expire_intents(ALL) == 1
    return lease


def _marked(store: PostgresEffectStore, _clock: ManualClock) -> Lease:
    lease = _granted(store)
    store.mark_uncertain(KEY, lease, "timeout", by="worker")
    return lease


def _reconciling(store: PostgresEffectStore, clock: ManualClock) -> Lease:
    lease = _marked(store, clock)
    store.begin_reconcile(KEY, TTL_SECONDS, holder=FIRST)
    return lease


def _due(store: PostgresEffectStore, clock: ManualClock) -> Lease:
    lease = _granted(store)
    store.abandon(KEY, lease, due_in_seconds=1)
    clock.tick(1)
    return lease


def _done(store: PostgresEffectStore, clock: ManualClock) -> Lease:
    lease = _granted(store)
    store.complete(KEY, lease, "first")
    clock.tick(2 * TTL_SECONDS)
    return lease


SCENES = {
    "new": _new,
    "live": _live,
    "expired": _expired,
    "flipped": _flipped,
    "marked": _marked,
    "reconciling": _reconciling,
    "due": _due,
    "done": _done,
}


@dataclass(frozen=True)
class Method:
    """``call`` is what a session asks. ``skips`` are serial calls with the answer of one that finds rows locked.

    A batch is judged key by key. ``halves`` ask for its keys alone, in the order asked: the later can come first.
    """

    call: Call
    skips: tuple[Call, ...] = ()
    halves: tuple[Call, ...] = ()


def _acquiring(*actions: Action) -> Call:
    def call(store: PostgresEffectStore, _scene: Scene, me: str) -> Any:
        holders = [UUID(int=HOLDERS[me].int + (4 if action is KEY else 8)) for action in actions]
        return store.acquire_many(actions, TTL_SECONDS, holders=holders)

    return call


def _database_effect(store: PostgresEffectStore, scene: Scene, me: str) -> None:
    """Write data and complete in one transaction."""
    with store._database.transaction() as connection:
        driver = connection.connection if isinstance(connection, sa.Connection) else connection
        driver.cursor().execute(f"INSERT INTO {SCHEMA}.data VALUES (%s)", (f"data of {me}",))
        store.complete_within(connection, KEY, scene.lease, f"of {me}")


def _complete_many(store: PostgresEffectStore, scene: Scene, me: str) -> Any:
    return store.complete_many([(SECOND, scene.second, f"second of {me}"), (KEY, scene.lease, f"of {me}")])


def _renew_many(store: PostgresEffectStore, scene: Scene, _me: str) -> Any:
    return store.renew_many([(SECOND, scene.second), (KEY, scene.lease)], 900)


def _renew_first(store: PostgresEffectStore, scene: Scene, _me: str) -> Any:
    return [*store.renew_many([(SECOND, scene.second)], 900), Renewal.BUSY]


def _renew_second(store: PostgresEffectStore, scene: Scene, _me: str) -> Any:
    return [Renewal.BUSY, *store.renew_many([(KEY, scene.lease)], 900)]


def _renew_running(store: PostgresEffectStore, scene: Scene, _me: str) -> Any:
    return store.renew_running([(SECOND.key, scene.second.fence), (KEY.key, scene.lease.fence)], 900)


def _run_first(store: PostgresEffectStore, scene: Scene, _me: str) -> Any:
    return [*store.renew_running([(SECOND.key, scene.second.fence)], 900), Renewal.BUSY]


def _run_second(store: PostgresEffectStore, scene: Scene, _me: str) -> Any:
    return [Renewal.BUSY, *store.renew_running([(KEY.key, scene.lease.fence)], 900)]


BOTH_BUSY = [Renewal.BUSY, Renewal.BUSY]
CLAIM = ReconcileClaim(KEY.key, KEY.resource, 2, FIRST, START)


def _resolving(*, applied: bool, claim: ReconcileClaim | None = None) -> Call:
    def call(store: PostgresEffectStore, _scene: Scene, me: str) -> Any:
        result = f"ruled by {me}" if applied else None
        resolution = Resolution(applied=applied, result=result, by=me, why="saw it")
        return store.resolve_uncertain(KEY, resolution, claim=claim)

    return call


METHODS = {
    "acquire": Method(lambda store, _, me: store.acquire(KEY, TTL_SECONDS, holder=HOLDERS[me])),
    "take_over": Method(
        lambda store, _, me: store.acquire(Action(f"rival {me}", KEY.resource), TTL_SECONDS, holder=HOLDERS[me])
    ),
    "move": Method(
        lambda store, _, me: store.acquire(Action(KEY.key, f"other of {me}"), TTL_SECONDS, holder=HOLDERS[me])
    ),
    "acquire_many": Method(_acquiring(THIRD, KEY), halves=(_acquiring(THIRD), _acquiring(KEY))),
    "complete_within": Method(_database_effect),
    "complete": Method(lambda store, scene, me: store.complete(KEY, scene.lease, f"of {me}")),
    "complete_many": Method(_complete_many),
    "renew": Method(lambda store, scene, _: store.renew(KEY, scene.lease, 90)),
    "renew_many": Method(_renew_many, skips=(_renew_first, _renew_second, lambda *_: BOTH_BUSY)),
    "renew_running": Method(_renew_running, skips=(_run_first, _run_second, lambda *_: BOTH_BUSY)),
    "mark_uncertain": Method(lambda store, scene, me: store.mark_uncertain(KEY, scene.lease, f"mark of {me}", by=me)),
    "release": Method(lambda store, scene, _: store.release(KEY, scene.lease)),
    "abandon": Method(lambda store, scene, _: store.abandon(KEY, scene.lease, due_in_seconds=5)),
    "begin_reconcile": Method(lambda store, _, me: store.begin_reconcile(KEY, TTL_SECONDS, holder=HOLDERS[me])),
    "begin_early": Method(lambda store, _, me: store.begin_reconcile(KEY, TTL_SECONDS, holder=HOLDERS[me], early=True)),
    "claim_backlog": Method(
        lambda store, _, me: store.claim_backlog(ALL, TTL_SECONDS, holder=HOLDERS[me]), skips=(lambda *_: [],)
    ),
    "put_off": Method(lambda store, _, me: store.defer_reconcile(CLAIM, 30, note=f"of {me}")),
    "park": Method(lambda store, _, me: store.defer_reconcile(CLAIM, None, note=f"of {me}", by=me)),
    "resolve_claimed": Method(_resolving(applied=False, claim=CLAIM)),
    "resolve_applied": Method(_resolving(applied=True)),
    "resolve_not_applied": Method(_resolving(applied=False)),
    "expire_intents": Method(lambda store, *_: store.expire_intents(ALL), skips=(lambda *_: 0,)),
    "retain": Method(lambda store, *_: store.retain(TTL_SECONDS, ALL), skips=(lambda *_: 0,)),
    "claim_due": Method(lambda store, *_: store.claim_due(ALL, 30), skips=(lambda *_: [],)),
    "raise_fences": Method(lambda store, _, me: store.raise_fences(100, by=me, why="failover")),
}
NEVER_WAIT = {"renew_many", "renew_running", "retain", "claim_due"}
# In the other scenes most methods are refused, whoever is first.
OF_A_CLAIM = ["begin_early", "put_off", "park", "resolve_claimed"]
EVERY = [name for name in METHODS if name not in {"move", "claim_due", *OF_A_CLAIM}]
MEANT = dict.fromkeys(SCENES, EVERY) | {
    "new": ["acquire", "take_over", "move", "acquire_many", "complete", "raise_fences"],
    "reconciling": [
        "complete",
        "release",
        "begin_reconcile",
        "claim_backlog",
        "resolve_applied",
        "resolve_not_applied",
        "raise_fences",
        *OF_A_CLAIM,
    ],
    "due": ["acquire", "take_over", "move", "acquire_many", "complete", "abandon", "claim_due", "raise_fences"],
    "done": [
        "acquire",
        "take_over",
        "acquire_many",
        "complete",
        "complete_within",
        "complete_many",
        "resolve_applied",
        "retain",
    ],
}
PAIRS = [(scene, x, y) for scene, names in MEANT.items() for x in names for y in names]


@dataclass(frozen=True)
class Observed:
    """All that can be known of a schedule: what A and B were told, and every row."""

    a: Any
    b: Any
    rows: str


class Pairs:
    """The stage with a clock set by hand, and what serial orders lead to there."""

    def __init__(self, dsn: str) -> None:
        self.clock = ManualClock(START)
        self.stage = Stage(dsn, SCHEMA, self.clock)
        self.serial = cache(self._serial)

    def arranged(self, name: str) -> Scene:
        """Empty the store and prepare a scene, always with the same names, times, fences and holders."""
        self.stage.empty()
        self.clock.tick((START - self.clock.now()).total_seconds())
        second = _granted(self.stage.first, SECOND, 1000)
        return Scene(SCENES[name](self.stage.first, self.clock), second)

    def _serial(self, name: str, *calls: tuple[str, Call]) -> Observed:
        scene = self.arranged(name)
        told: dict[str, Any] = {"a": None, "b": None}
        for me, call in calls:
            told[me] = answer_of(call, self.stage.first, scene, me)
        return Observed(told["a"], told["b"], self.stage.watch.rows())

    def concurrent(self, name: str, x: Method, y: Method, ending: str) -> tuple[Observed, str]:
        """Let B run Y while A is between X and its end. Return what happened, and how B met A."""
        scene, stage = self.arranged(name), self.stage
        with stage.holding(ending):
            a = answer_of(x.call, stage.first, scene, "a")
            locked = stage.has_locked()
            future = stage.start(answer_of, y.call, stage.second, scene, "b")
            met = "waited" if stage.waits(future) else "passed" if locked else "alone"
        b = future.result()
        return Observed(a if ending == "COMMIT" else None, b, stage.watch.rows()), met

    def overtaken(self, name: str, x: Method, y: Method) -> Observed:
        """Let A run X and commit when B, in the midst of Y, has looked at the rows that A had locked before."""
        scene, stage = self.arranged(name), self.stage
        with stage.holding("COMMIT"):
            _lock(stage, "effect_resource")
            _lock(stage, "effect_action")
            future = stage.start(answer_of, y.call, stage.second, scene, "b")
            stage.waits(future)
            a = answer_of(x.call, stage.first, scene, "a")
        return Observed(a, future.result(), stage.watch.rows())

    def allowed(self, name: str, x: Method, y: Method, ending: str, met: str) -> list[Observed]:
        """Return what the serial orders lead to; who passes by locked rows may have skipped them."""
        skips = () if met == "alone" else y.skips
        if ending == "ROLLBACK":
            return [self.serial(name, ("b", call)) for call in (y.call, *skips)]
        forth = [self.serial(name, ("a", x.call), ("b", call)) for call in (y.call, *skips)]
        between = [self._between(name, x, *y.halves)] if y.halves else []
        back = [self.serial(name, ("b", call), ("a", x.call)) for call in (y.call, *skips)]
        return [*forth, *back, *between]

    def _between(self, name: str, x: Method, late: Call, early: Call) -> Observed:
        """Return what it leads to when X comes between the keys of a batch."""
        scene, store = self.arranged(name), self.stage.first
        first, a, rest = (answer_of(call, store, scene, me) for me, call in (("b", early), ("a", x.call), ("b", late)))
        return Observed(a, rest + first, self.stage.watch.rows())


@pytest.fixture(scope="module")
def pairs(dsn: str) -> Iterator[Pairs]:
    pairs = Pairs(dsn)
    yield pairs
    pairs.stage.close()


@pytest.mark.parametrize(("scene", "x", "y"), PAIRS)
def test_a_pair_ends_as_one_of_its_serial_orders(pairs: Pairs, scene: str, x: str, y: str) -> None:
    """G7, G10: answers and rows are those of one order when A commits, and those of B alone when A rolls back."""
    for ending in ("COMMIT", "ROLLBACK"):
        seen, met = pairs.concurrent(scene, METHODS[x], METHODS[y], ending)
        assert seen in pairs.allowed(scene, METHODS[x], METHODS[y], ending, met), (ending, met)
        assert met != "waited" or y not in NEVER_WAIT
        if met == "alone":
            break


# Not those whose X takes more than what A has locked before: A, being two steps there, would lock out of order.
OVERTAKING = [
    (scene, x, y)
    for scene, x, y in PAIRS
    if scene in {"expired", "due"} and x not in {"move", "acquire_many"} and "raise_fences" not in {x, y}
]


@pytest.mark.parametrize(("scene", "x", "y"), OVERTAKING)
def test_a_pair_in_which_the_second_overtakes(pairs: Pairs, scene: str, x: str, y: str) -> None:
    """G7, G10: what B has seen before it waited is worth nothing after it."""
    seen = pairs.overtaken(scene, METHODS[x], METHODS[y])
    assert seen in pairs.allowed(scene, METHODS[x], METHODS[y], "COMMIT", "waited")


# A grant is judged by what stands after the wait

BAD_GRANT = """
INSERT INTO bad_resource AS r (resource, key, fence) VALUES ('resource', %s, 1)
  ON CONFLICT (resource) DO UPDATE SET key = excluded.key, fence = r.fence + 1
    WHERE NOT EXISTS (SELECT FROM bad_action a WHERE a.key = r.key AND a.live)
  RETURNING fence
"""
ROUNDS = 8


def _badly_granted(connection: psycopg.Connection[Any], key: str) -> bool:
    if connection.execute(BAD_GRANT, (key,)).fetchone() is None:
        return False
    connection.execute("INSERT INTO bad_action VALUES (%s, true)", (key,))
    return True


def test_a_subquery_is_judged_by_the_snapshot_of_before_the_wait(dsn: str) -> None:
    """Why effect_acquire locks first and judges later: one upsert with a subquery grants twice, cold and warm (G7)."""
    stage = Stage(dsn, SCHEMA)
    stage.a.execute("CREATE TABLE bad_resource (resource text PRIMARY KEY, key text, fence bigint)")
    stage.a.execute("CREATE TABLE bad_action (key text PRIMARY KEY, live boolean)")

    def b() -> bool:
        with stage.stores.database.raw() as connection, connection.transaction():
            return _badly_granted(connection, "b")

    for _ in range(ROUNDS):
        stage.a.execute("TRUNCATE bad_resource, bad_action")
        stage.a.execute("INSERT INTO bad_resource VALUES ('resource', 'old', 1)")
        stage.a.execute("INSERT INTO bad_action VALUES ('old', false)")
        with stage.holding("COMMIT"):
            assert _badly_granted(stage.a, "a")
            waiting = stage.blocked(b)
        assert waiting.result()
        assert not _badly_granted(stage.a, "c")
        assert stage.watch.one("SELECT count(*) FROM bad_action WHERE live") == 2
    stage.a.execute("DROP TABLE bad_resource, bad_action")
    stage.close()


def _alone(store: PostgresEffectStore, action: Action) -> object:
    return store.acquire(action, TTL_SECONDS)


def _in_batch(store: PostgresEffectStore, action: Action) -> object:
    [outcome] = store.acquire_many([action], TTL_SECONDS)
    return outcome


ASKING = {"alone": _alone, "in batch": _in_batch}


@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("asking", ASKING)
@pytest.mark.parametrize("scene", ["expired", "due", "done", "new"])
def test_two_keys_on_one_resource_are_granted_once(dsn: str, scene: str, asking: str, ending: str) -> None:
    """G7: whoever waits for the grant of a rival is contended if that commits, with cold plans and with warm ones."""
    pairs = Pairs(dsn)
    stage, ask = pairs.stage, ASKING[asking]
    for _ in range(ROUNDS):
        newest = 0 if scene == "new" else pairs.arranged(scene).lease.fence
        with stage.holding(ending):
            a = ask(stage.first, Action("a", KEY.resource))
            waiting = stage.blocked(ask, stage.second, Action("b", KEY.resource))
        b = waiting.result()
        assert isinstance(a, Granted)
        assert a.lease.fence == newest + 1
        if ending == "COMMIT":
            assert isinstance(b, Contended)
            assert stage.second.lookup("b") is None
        else:
            assert isinstance(b, Granted)
            assert b.lease.fence == newest + 1
            assert stage.second.lookup("a") is None
        stage.empty()
    stage.close()


# The clock is read after the locks

SHORT_SECONDS = 0.3


@pytest.fixture(scope="module")
def real_stage(dsn: str) -> Iterator[Stage]:
    stage = Stage(dsn, SCHEMA)
    yield stage
    stage.close()


@pytest.fixture
def real(real_stage: Stage) -> Stage:
    """A stage on the database's own clock, without keys."""
    real_stage.empty()
    return real_stage


def _expire(stage: Stage, lease: Lease) -> datetime:
    """Let the database's clock pass the end of a lease. Return a moment between that and now."""
    stage.watch.until("SELECT clock_timestamp() >= %s", lease.expires_at)
    return stage.now()


def _later(stage: Stage) -> datetime:
    """Let the database's clock move on by more than the rounding of a lease."""
    moment = stage.watch.one("SELECT clock_timestamp() + interval '30 milliseconds'")
    stage.watch.until("SELECT clock_timestamp() >= %s", moment)
    return stage.now()


def _lock(stage: Stage, table: str) -> None:
    column = {"effect_action": "key", "effect_resource": "resource"}[table]
    stage.a.execute(stage.watch.sql(f"SELECT FROM {{schema}}.{table} WHERE {column} IN ('key', 'resource') FOR UPDATE"))


WAITING_ON = {"renew": 2, "begin_reconcile": 2, "abandon": 1, "resolve_not_applied": 1}
LOCKED = [(name, table) for name, n in WAITING_ON.items() for table in ("effect_action", "effect_resource")[:n]]


@pytest.mark.parametrize(("name", "table"), LOCKED)
def test_a_lease_that_ends_during_the_wait_has_ended(real: Stage, name: str, table: str) -> None:
    """G23, G13, G3: asked in time, judged after the lock: renew and abandon lose, reconcilers find it uncertain."""
    lease = _granted(real.first, ttl=SHORT_SECONDS)
    with real.holding("COMMIT"):
        _lock(real, table)
        waiting = real.blocked(answer_of, METHODS[name].call, real.second, Scene(lease, lease), "b")
        moment = _expire(real, lease)
    answer, record = waiting.result(), real.second.lookup(KEY.key)
    assert record is not None
    if name in {"renew", "abandon"}:
        assert answer[0] == "LeaseLost"
        assert (record.state, record.expires_at) == (State.IN_FLIGHT, lease.expires_at)
    else:
        assert isinstance(answer, ReconcileClaim | Ruling)
        assert real.second.history(KEY.key)[0].event == "expired"
        assert real.second.history(KEY.key)[0].at >= moment


@pytest.mark.parametrize("asking", ASKING)
@pytest.mark.parametrize("known", [False, True])
def test_an_intent_that_expires_during_the_wait_is_uncertain(real: Stage, asking: str, *, known: bool) -> None:
    """G3, G23: the same key, asked for while its grant is being written, and judged when that has expired."""
    if known:
        real.first.abandon(KEY, _granted(real.first))
    with real.holding("COMMIT"):
        lease = _granted(real.first, ttl=SHORT_SECONDS)
        waiting = real.blocked(ASKING[asking], real.second, KEY)
        moment = _expire(real, lease)
    outcome = waiting.result()
    assert isinstance(outcome, Uncertain)
    assert outcome.since >= moment
    assert [entry.event for entry in real.second.history(KEY.key)] == ["expired"]


@pytest.mark.parametrize("asking", ASKING)
@pytest.mark.parametrize("known", [False, True])
def test_a_resource_whose_lease_ends_during_the_wait_is_taken_over(real: Stage, asking: str, *, known: bool) -> None:
    """G6, G23: another key on that resource is granted it, from now on, and the old intent is uncertain."""
    if known:
        known_key = Action("b", KEY.resource)
        real.first.abandon(known_key, _granted(real.first, known_key))
    with real.holding("COMMIT"):
        lease = _granted(real.first, ttl=SHORT_SECONDS)
        waiting = real.blocked(ASKING[asking], real.second, Action("b", KEY.resource))
        moment = _expire(real, lease)
    outcome = waiting.result()
    assert isinstance(outcome, Granted)
    assert outcome.lease.fence == lease.fence + 1
    assert outcome.lease.expires_at >= moment + timedelta(seconds=TTL_SECONDS)
    assert [entry.event for entry in real.second.history(KEY.key)] == ["expired"]


@pytest.mark.parametrize("asking", ASKING)
@pytest.mark.parametrize("scene", ["new", "new, elsewhere", "known", "known, elsewhere"])
def test_a_lease_runs_from_after_the_wait(real: Stage, scene: str, asking: str) -> None:
    """G23: who waits for a rival that rolls back has the whole of the lease before them, as the store has it."""
    if scene.startswith("known"):
        real.first.abandon(KEY, _granted(real.first))
    wanted = Action(KEY.key, "elsewhere") if scene.endswith("elsewhere") else KEY
    with real.holding("ROLLBACK"):
        _granted(real.first)
        waiting = real.blocked(ASKING[asking], real.second, wanted)
        moment = _later(real)
    outcome, record = waiting.result(), real.second.lookup(KEY.key)
    assert isinstance(outcome, Granted)
    assert record is not None
    assert record.expires_at == outcome.lease.expires_at
    assert outcome.lease.expires_at >= moment + timedelta(seconds=TTL_SECONDS)


@pytest.mark.parametrize("table", ["effect_action", "effect_resource"])
def test_a_renewal_runs_from_after_the_wait(real: Stage, table: str) -> None:
    """G13, G23: the new expiry is the store's now + ttl, and now is when the rows are locked."""
    lease = _granted(real.first)
    with real.holding("ROLLBACK"):
        _lock(real, table)
        waiting = real.blocked(real.second.renew, KEY, lease, TTL_SECONDS)
        moment = _later(real)
    assert waiting.result().expires_at >= moment + timedelta(seconds=TTL_SECONDS)


# An effect in the database against those who speak of its key

RIVALS = ("take_over", "expire_intents", "resolve_applied", "resolve_not_applied", "mark_uncertain")
LATE = {"expire_intents": None, "take_over": "FenceStale"}


@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("rival", RIVALS)
def test_a_rival_before_an_expired_database_effect(pairs: Pairs, rival: str, ending: str) -> None:
    """G16, section 2: what a rival has settled stays so and the data is gone; a sweep settles nothing."""
    scene, stage = pairs.arranged("expired"), pairs.stage
    with stage.holding(ending):
        answer_of(METHODS[rival].call, stage.first, scene, "a")
        waiting = stage.blocked(answer_of, _database_effect, stage.second, scene, "b")
    refused = LATE.get(rival, "LeaseLost") if ending == "COMMIT" else None
    answer = waiting.result()
    assert (answer and answer[0]) == refused
    _data_goes_with_completion(stage, kept=refused is None, by="b")


@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("rival", RIVALS)
def test_a_rival_after_an_expired_database_effect(pairs: Pairs, rival: str, ending: str) -> None:
    """G12: while the effect's transaction is open nobody else settles its key; then it is done, or never happened."""
    scene, stage = pairs.arranged("expired"), pairs.stage
    with stage.holding(ending):
        _database_effect(stage.first, scene, "a")
        future = stage.start(answer_of, METHODS[rival].call, stage.second, scene, "b")
        assert stage.waits(future) is (rival != "expire_intents")
    answer = future.result()
    _data_goes_with_completion(stage, kept=ending == "COMMIT", by="a")
    events = [entry.event for entry in stage.second.history(KEY.key)]
    if rival == "expire_intents":
        assert answer == 0
    elif ending == "COMMIT":
        assert events == []
    else:
        assert events[:1] == ["marked" if rival == "mark_uncertain" else "expired"]


def _data_goes_with_completion(stage: Stage, *, kept: bool, by: str) -> None:
    record = stage.second.lookup(KEY.key)
    assert record is not None
    assert (record.state is State.DONE and record.result == f"of {by}") is kept
    assert stage.watch.one("SELECT array_agg(value) FROM {schema}.data") == ([f"data of {by}"] if kept else None)


# Rows are locked in one order

ON_DISK = [Action(name, name) for name in "zyxcba"]
"""Actions in the order in which their rows lie, which is not that of their names."""
PLAIN_SCANS = "SELECT set_config(name, 'off', false) FROM unnest(ARRAY['enable_indexscan', 'enable_bitmapscan']) name"


@pytest.fixture(scope="module")
def scanning(dsn: str) -> Iterator[Pairs]:
    """Pairs whose second session finds rows in the order in which they lie, as statistics can make any session do."""
    scanning = Pairs(dsn)
    with scanning.stage.stores.database.raw() as connection:
        connection.execute(PLAIN_SCANS)
    yield scanning
    scanning.stage.close()


def _completing_all(pairs: Pairs) -> Callable[[], object]:
    completions = [(action, _granted(pairs.stage.first, action), "r") for action in ON_DISK]
    return lambda: pairs.stage.second.complete_many(completions)


def _acquiring_all(pairs: Pairs) -> Callable[[], object]:
    for action in ON_DISK:
        pairs.stage.first.abandon(action, _granted(pairs.stage.first, action))
    return lambda: pairs.stage.second.acquire_many(ON_DISK, TTL_SECONDS)


def _taking_over(pairs: Pairs) -> Callable[[], object]:
    """Ask for the last known key on the resource of the first, whose intent has expired."""
    last, *_, first = ON_DISK
    _acquiring_all(pairs)
    _granted(pairs.stage.first, first)
    pairs.clock.tick(TTL_SECONDS)
    return lambda: pairs.stage.second.acquire(Action(last.key, first.resource), TTL_SECONDS)


def _raising_fences(pairs: Pairs) -> Callable[[], object]:
    _completing_all(pairs)
    return lambda: pairs.stage.second.raise_fences(100)


LOCKING = [
    (_completing_all, "effect_action"),
    (_acquiring_all, "effect_resource"),
    (_acquiring_all, "effect_action"),
    (_taking_over, "effect_action"),
    (_raising_fences, "effect_resource"),
    (_raising_fences, "effect_action"),
]


@pytest.mark.parametrize(("prepare", "table"), LOCKING)
def test_rows_are_locked_in_the_order_of_their_names(
    scanning: Pairs, prepare: Callable[[Pairs], Callable[[], object]], table: str
) -> None:
    """G7: who waits for the first of its rows has locked none of the others, so that nobody waits in a circle."""
    stage, watch = scanning.stage, scanning.stage.watch
    stage.a.execute(watch.sql("TRUNCATE {schema}.effect_action, {schema}.effect_resource"))
    call = prepare(scanning)
    column = {"effect_action": "key", "effect_resource": "resource"}[table]
    rows = f"SELECT {column} FROM {{schema}}.{table} WHERE {column} <> 'a' ORDER BY {column} DESC"
    with stage.holding("ROLLBACK"):
        stage.a.execute(watch.sql(f"SELECT FROM {{schema}}.{table} WHERE {column} = 'a' FOR UPDATE"))
        waiting = stage.blocked(call)
        free = stage.a.execute(watch.sql(f"{rows} FOR UPDATE SKIP LOCKED")).fetchall()
    waiting.result()
    assert [name for (name,) in free] == [action.key for action in ON_DISK[:-1]]


# No deadlock

DEADLOCKS = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
CROSSINGS = 100


def test_the_server_counts_deadlocks(real: Stage) -> None:
    """What the next test relies on."""
    before = real.watch.one(DEADLOCKS)

    def b() -> None:
        with real.stores.database.raw() as connection, connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(2)")
            connection.execute("SELECT pg_advisory_xact_lock(1)")

    with real.a.transaction(force_rollback=True):
        real.a.execute("SET LOCAL deadlock_timeout = '1ms'")
        real.a.execute("SELECT pg_advisory_xact_lock(1)")
        waiting = real.blocked(b)
        with pytest.raises(psycopg.errors.DeadlockDetected), real.a.transaction():
            real.a.execute("SELECT pg_advisory_xact_lock(2)")
    waiting.result()
    real.a.execute("SELECT pg_stat_force_next_flush()")
    real.watch.until(f"SELECT ({DEADLOCKS}) = %s", before + 1)


class Crossing:
    """One of two that go through the same keys and resources in opposite orders, step by step together."""

    def __init__(self, store: PostgresEffectStore, barrier: Barrier, actions: list[Action]) -> None:
        self.store, self.barrier, self.actions = store, barrier, actions

    def go(self) -> list[Lease]:
        """Both hold both keys, asking as the same holders; then each wants its first on the other's resource."""
        (mine, other), store = self.actions, self.store
        holders = [uuid5(NAMESPACE_OID, action.key) for action in self.actions]
        self.barrier.wait()
        outcomes = store.acquire_many(self.actions, TTL_SECONDS, holders=holders)
        leases = [outcome.lease for outcome in outcomes if isinstance(outcome, Granted)]
        for action, lease in zip(self.actions, leases, strict=True):
            store.renew(action, lease, TTL_SECONDS)
        self.barrier.wait()
        store.abandon(mine, leases[0])
        moved = store.acquire(Action(mine.key, other.resource), TTL_SECONDS)
        self.barrier.wait()
        credentials = list(zip(self.actions, leases, ["r", "r"], strict=True))
        if isinstance(moved, Granted):
            credentials[0] = (Action(mine.key, other.resource), moved.lease, "r")
        store.complete_many(credentials)
        self.barrier.wait()
        for action in self.actions:
            store.acquire(Action(f"next {mine.key}", action.resource), TTL_SECONDS)
        return leases


def test_two_keys_over_two_resources_in_opposite_orders(dsn: str) -> None:
    """G7, FC-44: many rounds of two threads, and the server has counted no deadlock, not even one that was retried."""
    watch, barrier = Watch(dsn, SCHEMA), Barrier(2, timeout=60)
    before = watch.one(DEADLOCKS)
    stores = Stores.open(f"{dsn}?application_name=crossing", schema=SCHEMA)
    with ThreadPoolExecutor(2) as pool:
        for n in range(CROSSINGS):
            actions = [Action(f"p {n}", f"x {n}"), Action(f"q {n}", f"y {n}")]
            crossings = [Crossing(stores.effects, barrier, order) for order in (actions, actions[::-1])]
            one, two = pool.map(Crossing.go, crossings)
            assert [lease.fence for lease in one] == [lease.fence for lease in two] == [1, 1]
    stores.close()  # a session's counts arrive at its end at the latest
    watch.until("SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'crossing'")
    assert watch.one(DEADLOCKS) == before
    watch.close()


# A crowd

CROWDS = [("read committed", 50), ("repeatable read", 12), ("serializable", 12)]


@pytest.mark.parametrize(("isolation", "count"), CROWDS)
def test_a_crowd_of_processes_on_one_new_key(real: Stage, dsn: str, isolation: str, count: int) -> None:
    """G7, FC-44: processes let loose at once: one is granted, the others told *in flight*, and none an error."""
    options = {"options": f"-c default_transaction_isolation={isolation.replace(' ', chr(92) + ' ')}"}
    url = sa.make_url(dsn).update_query_dict(options).render_as_string(hide_password=False)
    crowd = [sys.executable, "-m", "tests.faults.schedule", url, SCHEMA, str(count)]
    with subprocess.Popen(crowd, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        with real.holding("COMMIT"):
            real.a.execute("SELECT pg_advisory_xact_lock(%s)", (BARRIER,))
            real.watch.until("SELECT count(*) = %s FROM pg_locks WHERE locktype = 'advisory' AND NOT granted", count)
        answers, _ = process.communicate(timeout=60)
    assert sorted(answers.split("\n")) == ["", "Granted", *["InFlight"] * (count - 1)]
