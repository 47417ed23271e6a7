"""The sweep in this process, on PostgreSQL with a clock of the test's: what it asks, rules, puts off and sends."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from kombu.exceptions import OperationalError

from celery_integration import Applied, Effect, EffectBusy, EffectUncertain, NotApplied, Unknown, fenced_task, install
from celery_integration.process import Gate, gate_of
from celery_integration.reconcile import LOOKS_AT_UNSAFE_MAX, SETTLING
from celery_integration.sweep import Swept, sweep
from pgref.clock import ManualClock
from pgref.contracts.effects import Action, EffectRecord, Granted, Resolution, State
from pgref.embedded import PostgresServer
from pgref.postgres import Stores, drop_schema, new_schema

PAUSE = 60.0
LEASE = 30.0

asked: Counter[str] = Counter()
verdicts: dict[str, Any] = defaultdict(lambda: Applied("found"))
hanging = threading.Event()
ran: list[str] = []


def _probe(effect: Effect, key: str) -> Any:
    asked[key] += 1
    match verdicts[key]:
        case "hang":
            return hanging.wait()
        case Exception() as error:
            raise error
        case verdict if callable(verdict):
            return verdict(effect)
        case verdict:
            return verdict


@fenced_task(key="{key}", sink="external", scope="sweep")
def risky(effect: Effect, key: str) -> None:
    raise ConnectionError("no answer")


@fenced_task(key="{key}", sink="external", scope="sweep safe", retry_safety="safe")
def harmless(effect: Effect, key: str) -> None:
    ran.append(key)


@fenced_task(key="{key}", sink="external", scope="sweep unasked")
def unasked(effect: Effect, key: str) -> None: ...


@fenced_task(key="{key}", sink="external", scope="sweep slow", settle_seconds=10)
def settling(effect: Effect, key: str) -> None: ...


@fenced_task(key="{key}", sink="external", scope="sweep trusting", trust_late_results=True)
def trusting(effect: Effect, key: str) -> None: ...


@fenced_task(key="{key}", scope="sweep database")
def booked(effect: Effect, key: str) -> None: ...


for task in (risky, harmless, settling):
    task.probe(_probe)


@pytest.fixture(scope="module")
def app(postgres: PostgresServer) -> Iterator[Celery]:
    app = Celery("sweeping", broker="memory://", set_as_current=False)
    app.conf.task_create_missing_queues = True
    dsn = postgres.create_database("sweeping")
    install(app, dsn=dsn, reconcile_seconds=PAUSE, probe_seconds=20, sweep_batch_max=100)
    app.finalize()
    yield app
    gate_of(app).stores.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def gate(app: Celery, clock: ManualClock) -> Iterator[Gate]:
    gate = gate_of(app)
    schema = new_schema(gate.stores.engine)
    gate.effects = Stores.open(gate.stores.engine, schema=schema, clock=clock).effects
    asked.clear()
    verdicts.clear()
    yield gate
    drop_schema(gate.stores.engine, schema)


def action_of(app: Celery, task: Any, name: str, *, payload: bool = True) -> Action:
    definition = task.definition
    task = app.tasks[task.name]
    from celery_integration.delivery import dumped

    text = dumped(task.signature((name,), task_id=name)) if payload else None
    return definition.action(task.name, definition.arguments((name,), {}), name, text)  # type: ignore[no-any-return]


class Backlog:
    """Uncertain effects, and what became of them."""

    def __init__(self, app: Celery, gate: Gate) -> None:
        self.app, self.gate = app, gate

    def granted(self, task: Any, name: str, *, payload: bool = True) -> tuple[Action, Granted]:
        action = action_of(self.app, task, name, payload=payload)
        granted = self.gate.effects.acquire(action, LEASE)
        assert isinstance(granted, Granted)
        return action, granted

    def uncertain(self, task: Any, *names: str, payload: bool = True) -> None:
        for name in names:
            action, granted = self.granted(task, name, payload=payload)
            self.gate.effects.mark_uncertain(action, granted.lease, "test")
            self.gate.effects.release(action, granted.lease)

    def record(self, task: Any, name: str) -> EffectRecord:
        record = self.gate.effects.lookup(action_of(self.app, task, name).key)
        assert record is not None
        return record

    def swept(self) -> Swept:
        return sweep(self.app, by="ann")


@pytest.fixture
def backlog(app: Celery, gate: Gate) -> Backlog:
    return Backlog(app, gate)


def test_what_expired_is_asked_about_and_settled(backlog: Backlog, clock: ManualClock) -> None:
    """FC-06 (c): a lease that ended in silence, the probe with the original argument, the ruling, in one sweep."""
    backlog.granted(risky, "expired")
    clock.tick(LEASE)
    assert backlog.swept() == Swept(expired=1, settled=1, put_off=0, parked=0, dispatched=0)
    record = backlog.record(risky, "expired")
    assert (record.state, record.result) == (State.DONE, '"found"')
    assert [(entry.event, entry.by) for entry in backlog.gate.effects.history(record.key)][-1] == (
        "ruled_applied",
        "ann",
    )


def test_a_database_effect_is_free_and_sent_again(backlog: Backlog) -> None:
    """Not done means not applied, whoever is asked."""
    backlog.uncertain(booked, "lost")
    assert backlog.swept() == Swept(expired=0, settled=1, put_off=0, parked=0, dispatched=1)
    assert backlog.record(booked, "lost").state is State.FREE
    assert backlog.swept().dispatched == 0


def test_what_was_not_applied_is_sent_again(backlog: Backlog) -> None:
    verdicts["lost"] = NotApplied("not in the ledger")
    backlog.uncertain(harmless, "lost")
    assert backlog.swept() == Swept(expired=0, settled=1, put_off=0, parked=0, dispatched=1)
    assert "not in the ledger" in backlog.gate.effects.history(backlog.record(harmless, "lost").key)[-1].why


@pytest.mark.parametrize(
    ("verdict", "note"),
    [
        (Unknown("the ledger is late"), "probe: the ledger is late"),
        (Unknown(), "probe: cannot tell"),
        (RuntimeError("broken\0\ud800"), "probe: RuntimeError: broken?"),
        ("no verdict", "probe: no verdict"),
        (None, "probe: no verdict"),
    ],
    ids=repr,
)
def test_a_probe_that_cannot_tell_is_asked_again_later(
    backlog: Backlog, clock: ManualClock, verdict: Any, note: str
) -> None:
    """It delays nobody but its own key, and that one for longer each time."""
    verdicts["unclear"] = verdict
    backlog.uncertain(risky, "unclear", "clear")
    for pause in (PAUSE, 2 * PAUSE, 4 * PAUSE):
        assert backlog.swept().put_off == 1
        record = backlog.record(risky, "unclear")
        assert (record.state, record.note) == (State.UNCERTAIN, note)
        assert record.next_look_at == clock.now() + timedelta(seconds=pause)
        clock.tick(pause - 1)
        assert backlog.swept() == Swept(0, 0, 0, 0, 0)
        clock.tick(1)
    assert (asked["unclear"], asked["clear"]) == (3, 1)
    assert backlog.record(risky, "clear").state is State.DONE


def test_a_probe_that_hangs_is_left_to_itself(
    backlog: Backlog, gate: Gate, app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a time of its own, and delays only its key."""
    monkeypatch.setattr(type(gate.settings), "probe_limit_seconds", 0.05)
    verdicts["hung"] = "hang"
    backlog.uncertain(risky, "a", "hung", "z")
    try:
        assert backlog.swept() == Swept(expired=0, settled=2, put_off=1, parked=0, dispatched=0)
        with pytest.raises(EffectUncertain):
            app.tasks[risky.name]("hung")
    finally:
        hanging.set()
        hanging.clear()
    assert backlog.record(risky, "hung").note == "probe: no answer in 0.05 s"


