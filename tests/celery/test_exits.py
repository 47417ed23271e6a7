"""What ends a body from outside or is too much for a worker (FC-01, FC-06, FC-10, FC-18, FC-31, FC-33)."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from billiard.exceptions import TimeLimitExceeded

from celery_integration import EffectBusy, EffectUncertain, NotApplied, errors
from celery_integration.reconcile import NEEDS_A_PERSON
from celery_integration.sweep import sweep
from pgref.contracts.effects import State
from pgref.postgres import Stores

Entries = Callable[[str], list[int]]
WAIT: dict[str, Any] = {"timeout": 60}


def state(gate: Stores, task: Any, key: str) -> State | None:
    record = gate.effects.lookup(f"{task.name}:{key}")
    return None if record is None else record.state


@pytest.mark.usefixtures("worker")
def test_ten_copies_at_once(shop: ModuleType, key: str, entries: Entries) -> None:
    """FC-01: one runs, the others come back for its result."""
    results = [shop.book.delay(key, "renew") for _ in range(10)]
    assert [result.get(**WAIT) for result in results] == [{"attempt": 1}] * 10
    assert entries(key) == [5]
    assert set(shop.sent(key)) == {result.id for result in results}
    while shop.messages():
        pass


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("name", ["hard_book", "hard_charge"])
def test_a_hard_time_limit(shop: ModuleType, key: str, entries: Entries, gate: Stores, name: str) -> None:
    """FC-10: the child is killed in its body; what was open is undone, what went out is probed and not repeated."""
    task = getattr(shop, name)
    with pytest.raises(TimeLimitExceeded):
        task.delay(key).get(**WAIT)
    while state(gate, task, key) is not State.DONE:
        sweep(shop.app)
    assert task.delay(key).get(**WAIT) == ({"attempt": 2} if name == "hard_book" else {"probed": 1})
    assert (entries(key), len(shop.outside(key))) == (([5], 0) if name == "hard_book" else ([], 1))


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("signal", ["SIGTERM", "SIGKILL"])
def test_a_task_that_is_revoked_while_it_runs(shop: ModuleType, key: str, gate: Stores, signal: str) -> None:
    """FC-10: it may have happened. Nobody runs it again before the probe has looked."""
    result = shop.charge.delay(key, "hang")
    while not shop.outside(key):
        pass
    shop.app.control.revoke(result.id, terminate=True, signal=signal)
    while state(gate, shop.charge, key) is not State.DONE:
        sweep(shop.app)
    assert len(shop.outside(key)) == 1


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("how", ["unpicklable", "unpicklable cause"])
def test_an_exception_that_cannot_be_unpickled(shop: ModuleType, key: str, entries: Entries, how: str) -> None:
    """FC-18: the worker goes on."""
    with pytest.raises(Exception, match="awkward"):
        shop.book.delay(key, how).get(**WAIT)
    assert shop.ping.delay().get(**WAIT) == "pong"
    assert entries(key) == []


@pytest.mark.usefixtures("worker")
def test_a_body_that_kills_its_process_every_time(shop: ModuleType, key: str, gate: Stores) -> None:
    """FC-07: attempts count on the key, whatever the ids of its messages; what is one too many is acknowledged."""
    for _ in range(3):
        shop.doomed.delay(key)
    while (record := gate.effects.lookup(f"{shop.doomed.name}:{key}")) is None or record.reason != NEEDS_A_PERSON:
        pass
    while shop.messages():
        pass
    assert (shop.outside(key), state(gate, shop.doomed, key)) == (["1", "2"], State.UNCERTAIN)


OURS = [
    EffectBusy("k", key="k", retry_after_seconds=1.5),
    EffectUncertain("k", key="k"),
    NotApplied("why", force=True),
    errors.ConfigurationError("set it"),
]


@pytest.mark.parametrize("error", OURS, ids=lambda error: type(error).__name__)
def test_our_own_errors_survive_a_pickle(error: Exception) -> None:
    """FC-18."""
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.args, vars(again)) == (type(error), error.args, vars(error))


@pytest.mark.usefixtures("worker")
def test_a_result_that_is_too_large_is_not_kept(shop: ModuleType, key: str, entries: Entries) -> None:
    """G24: 64 MB. The effect is done, and every caller gets the marker."""
    for _ in range(2):
        assert shop.book.delay(key, "huge").get(**WAIT)["fenced"] == "result not kept"
    assert entries(key) == [5]


@pytest.mark.usefixtures("worker")
def test_copies_that_come_while_it_runs_longer_than_the_visibility_timeout(
    shop: ModuleType, key: str, entries: Entries
) -> None:
    """FC-02: the broker hands the message out again while its body runs."""
    assert shop.book.delay(key, "long").get(**WAIT) == {"attempt": 1}
    assert entries(key) == [5]


@pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # celery's, with the newest redis-py
def test_the_result_backend_is_away(
    shop: ModuleType, key: str, entries: Entries, gate: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FC-31: Celery may call it a failure; the gate knows better, and a second delivery replays."""

    def away(*_: Any, **__: Any) -> None:
        raise ConnectionError("the backend is away")

    task = shop.book._get_current_object()
    monkeypatch.setattr(type(shop.app.backend), "mark_as_done", away)
    with pytest.warns(RuntimeWarning, match="the backend is away"):
        trace(task, key)
    assert (state(gate, shop.book, key), entries(key)) == (State.DONE, [5])
    monkeypatch.undo()
    assert trace(task, key) == {"attempt": 1}
    assert entries(key) == [5]


def trace(task: Any, *args: Any) -> Any:
    """Run a task as a worker's child does, and return its result."""
    from celery.app.trace import build_tracer

    run = build_tracer(task.name, task, app=task.app, propagate=False)
    return run(f"traced-{args}", list(args), {}, {"id": f"traced-{args}", "delivery_info": {}}).retval
