"""Direct calls and eager mode behave like a worker."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from celery.exceptions import Retry

from celery_integration import EffectBusy, EffectUncertain
from celery_integration.sweep import sweep
from pgref.contracts.effects import Action, Granted, RetrySafety, State
from pgref.errors import FingerprintMismatch, LeaseLost, OutcomeUnknown, Unavailable
from pgref.postgres import Stores

Entries = Callable[[str], list[int]]


@pytest.fixture
def eager(shop: ModuleType) -> Iterator[None]:
    shop.app.conf.task_always_eager = True
    yield
    shop.app.conf.task_always_eager = False


def test_a_direct_call_takes_effect_once(shop: ModuleType, key: str, entries: Entries) -> None:
    assert shop.book(key) == shop.book(key) == {"attempt": 1}
    assert entries(key) == [5]


def test_a_direct_call_with_another_input_is_refused(shop: ModuleType, key: str) -> None:
    shop.book(key)
    with pytest.raises(FingerprintMismatch):
        shop.book(key, cents=6)


def test_a_direct_call_says_when_to_come_back(shop: ModuleType, key: str, gate: Stores) -> None:
    """FC-46: never a silent success."""
    definition = shop.book.definition
    action = definition.action(shop.book.name, definition.arguments((key,), {}), "other")
    assert isinstance(gate.effects.acquire(action, 30), Granted)
    with pytest.raises(EffectBusy) as caught:
        shop.book(key)
    assert caught.value.retry_after_seconds is not None
    assert 0 < caught.value.retry_after_seconds <= 30


@pytest.mark.usefixtures("eager")
def test_eager_calls_take_effect_once(shop: ModuleType, key: str, entries: Entries) -> None:
    """FC-23."""
    assert [shop.book.delay(key).get() for _ in range(2)] == [{"attempt": 1}] * 2
    assert entries(key) == [5]


@pytest.mark.usefixtures("eager")
def test_an_eager_retry_returns_the_last_attempts_result(shop: ModuleType, key: str, entries: Entries) -> None:
    """FC-23."""
    assert shop.book.delay(key, "retry").get() == {"attempt": 3}
    assert entries(key) == [5]


@pytest.mark.usefixtures("eager")
def test_an_eager_failure_leaves_nothing(shop: ModuleType, key: str, entries: Entries) -> None:
    with pytest.raises(ValueError, match="the body failed"):
        shop.book.delay(key, "error").get()
    assert entries(key) == []


def test_a_probe_that_looked_too_slowly_frees_no_later_attempt(shop: ModuleType, key: str, gate: Stores) -> None:
    """What it did not find was another attempt's: the key stays uncertain and the body does not run again."""
    with pytest.raises(ConnectionError):
        shop.overtaken(key)
    with pytest.raises(EffectUncertain):
        shop.overtaken(key)
    record = gate.effects.lookup(f"{shop.overtaken.name}:{key}")
    assert record is not None
    assert (record.state, record.attempt) == (State.UNCERTAIN, 2)
    assert len(shop.outside(key)) == 2


@pytest.mark.parametrize(("name", "state"), [("charge", State.UNCERTAIN), ("book", State.FREE)])
def test_an_exit_is_recorded_at_once(shop: ModuleType, key: str, gate: Stores, name: str, state: State) -> None:
    """FC-09: an exit of the process is no `Exception`. What it leaves is known before the lease has expired."""
    task = getattr(shop, name)
    with pytest.raises(SystemExit):
        task(key, "exit")
    record = gate.effects.lookup(f"{task.name}:{key}")
    assert record is not None
    assert (record.state, record.expired) == (state, False)


@pytest.mark.parametrize("name", ["charge", "paint"])
@pytest.mark.parametrize("error", [LeaseLost("taken"), Unavailable("away"), OutcomeUnknown("lost")], ids=repr)
def test_a_completion_that_fails_is_no_success(
    shop: ModuleType, key: str, gate: Stores, monkeypatch: pytest.MonkeyPatch, error: Exception, name: str
) -> None:
    """What took place outside, or in a sink, is not on record: the caller is told to come back."""

    def complete(*_: object) -> None:
        raise error

    monkeypatch.setattr(gate.effects, "complete", complete)
    task = getattr(shop, name)
    with pytest.raises(EffectBusy):
        task(key)
    record = gate.effects.lookup(f"{task.name}:{key}")
    assert record is not None
    assert record.state is State.IN_FLIGHT


def test_a_retry_after_something_went_out_is_uncertain(shop: ModuleType, key: str, gate: Stores) -> None:
    """FC-17: only before `Effect.ensure_held` does a retry mean that nothing has happened."""
    with pytest.raises(Retry):
        shop.charge(key, "retry")
    record = gate.effects.lookup(f"{shop.charge.name}:{key}")
    assert record is not None
    assert (record.state, len(shop.outside(key))) == (State.UNCERTAIN, 1)


def test_one_bad_record_does_not_stop_a_sweep(shop: ModuleType, key: str, gate: Stores) -> None:
    """A message that is not JSON, or of a task that nobody knows, stays in the backlog; the others are settled."""
    definition = shop.book.definition
    payload = json.dumps(shop.book.s(key))
    good = definition.action(shop.book.name, definition.arguments((key,), {}), "lost", payload)
    bad = [
        Action(f"{key}/{text}", f"{key}/{text}", retry_safety=RetrySafety.SAFE, payload=text)
        for text in ("{", "[]", '{"task": "nobody.knows", "args": [], "kwargs": {}}')
    ]
    for action in [*bad, good]:
        granted = gate.effects.acquire(action, 60)
        assert isinstance(granted, Granted)
        gate.effects.mark_uncertain(action, granted.lease, "test")
    while states(gate, good) == {State.UNCERTAIN}:
        sweep(shop.app)
    assert states(gate, *bad) == {State.UNCERTAIN}


def states(gate: Stores, *actions: Action) -> set[State]:
    records = [gate.effects.lookup(action.key) for action in actions]
    return {record.state for record in records if record is not None}