def test_many_sweeps_ask_about_each_key_once(backlog: Backlog) -> None:
    """G18: once per claim, and one ruling each."""
    names = [f"many {number}" for number in range(200)]
    backlog.uncertain(risky, *names)
    with ThreadPoolExecutor(4) as threads:
        swept = list(threads.map(lambda _: backlog.swept(), range(4)))
    assert sum(one.settled for one in swept) == len(names)
    assert {asked[name] for name in names} == {1}
    assert {backlog.record(risky, name).state for name in names} == {State.DONE}


def test_what_is_not_there_and_not_safe_is_looked_for_and_then_parked(backlog: Backlog, clock: ManualClock) -> None:
    """G20: it may land late, so a later look can still settle it; it never runs again by itself."""
    verdicts["late"] = verdicts["absent"] = NotApplied()
    backlog.uncertain(risky, "absent", "late")
    for look in range(1, LOOKS_AT_UNSAFE_MAX):
        assert backlog.swept().put_off == (2 if look == 1 else 1)
        verdicts["late"] = Applied()
        clock.tick(100 * PAUSE)
    assert backlog.swept() == Swept(expired=0, settled=0, put_off=0, parked=1, dispatched=0)
    clock.tick(100 * PAUSE)
    assert backlog.swept() == Swept(0, 0, 0, 0, 0)
    assert backlog.record(risky, "absent").parked
    assert backlog.record(risky, "late").state is State.DONE
    assert (asked["absent"], asked["late"]) == (LOOKS_AT_UNSAFE_MAX, 2)


