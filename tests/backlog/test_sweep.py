"""The sweep and what else beat runs, in this process: what it asks, rules, puts off, sends and removes."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from kombu.exceptions import OperationalError

from celery_integration import Applied, Effect, EffectBusy, EffectUncertain, NotApplied, Unknown, schedule
from celery_integration.process import Gate, gate_of
from celery_integration.reconcile import LOOKS_AT_UNSAFE_MAX, SETTLING
from celery_integration.running import renew
from celery_integration.sweep import Swept, dispatch, retain
from pgref.clock import ManualClock
from pgref.contracts.effects import Action, Granted, Renewal, Resolution, State
from pgref.errors import Unavailable
from tests.backlog.doubt import (
    LEASE,
    PAUSE,
    Backlog,
    action_of,
    asked,
    booked,
    hanging,
    harmless,
    risky,
    settling,
    trusting,
    unasked,
    verdicts,
)


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


# Several at once


def test_a_live_lease_is_never_touched(backlog: Backlog, gate: Gate, clock: ManualClock) -> None:
    """FC-39: however long an attempt runs, as long as it renews."""
    action, granted = backlog.granted(risky, "long")
    for _ in range(20):
        clock.tick(LEASE / 2)
        gate.effects.renew(action, granted.lease, LEASE)
        assert backlog.swept() == Swept(0, 0, 0, 0, 0)
    assert gate.effects.complete(action, granted.lease, "1") == "1"
    assert asked["long"] == 0


def test_who_cannot_claim_does_not_look(backlog: Backlog, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """FC-40: an error while claiming is no claim."""

    def away(*_: Any, **__: Any) -> None:
        raise Unavailable("away")

    backlog.uncertain(risky, "a")
    monkeypatch.setattr(gate.effects, "claim_backlog", away)
    with pytest.raises(Unavailable):
        backlog.swept()
    assert asked["a"] == 0


# Bounds


def test_a_sweep_goes_on_in_batches_until_nothing_is_left(backlog: Backlog, app: Celery, clock: ManualClock) -> None:
    """250 keys with batches of 100: a beat that was down catches up."""
    for number in range(250):
        backlog.granted(booked, f"batch {number}")
    clock.tick(LEASE)
    assert backlog.swept() == Swept(expired=250, settled=250, put_off=0, parked=0, dispatched=250)


def test_small_batches_do_not_end_a_sweep(backlog: Backlog, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups grow no further than a batch."""
    monkeypatch.setattr(gate, "settings", replace(gate.settings, sweep_batch_max=3))
    backlog.uncertain(risky, *(f"small {number}" for number in range(20)))
    assert backlog.swept().settled == 20


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


def test_what_is_accepted_is_dispatched(backlog: Backlog, app: Celery, gate: Gate) -> None:
    """FC-30: between two sweeps as well."""
    with gate.stores.engine.begin() as connection:
        gate.effects.accept_within(connection, action_of(app, booked, "wanted"))
    assert (dispatch(app), dispatch(app)) == (1, 0)


def test_what_is_done_is_kept_until_the_setting_says_otherwise(
    backlog: Backlog, app: Celery, gate: Gate, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G25: what is done for longer than that, in batches, and nothing else."""
    for number in range(250):
        action, granted = backlog.granted(booked, f"done {number}")
        gate.effects.complete(action, granted.lease)
    backlog.uncertain(unasked, "in doubt")
    clock.tick(1000)
    action, granted = backlog.granted(booked, "recent")
    gate.effects.complete(action, granted.lease)
    assert retain(app) == 0
    monkeypatch.setattr(gate, "settings", replace(gate.settings, retention_seconds=999))
    assert (retain(app), retain(app)) == (250, 0)
    assert backlog.record(booked, "recent").state is State.DONE
    assert backlog.record(unasked, "in doubt").state is State.UNCERTAIN


def test_exactly_what_is_reported_is_renewed(
    backlog: Backlog, app: Celery, gate: Gate, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G13: the attempt that came from the very message that a worker says it runs."""
    leases = {name: backlog.granted(risky, name)[1].lease for name in ("runs", "other message", "unreported")}
    backlog.uncertain(risky, "in doubt")
    clock.tick(LEASE / 2)
    keys = {name: backlog.record(risky, name).key for name in (*leases, "in doubt")}
    reported = [
        {"id": "runs", "key": keys["runs"], "lease_seconds": LEASE},
        {"id": "another", "key": keys["other message"], "lease_seconds": LEASE},
        {"id": "in doubt", "key": keys["in doubt"], "lease_seconds": LEASE},
        {"id": "unheard of", "key": "unheard of", "lease_seconds": LEASE},
    ]
    replies = [{"one@host": reported}, {"two@host": []}, {"old@host": {"error": "unknown command"}}]
    monkeypatch.setattr(app.control, "broadcast", lambda *_, **__: replies)
    assert renew(app, 1) == {Renewal.RENEWED: 1}
    assert backlog.record(risky, "runs").expires_at == clock.now() + timedelta(seconds=LEASE)
    for name in ("other message", "unreported"):
        assert backlog.record(risky, name).expires_at == leases[name].expires_at
    monkeypatch.setattr(app.control, "broadcast", lambda *_, **__: None)
    assert renew(app, 1) == {}


@pytest.mark.parametrize("name", ["sweep", "dispatch", "renew", "retain"])
def test_without_the_database_it_waits_for_the_next_time(
    app: Celery, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is lost, and the task does not fail."""

    def away(*_: Any, **__: Any) -> None:
        raise Unavailable("away")

    monkeypatch.setattr(sys.modules[schedule.__module__], name, away)
    app.tasks[f"fenced.{name}"]()
    assert f"no fenced.{name} now: away" in caplog.text


def test_what_beat_runs(app: Celery) -> None:
    """Each with its own period; a run that is late gives way to the next."""
    app.conf.beat_schedule = {"mine": {"task": "mine", "schedule": 1}}
    schedule(app)
    entries = dict(app.conf.beat_schedule)
    assert entries.pop("mine") == {"task": "mine", "schedule": 1}
    assert {name: entry["schedule"] for name, entry in entries.items()} == {
        "fenced.sweep": 30,
        "fenced.dispatch": 5,
        "fenced.renew": 15,
        "fenced.retain": 3600,
    }
    assert all(name == entry["task"] in app.tasks for name, entry in entries.items())
    assert all(entry["options"]["expires"] == entry["schedule"] for entry in entries.values())
