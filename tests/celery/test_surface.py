"""Tasks as they are declared and sent (FC-16, FC-18, FC-20, FC-25, FC-31)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest
from celery import chord
from celery.exceptions import ChordError

import celery_integration.errors
import pgref.errors
from celery_integration import EffectUncertain
from pgref.contracts.effects import State
from pgref.postgres import Stores

Entries = Callable[[str], list[int]]
ONCE = {"attempt": 1}
OURS = sorted({*pgref.errors.__all__, *celery_integration.errors.__all__})
WAIT: dict[str, Any] = {"timeout": 60}
setex = pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # Celery's own, where warnings are caught


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("name", ["audited", "audited_as_well"])
def test_a_class_of_the_users(shop: ModuleType, key: str, entries: Entries, name: str) -> None:
    """The effect happens once, the hook is called for each delivery, a replay is a success."""
    task = getattr(shop, name)
    assert [task.delay(key).get(**WAIT) for _ in range(2)] == [ONCE] * 2
    assert entries(key) == [5]
    while len(shop.outside(f"audit {key}")) < 2:  # the hook runs after the result is there
        pass
    assert len(shop.sent(key)) == 2


@pytest.mark.usefixtures("worker")
def test_raw_messages(shop: ModuleType, key: str, entries: Entries) -> None:
    """FC-25: a program in another language writes the first version of the protocol into the queue."""
    ids = [str(uuid4()) for _ in range(2)]
    with shop.app.connection_for_write() as connection, connection.SimpleQueue("celery") as queue:
        for task_id in ids:
            message = {"id": task_id, "task": shop.book.name, "args": [key], "kwargs": {"how": "return"}}
            queue.put(message, serializer="json")
    result = shop.book.delay(key)
    assert result.get(**WAIT) == ONCE
    while shop.messages():
        pass
    assert entries(key) == [5]
    assert set(shop.sent(key)) <= {*ids, result.id}


@pytest.mark.usefixtures("worker")
def test_a_beat_that_cannot_import_the_task(
    shop: ModuleType, shop_environment: dict[str, str], tmp_path: Path, key: str, entries: Entries
) -> None:
    """FC-25: protection sits with the worker."""
    command = ["celery", "-A", "tests.celery.elsewhere", "beat", "-l", "INFO", "-s", str(tmp_path / "beat")]
    environment = {**shop_environment, "ELSEWHERE_KEY": key}
    beat = subprocess.Popen(
        [sys.executable, "-m", *command], env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert beat.stderr is not None
    with beat:
        sent = 0
        for line in beat.stderr:
            sent += "Sending due task" in line
            if sent == 3:
                break
        beat.kill()
    assert sent == 3
    while not entries(key) or shop.messages():
        pass
    assert entries(key) == [5]
    assert len(set(shop.sent(key))) <= 3


def test_a_task_that_retries_by_itself_has_the_key_of_one_that_does_not(shop: ModuleType, key: str) -> None:
    """FC-20: Celery wraps the function of such a task once more."""

    def action(task: Any) -> Any:
        definition = task.definition
        return definition.action("t", definition.arguments((key,), {"how": "return"}), "id")

    assert action(shop.eager_beaver) == action(shop.slow_book)


@pytest.mark.usefixtures("worker")
def test_neither_task_nor_effect_is_among_the_arguments(shop: ModuleType, key: str, gate: Stores) -> None:
    """FC-20: also where Celery binds the task and wraps its function."""
    with pytest.raises(EffectUncertain):
        shop.eager_letter.delay(key).get(**WAIT)
    record = gate.effects.lookup(f"{shop.eager_letter.name}:{key}")
    assert record is not None
    assert record.payload is not None
    message = json.loads(record.payload)
    assert (message["args"], message["kwargs"]) == ([key], {})


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("how", ["plain", "rejected", "retried"])
def test_our_errors_do_a_worker_no_harm(shop: ModuleType, how: str) -> None:
    """FC-18: whichever way they leave the child."""
    results = [shop.raise_ours.delay(name, how) for name in OURS]
    assert shop.ping.delay().get(**WAIT) == "pong"
    for name, result in zip(OURS, results, strict=True):
        if how != "rejected":  # then Celery stores nothing
            with pytest.raises((pgref.errors.PgrefError, Exception), match="ours") as info:
                result.get(**WAIT)
            assert type(info.value).__name__ == name


@pytest.fixture
def traced(shop: ModuleType) -> Callable[..., Any]:
    """Run a task as a worker's child does, with more of its request if wanted, and return its result."""
    from celery.app.trace import build_tracer

    def traced(task: Any, *args: Any, **request: Any) -> Any:
        task = task._get_current_object()
        run = build_tracer(task.name, task, app=task.app, propagate=False)
        return run(request["id"], list(args), {}, {"delivery_info": {}, **request}).retval

    return traced


def away(*_: Any, **__: Any) -> None:
    raise ConnectionError("the backend is away")


@setex
def test_the_result_backend_is_away_before_the_body(
    shop: ModuleType, key: str, entries: Entries, gate: Stores, traced: Callable[..., Any], monkeypatch: Any
) -> None:
    """FC-31: Celery calls it a failure without running it. Nothing is left of it, and the next delivery runs."""
    store_result = type(shop.app.backend).store_result

    def no_start(backend: Any, task_id: str, result: Any, state: str, *args: Any, **options: Any) -> Any:
        if state == "STARTED":
            away()
        return store_result(backend, task_id, result, state, *args, **options)

    monkeypatch.setattr(shop.book._get_current_object(), "track_started", True)
    monkeypatch.setattr(type(shop.app.backend), "store_result", no_start)
    with pytest.warns(RuntimeWarning, match="the backend is away"):
        traced(shop.book, key, id=key)
    assert (gate.effects.lookup(f"{shop.book.name}:{key}"), entries(key)) == (None, [])
    monkeypatch.undo()
    assert traced(shop.book, key, id=key) == ONCE
    assert entries(key) == [5]


@setex
@pytest.mark.usefixtures("worker")
def test_the_result_backend_is_away_in_a_chord(
    shop: ModuleType, key: str, entries: Entries, gate: Stores, traced: Callable[..., Any], monkeypatch: Any
) -> None:
    """FC-31: Celery gives the chord up, though both are done. Sent again it goes on, with no second effect."""
    group, keys = str(uuid4()), [f"{key}-{n}" for n in range(2)]
    body = shop.note.s(key)
    body.freeze()
    shop.app.backend.set_chord_size(group, len(keys))
    with monkeypatch.context() as patched:
        patched.setattr(type(shop.app.backend), "mark_as_done", away)
        with pytest.warns(RuntimeWarning, match="the backend is away"):
            traced(shop.book, keys[0], id=keys[0], group=group, group_index=0, chord=body)
    traced(shop.book, keys[1], id=keys[1], group=group, group_index=1, chord=body)
    with pytest.raises(ChordError, match="the backend is away"):
        shop.app.AsyncResult(body.id).get(**WAIT)
    record = gate.effects.lookup(f"{shop.book.name}:{keys[0]}")
    assert record is not None
    assert record.state is State.DONE
    assert chord(shop.book.s(each) for each in keys)(shop.note.s(key)).get(**WAIT) == [ONCE] * 2
    assert [entries(each) for each in keys] == [[5]] * 2
    assert shop.outside(key) == ["next"]