def test_force_is_the_users_own_word(backlog: Backlog) -> None:
    verdicts["sure"] = NotApplied(force=True)
    backlog.uncertain(risky, "sure")
    assert backlog.swept().dispatched == 1


def test_what_nobody_can_be_asked_about_is_parked(backlog: Backlog) -> None:
    """It waits for a person, with a note that says why, and no sweep takes it up again."""
    backlog.uncertain(unasked, "parked")
    backlog.uncertain(risky, "no message", payload=False)
    assert backlog.swept() == Swept(expired=0, settled=0, put_off=0, parked=2, dispatched=0)
    record = backlog.record(unasked, "parked")
    assert record.parked
    assert "no probe" in (record.note or "")
    assert backlog.gate.effects.history(record.key)[-1].event == "parked"
    assert "message" in (backlog.record(risky, "no message").note or "")


@pytest.mark.parametrize("payload", ["{", "[]", '"text"', "{}", '{"task": "nobody.knows", "args": [], "kwargs": {}}'])
def test_a_message_that_says_nothing_here_waits(backlog: Backlog, gate: Gate, payload: str) -> None:
    """A worker that knows its task may sweep next."""
    action = Action("sweep:odd", "sweep:odd", payload=payload)
    granted = gate.effects.acquire(action, LEASE)
    assert isinstance(granted, Granted)
    gate.effects.mark_uncertain(action, granted.lease, "test")
    backlog.uncertain(risky, "well")
    swept = backlog.swept()
    assert (swept.settled, swept.put_off) == (1, 1)


