"""A wire cut before or after any message, in both directions, or gone silent there (G26, FC-54).

The caller learns the truth, or an error that says what is known; the key is unchanged or done, never between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from pgref.contracts.effects import Action, Granted, Lease, ReconcileClaim, Resolution, RetrySafety, State
from pgref.embedded import PostgresServer
from pgref.errors import LeaseLost, OutcomeUnknown, PgrefError, Unavailable
from pgref.postgres import PostgresEffectStore, Stores, _connection
from tests.faults.state import Observer, assert_clean, plain
from tests.faults.wire import Cut, Direction, Wire

A = Action("a", "x", retry_safety=RetrySafety.SAFE, payload="again")
B = Action("b", "y")
APPLICATION = "wire"
APPLIED = Resolution(applied=True, result="ruled", by="ann", why="saw it")
SETTLE_SECONDS = 0.4
LOCK_SECONDS = 4
FREE = 0
ABANDON_MESSAGES = 5
"""Parse, Bind, Describe, Execute, Sync."""


@dataclass
class Scene:
    """The schema as the observer and a store without a wire see it."""

    observer: Observer
    effects: PostgresEffectStore

    def granted(self, action: Action = A, ttl: float = 100) -> Lease:
        outcome = self.effects.acquire(action, ttl)
        assert isinstance(outcome, Granted)
        return outcome.lease

    def expired(self) -> Lease:
        lease = self.granted(ttl=0.001)
        self.observer.until_past(lease.expires_at)
        return lease

    def marked(self) -> Lease:
        lease = self.granted()
        self.effects.mark_uncertain(A, lease, "timeout", by="worker")
        return lease

    def claimed(self) -> ReconcileClaim:
        self.marked()
        return self.effects.begin_reconcile(A, 100)

    def due(self) -> None:
        self.effects.abandon(A, self.granted(), due_in_seconds=0.001)
        self.observer.until("SELECT clock_timestamp() > %s + interval '5 ms'", self.observer.one("SELECT now()"))

    def done(self) -> None:
        self.effects.complete(A, self.granted(), "first")
        self.observer.until("SELECT clock_timestamp() > %s + interval '5 ms'", self.observer.one("SELECT now()"))


@dataclass(frozen=True)
class Method:
    """A call through the wire on what ``prepare`` leaves.

    ``lossy``: what the first answer handed out is gone with it, and a repeated call hands out the rest.
    """

    prepare: Callable[[Scene], Any]
    call: Callable[[Stores, Any], Any]
    lossy: bool = False


def _write_fenced(stores: Stores, _: object) -> None:
    stores.sinks.write_fenced("s", 7, lambda connection: _insert(stores, connection))


def _database_effect(stores: Stores, lease: Lease, *, at_once: bool = False) -> str:
    """Complete in the transaction of the effect; a commit without an answer is settled under the row lock."""
    try:
        _commit_effect(stores, lease, at_once=at_once)
    except OutcomeUnknown:
        return _settled(stores, lease)
    return "done"


def _commit_effect(stores: Stores, lease: Lease, *, at_once: bool = False) -> None:
    with stores.database.transaction() as connection:
        _insert(stores, connection)
        complete = stores.effects.complete_and_commit if at_once else stores.effects.complete_within
        complete(connection, A, lease, "r")


def _single_commit(stores: Stores, _: object) -> None:
    with stores.database.transaction() as connection:
        outcome = stores.effects.acquire_within(connection, A)
        assert isinstance(outcome, Granted)
        _insert(stores, connection)
        stores.effects.complete_acquired(connection, A, outcome.lease, "r")


def _settled(stores: Stores, lease: Lease) -> str:
    try:
        stores.effects.abandon(A, lease)
    except LeaseLost:
        record = stores.effects.lookup(A.key)
        assert record is not None
        assert (record.state, record.fence) == (State.DONE, lease.fence)
        return "done"
    except Unavailable as away:
        raise OutcomeUnknown("nobody to ask") from away
    return "withdrawn"


class StatementFailedError(Exception):
    """The body's own statement failed: that is the body's to handle."""


def _insert(stores: Stores, connection: sa.Connection) -> None:
    try:
        connection.exec_driver_sql(f'INSERT INTO "{stores.schema}".fault_data VALUES (%s)', ("effect",))
    except sa.exc.DBAPIError as error:
        raise StatementFailedError from error


METHODS: dict[str, Method] = {
    "acquire": Method(lambda _: None, lambda stores, _: stores.effects.acquire(A, 100)),
    "acquire_many": Method(lambda _: None, lambda stores, _: stores.effects.acquire_many([A, B], 100)),
    "complete": Method(Scene.granted, lambda stores, lease: stores.effects.complete(A, lease, "r")),
    "complete_many": Method(
        lambda scene: [(A, scene.granted(A), "r"), (B, scene.granted(B), "r")],
        lambda stores, completions: stores.effects.complete_many(completions),
    ),
    "renew": Method(Scene.granted, lambda stores, lease: stores.effects.renew(A, lease, 1000)),
    "renew_many": Method(Scene.granted, lambda stores, lease: stores.effects.renew_many([(A, lease)], 1000)),
    "renew_running": Method(
        Scene.granted, lambda stores, lease: stores.effects.renew_running([("a", lease.fence)], 1000)
    ),
    "mark_uncertain": Method(
        Scene.granted, lambda stores, lease: stores.effects.mark_uncertain(A, lease, "why", by="me")
    ),
    "release": Method(Scene.granted, lambda stores, lease: stores.effects.release(A, lease)),
    "abandon": Method(Scene.granted, lambda stores, lease: stores.effects.abandon(A, lease, due_in_seconds=60)),
    "begin_reconcile": Method(Scene.marked, lambda stores, _: stores.effects.begin_reconcile(A, 100)),
    "claim_backlog": Method(Scene.marked, lambda stores, _: stores.effects.claim_backlog(10, 100), lossy=True),
    "defer_reconcile": Method(
        Scene.claimed, lambda stores, claim: stores.effects.defer_reconcile(claim, None, note="ask", by="me")
    ),
    "resolve_uncertain": Method(Scene.marked, lambda stores, _: stores.effects.resolve_uncertain(A, APPLIED)),
    "expire_intents": Method(Scene.expired, lambda stores, _: stores.effects.expire_intents(10), lossy=True),
    "claim_due": Method(Scene.due, lambda stores, _: stores.effects.claim_due(10, 60), lossy=True),
    "retain": Method(Scene.done, lambda stores, _: stores.effects.retain(0.001, 10), lossy=True),
    "raise_fences": Method(
        Scene.granted, lambda stores, _: stores.effects.raise_fences(100, by="op", why="failover"), lossy=True
    ),
    "lookup": Method(Scene.granted, lambda stores, _: stores.effects.lookup("a")),
    "write_fenced": Method(lambda _: None, _write_fenced),
    "database effect": Method(Scene.granted, _database_effect),
    "database effect, committed at once": Method(Scene.granted, partial(_database_effect, at_once=True)),
    "single commit": Method(lambda _: None, _single_commit),
}
IN_A_TRANSACTION = {"write_fenced", "database effect", "database effect, committed at once", "single commit"}
ASKED_ONCE = {"write_fenced", "single commit"}
CALLS = [name for name in METHODS if name not in IN_A_TRANSACTION]
Rows = list[tuple[Any, ...]]


@dataclass(frozen=True)
class Run:
    """What the caller got, the rows before the call and when all its sessions had ended, and the messages passed."""

    answer: Any
    before: Rows
    after: Rows
    passed: dict[Direction, int]


@dataclass
class Trial:
    """Runs methods through the wire, each on an empty schema and with an engine of its own."""

    scene: Scene
    wire: Wire
    url: sa.URL
    options: str = ""

    def run(self, method: Method, cut: Cut | None, *, warm: bool = True, settle_seconds: float = 5.0) -> Run:
        observer = self.scene.observer
        observer.empty()
        ground = method.prepare(self.scene)
        before = observer.rows()
        stores = self.opened(settle_seconds)
        if warm:
            stores.effects.lookup("warm")
        self.wire.arm(cut)
        answer = _answer(method, stores, ground)
        assert not self.wire.armed
        passed = self.wire.passed
        self.wire.arm()
        assert_clean(stores.engine)
        stores.effects.lookup("next")
        self.hang_up(stores)
        return Run(answer, before, observer.rows(), passed)

    def opened(self, settle_seconds: float) -> Stores:
        options = {"connect_timeout": 2, "application_name": APPLICATION, "sslmode": "disable", "gssencmode": "disable"}
        url = self.url.set(host=self.wire.host, port=self.wire.port)
        engine = sa.create_engine(url, connect_args={**options, "options": self.options})
        return Stores.open(engine, schema=self.scene.observer.schema, settle_seconds=settle_seconds)

    def hang_up(self, stores: Stores) -> None:
        stores.close()
        self.wire.drop()
        self.scene.observer.until_gone(APPLICATION)


def _answer(method: Method, stores: Stores, ground: Any) -> Any:
    try:
        return plain(method.call(stores, ground))
    except (PgrefError, StatementFailedError) as error:
        return error


def places(passed: dict[Direction, int]) -> Iterator[Cut]:
    """Yield a cut before and after every message."""
    for direction, count in passed.items():
        for message in range(1, count + 1):
            yield Cut(direction, message, before=True)
            yield Cut(direction, message)


def assert_true(run: Run, undisturbed: Run, *, lossy: bool = False) -> None:
    """Check that the caller knows what the database knows, or that it does not know."""
    match run.answer:
        case OutcomeUnknown():
            assert run.after in (run.before, undisturbed.after) or is_withdrawn(run.after)
        case Unavailable() | StatementFailedError():
            assert run.after == run.before
        case "withdrawn":
            assert is_withdrawn(run.after)
        case 0 | [] | ["busy"]:  # what the first try still holds is skipped
            assert run.after in (run.before, undisturbed.after)
        case _:
            assert run.after == undisturbed.after
            assert lossy or run.answer == undisturbed.answer


def is_withdrawn(rows: Rows) -> bool:
    """Say whether the effect did not happen and its key is free."""
    return ("data", "effect") not in rows and [row[5] for row in rows if row[0] == "action"] == [FREE]


@pytest.fixture(scope="module")
def scene(postgres: PostgresServer, stores: Stores) -> Iterator[Scene]:
    observer = Observer(postgres.conninfo, stores.schema)
    yield Scene(observer, stores.effects)
    observer.close()


@pytest.fixture
def trial(postgres: PostgresServer, scene: Scene) -> Iterator[Trial]:
    with Wire(postgres.host, postgres.port) as wire:
        yield Trial(scene, wire, sa.make_url(postgres.dsn))


@pytest.mark.parametrize("name", METHODS)
def test_a_wire_cut_at_any_message(trial: Trial, name: str) -> None:
    """G26: the key is unchanged or done. A call is asked again and learns the truth; a transaction is rolled back."""
    method = METHODS[name]
    undisturbed = trial.run(method, None)
    assert not isinstance(undisturbed.answer, Exception)
    for cut in places(undisturbed.passed):
        run = trial.run(method, cut)
        assert_true(run, undisturbed, lossy=method.lossy)
        assert name in IN_A_TRANSACTION or not isinstance(run.answer, Exception), cut


@pytest.mark.parametrize("name", ["acquire", "complete", "abandon", "begin_reconcile"])
def test_a_wire_cut_where_the_default_is_serializable(trial: Trial, name: str) -> None:
    """G26: the same for the three statements of a call there."""
    trial.options = "-c default_transaction_isolation=serializable"
    test_a_wire_cut_at_any_message(trial, name)


def test_a_wire_cut_while_connecting(trial: Trial) -> None:
    """G26: at every message from the start-up on; without a connection nothing was written."""
    method = METHODS["acquire"]
    undisturbed = trial.run(method, None, warm=False)
    for cut in places(undisturbed.passed):
        assert_true(trial.run(method, cut, warm=False), undisturbed)


@pytest.mark.parametrize("name", METHODS)
def test_a_server_that_stays_away(trial: Trial, name: str) -> None:
    """G26: a call that was sent, with nobody left to ask, ends in `OutcomeUnknown` within the deadline."""
    method = METHODS[name]
    undisturbed = trial.run(method, None)
    cut = Cut(Direction.CLIENT, undisturbed.passed[Direction.CLIENT], for_good=True)
    run = trial.run(method, cut, settle_seconds=0.2)
    assert_true(run, undisturbed)
    assert isinstance(run.answer, OutcomeUnknown)


@pytest.mark.parametrize("name", METHODS)
def test_a_wire_that_falls_silent(trial: Trial, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """G26: no call waits for ever, neither for its answer nor for the lock of a session whose client has gone."""
    monkeypatch.setattr(_connection, "PATIENT_SECONDS", SETTLE_SECONDS)  # raise_fences waits longer than others
    method = METHODS[name]
    undisturbed = trial.run(method, None)
    for before in (True, False):
        cut = Cut(Direction.CLIENT, undisturbed.passed[Direction.CLIENT], before=before, silent=True)
        run = trial.run(method, cut, settle_seconds=SETTLE_SECONDS)
        assert_true(run, undisturbed, lossy=True)
        assert before or name in ASKED_ONCE or not isinstance(run.answer, Exception)


def test_a_server_that_falls_silent_for_good(trial: Trial) -> None:
    """G26: a connection that is accepted and never answered counts as none."""
    method = METHODS["acquire"]
    undisturbed = trial.run(method, None)
    cut = Cut(Direction.CLIENT, undisturbed.passed[Direction.CLIENT], silent=True, for_good=True)
    run = trial.run(method, cut, settle_seconds=SETTLE_SECONDS)
    assert_true(run, undisturbed)
    assert isinstance(run.answer, OutcomeUnknown)


def test_a_commit_that_lingers(trial: Trial) -> None:
    """G26: a transaction whose commit got lost holds its row: unknown until it has ended, and then withdrawn."""
    method = METHODS["database effect"]
    commit = trial.run(method, None).passed[Direction.CLIENT]
    trial.scene.observer.empty()
    lease = trial.scene.granted()
    stores = trial.opened(SETTLE_SECONDS)
    stores.effects.lookup("warm")
    trial.wire.arm(Cut(Direction.CLIENT, commit, before=True, silent=True))
    with pytest.raises(OutcomeUnknown):
        _database_effect(stores, lease)
    trial.hang_up(stores)
    assert _settled(stores, lease) == "withdrawn"
    assert ("data", "effect") not in trial.scene.observer.rows()
    trial.hang_up(stores)


def test_a_commit_that_was_made_and_not_answered(trial: Trial) -> None:
    """G26: unknown to who sent it; under the row lock a fresh connection learns that the key is done."""
    method = METHODS["database effect"]
    commit = trial.run(method, None).passed[Direction.CLIENT]
    trial.scene.observer.empty()
    lease = trial.scene.granted()
    stores = trial.opened(SETTLE_SECONDS)
    stores.effects.lookup("warm")
    trial.wire.arm(Cut(Direction.CLIENT, commit, silent=True))
    with pytest.raises(OutcomeUnknown, match="not answered"):
        _commit_effect(stores, lease)
    assert _settled(stores, lease) == "done"
    assert ("data", "effect") in trial.scene.observer.rows()
    trial.hang_up(stores)


def test_what_a_call_says_has_a_cause(trial: Trial) -> None:
    """G26: an error that the store already speaks keeps what it came from, and is not its own cause."""
    stores = trial.opened(SETTLE_SECONDS)
    trial.wire.arm(Cut(Direction.CLIENT, 1, before=True, for_good=True))
    with pytest.raises(Unavailable) as caught:
        stores.effects.lookup("a")
    assert isinstance(caught.value.__cause__, psycopg.OperationalError)
    trial.hang_up(stores)


@pytest.fixture
def held(postgres: PostgresServer, stores: Stores, scene: Scene) -> Iterator[tuple[Lease, psycopg.Connection]]:
    """The lease of a key whose row another session holds; whoever waits for it is told soon."""
    scene.observer.empty()
    lease = scene.granted()
    with psycopg.connect(postgres.conninfo) as holder:
        holder.execute(f"ALTER FUNCTION \"{stores.schema}\".effect_abandon SET lock_timeout = '50ms'")
        holder.commit()
        holder.execute(f'SELECT FROM "{stores.schema}".effect_action FOR UPDATE')
        yield lease, holder


def test_a_row_that_is_held_for_long(stores: Stores, held: tuple[Lease, psycopg.Connection]) -> None:
    """G26: the server gives up waiting first, and says that nothing was written."""
    lease, holder = held
    with pytest.raises(Unavailable, match="lock timeout"):
        stores.effects.abandon(A, lease)
    holder.rollback()
    stores.effects.abandon(A, lease)
    assert_clean(stores.engine)


def test_a_lost_call_is_not_called_unwritten(trial: Trial, held: tuple[Lease, psycopg.Connection]) -> None:
    """G26: what a later try did not write the first one may have written."""
    lease, _ = held
    stores = trial.opened(SETTLE_SECONDS)
    stores.effects.lookup("warm")
    trial.wire.arm(Cut(Direction.CLIENT, ABANDON_MESSAGES))
    with pytest.raises(OutcomeUnknown, match="the answer was lost"):
        stores.effects.abandon(A, lease)
    assert not trial.wire.armed
    assert_clean(stores.engine)
    trial.hang_up(stores)


def test_the_server_gives_up_before_its_client(scene: Scene) -> None:
    """G26: each function that writes waits for locks for less time than one try waits for its answer."""
    query = """
        SELECT array_agg(proname::text) FROM pg_proc WHERE pronamespace = %s::regnamespace AND provolatile = 'v'
            AND proname LIKE 'effect\\_%%' AND prolang = (SELECT oid FROM pg_language WHERE lanname = 'plpgsql')
            AND NOT coalesce('lock_timeout=4s' = ANY (proconfig), false)
    """
    assert scene.observer.one(query, f'"{scene.observer.schema}"') in (None, ["effect_abandon"])
    assert LOCK_SECONDS < _connection.SETTLE_SECONDS / 2