def test_a_failure_in_settling_delays_only_its_key(backlog: Backlog, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("seal")

    backlog.uncertain(risky, "broken", "other")
    monkeypatch.setattr("celery_integration.reconcile.ask", broken)
    assert backlog.swept().put_off == 2
    assert backlog.record(risky, "broken").note == "ZeroDivisionError: seal"


# Time for a provider to settle


def test_a_provider_is_given_its_time(backlog: Backlog, app: Celery, clock: ManualClock) -> None:
    """Sweeps and deliveries both wait; a delivery comes back meanwhile, and does not fail."""
    backlog.uncertain(settling, "slow")
    clock.tick(4)
    for _ in range(2):
        with pytest.raises(EffectBusy) as busy:
            app.tasks[settling.name]("slow")
        assert busy.value.retry_after_seconds is not None
        assert 0 < busy.value.retry_after_seconds <= 6
    assert backlog.swept() == Swept(0, 0, 0, 0, 0)
    assert backlog.record(settling, "slow").note == SETTLING
    assert asked["slow"] == 0
    clock.tick(6)
    assert app.tasks[settling.name]("slow") == "found"


def test_a_sweep_waits_as_well(backlog: Backlog, clock: ManualClock) -> None:
    backlog.uncertain(settling, "swept")
    assert backlog.swept().put_off == 1
    clock.tick(10)
    assert backlog.swept().settled == 1
    assert asked["swept"] == 1


# A delivery meets an uncertain effect


def test_a_delivery_that_meets_another_reconciler_comes_back(backlog: Backlog, app: Celery, gate: Gate) -> None:
    """One asks; who comes meanwhile comes back, and is told what was found."""
    told: list[BaseException] = []

    def second_delivery(_: Effect) -> Applied:
        with pytest.raises(EffectBusy) as busy:
            app.tasks[risky.name]("met")
        told.append(busy.value)
        return Applied("first")

    verdicts["met"] = second_delivery
    backlog.uncertain(risky, "met")
    assert app.tasks[risky.name]("met") == "first"
    assert len(told) == asked["met"] == 1
    assert app.tasks[risky.name]("met") == "first"


def test_a_delivery_does_not_ask_what_was_put_off(backlog: Backlog, app: Celery) -> None:
    """However many copies come, a probe that cannot tell is asked once in its pause."""
    verdicts["off"] = Unknown()
    backlog.uncertain(risky, "off")
    for _ in range(3):
        with pytest.raises(EffectUncertain):
            app.tasks[risky.name]("off")
    assert asked["off"] == 1


# Evidence


def too_late(backlog: Backlog, task: Any, name: str) -> None:
    """An attempt ends well after somebody has ruled it out, and a second one is uncertain."""
    action, granted = backlog.granted(task, name)
    backlog.gate.effects.mark_uncertain(action, granted.lease, "silent")
    ruling = Resolution(False, by="ann", why="not in the ledger", force_retryable=True)
    backlog.gate.effects.resolve_uncertain(action, ruling)
    backlog.uncertain(task, name)
    [refused] = backlog.gate.effects.complete_many([(action, granted.lease, '"landed"')])
    assert isinstance(refused, Exception)


def test_a_probe_is_told_of_late_results(backlog: Backlog) -> None:
    """G17: it decides what they mean."""
    verdicts["late"] = lambda effect: Applied(effect.late_results()[0])
    too_late(backlog, risky, "late")
    assert backlog.swept().settled == 1
    assert backlog.record(risky, "late").result == '"landed"'


def test_late_results_count_where_the_task_says_so(backlog: Backlog) -> None:
    """G17, G20: without asking anybody."""
    too_late(backlog, trusting, "late")
    backlog.uncertain(trusting, "silent")
    assert backlog.swept() == Swept(expired=0, settled=1, put_off=0, parked=1, dispatched=0)
    record = backlog.record(trusting, "late")
    assert (record.state, record.result) == (State.DONE, '"landed"')
    assert "too late" in backlog.gate.effects.history(record.key)[-1].why


# Bounds


def test_a_sweep_goes_on_in_batches_until_nothing_is_left(backlog: Backlog, app: Celery, clock: ManualClock) -> None:
    """250 keys with batches of 100: a beat that was down catches up."""
    for number in range(250):
        backlog.granted(booked, f"batch {number}")
    clock.tick(LEASE)
    assert backlog.swept() == Swept(expired=250, settled=250, put_off=0, parked=0, dispatched=250)


def test_a_sweep_ends_with_its_period(backlog: Backlog, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it leaves is there for the next."""
    backlog.uncertain(risky, "left")
    monkeypatch.setattr("celery_integration.sweep.time.monotonic", iter(range(0, 10**9, 31)).__next__)
    assert backlog.swept() == Swept(0, 0, 0, 0, 0)
    monkeypatch.undo()
    assert backlog.swept().settled == 1


def test_a_broker_that_is_away_is_asked_once(
    backlog: Backlog, app: Celery, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be sent is sent by a later sweep."""
    tries: list[object] = []

    def away(*_: Any, **__: Any) -> None:
        tries.append(1)
        raise OperationalError("away")

    backlog.uncertain(booked, "one", "two")
    with monkeypatch.context() as patched:
        patched.setattr("celery.canvas.Signature.apply_async", away)
        assert backlog.swept().dispatched == 0
    assert len(tries) == 1
    clock.tick(gate_of(app).settings.redispatch_seconds)
    assert backlog.swept().dispatched == 2
