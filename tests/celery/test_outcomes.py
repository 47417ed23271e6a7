"""What a decorated task does, seen from outside a real worker: what was applied, and what callers were told."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from celery import chain

from celery_integration import EffectUncertain
from celery_integration.sweep import sweep
from pgref.contracts.effects import Granted, Resolution, State
from pgref.postgres import Stores

pytestmark = pytest.mark.usefixtures("worker")

Entries = Callable[[str], list[int]]
WAIT: dict[str, Any] = {"timeout": 60}


def send_twice(task: Any, *args: Any, copies: int = 2) -> Any:
    """Deliver one message several times, as a broker does that lost the acknowledgement."""
    task_id = str(uuid.uuid4())
    for _ in range(copies):
        result = task.apply_async(args, task_id=task_id)
    return result


def state(gate: Stores, task: Any, key: str) -> State:
    record = gate.effects.lookup(f"{task.name}:{key}")
    assert record is not None
    return record.state


def test_a_database_effect_happens_once_for_many_deliveries(shop: ModuleType, key: str, entries: Entries) -> None:
    results = [shop.book.delay(key) for _ in range(10)]
    assert [result.get(**WAIT) for result in results] == [{"attempt": 1}] * 10
    assert entries(key) == [5]


def test_an_external_effect_happens_once_for_many_deliveries(shop: ModuleType, key: str) -> None:
    results = [shop.charge.delay(key) for _ in range(10)]
    assert [result.get(**WAIT) for result in results] == [{"attempt": 1}] * 10
    assert shop.outside(key) == ["1"]


def test_an_exception_undoes_a_database_effect_and_frees_its_key(
    shop: ModuleType, key: str, entries: Entries, gate: Stores
) -> None:
    with pytest.raises(ValueError, match="the body failed"):
        shop.book.delay(key, "error", 5).get(**WAIT)
    assert entries(key) == []
    assert state(gate, shop.book, key) is State.FREE


def test_a_second_input_under_one_key_is_refused(shop: ModuleType, key: str, entries: Entries) -> None:
    """G9 through the task: the stored result is not shown."""
    shop.book.delay(key, cents=10).get(**WAIT)
    with pytest.raises(Exception, match="another input"):
        shop.book.delay(key, cents=11).get(**WAIT)
    assert entries(key) == [10]


def test_retry_through_the_effect_does_not_meet_its_own_lease(shop: ModuleType, key: str, entries: Entries) -> None:
    """FC-17: three runs, one effect."""
    assert shop.book.delay(key, "retry").get(**WAIT) == {"attempt": 3}
    assert entries(key) == [5]


def test_autoretry_retries_a_failure_and_not_an_answer(shop: ModuleType, key: str, entries: Entries) -> None:
    """FC-16: the failures of the body are retried, one effect stands."""
    assert shop.eager_beaver.delay(key, "flaky").get(**WAIT) == {"attempt": 3}
    assert entries(key) == [1]


def test_a_killed_child_leaves_a_database_effect_that_runs_again(
    shop: ModuleType, key: str, entries: Entries, gate: Stores
) -> None:
    """FC-06: nothing was committed, the intent expires, the redelivery rules *not applied* and runs."""
    assert shop.book.delay(key, "kill").get(**WAIT) == {"attempt": 2}
    assert entries(key) == [5]
    history = gate.effects.history(f"{shop.book.name}:{key}")
    assert [entry.event for entry in history] == ["expired", "ruled_not_applied"]


def test_a_killed_child_before_the_call_is_probed_and_runs_again(shop: ModuleType, key: str) -> None:
    """FC-06 (a)."""
    assert shop.charge.delay(key, "before").get(**WAIT) == {"attempt": 2}
    assert len(shop.outside(key)) == 1


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_process_that_dies_after_the_call_is_probed_and_not_run_again(
    shop: ModuleType, key: str, gate: Stores, how: str
) -> None:
    """FC-06 (b), FC-09. Celery 5.5 drops the message of a body that exits: then the sweep settles what it left."""
    shop.charge.delay(key, how)
    while not shop.outside(key) or state(gate, shop.charge, key) is not State.DONE:
        sweep(shop.app)
    assert shop.charge.delay(key, how).get(**WAIT) == {"probed": 1}
    assert len(shop.outside(key)) == 1


def test_an_error_after_the_call_is_uncertain_until_the_probe_rules(shop: ModuleType, key: str, gate: Stores) -> None:
    with pytest.raises(ValueError, match="the body failed"):
        shop.charge.delay(key, "error").get(**WAIT)
    sweep(shop.app)
    assert shop.charge.delay(key, "error").get(**WAIT) == {"probed": 1}
    assert len(shop.outside(key)) == 1


@pytest.mark.parametrize("how", ["declined", "not_applied"])
def test_a_definite_refusal_frees_the_key(shop: ModuleType, key: str, gate: Stores, how: str) -> None:
    with pytest.raises(Exception, match="declined|said so"):
        shop.charge.delay(key, how).get(**WAIT)
    assert shop.outside(key) == []
    assert state(gate, shop.charge, key) is State.FREE


def test_an_unsafe_effect_without_a_probe_waits_for_a_person(shop: ModuleType, key: str, gate: Stores) -> None:
    with pytest.raises(ValueError, match="the body failed"):
        shop.letter.delay(key, "error").get(**WAIT)
    with pytest.raises(EffectUncertain, match="may have happened: ValueError: the body failed"):
        shop.letter.delay(key, "error").get(**WAIT)
    sweep(shop.app)
    record = gate.effects.lookup(f"{shop.letter.name}:{key}")
    assert record is not None
    assert record.state is State.UNCERTAIN
    assert record.reason == "ValueError: the body failed"
    assert len(shop.outside(key)) == 1


@pytest.mark.parametrize("verdict", ["unknown", "not_applied", "broken"])
def test_an_unsafe_effect_stays_uncertain_unless_the_probe_is_sure(
    shop: ModuleType, key: str, gate: Stores, verdict: str
) -> None:
    with pytest.raises(ConnectionError):
        shop.parcel.delay(key, verdict).get(**WAIT)
    with pytest.raises(EffectUncertain):
        shop.parcel.delay(key, verdict).get(**WAIT)
    assert state(gate, shop.parcel, key) is State.UNCERTAIN
    assert len(shop.outside(key)) == 1


def test_the_users_own_word_frees_an_unsafe_effect(shop: ModuleType, key: str) -> None:
    with pytest.raises(ConnectionError):
        shop.parcel.delay(key, "force").get(**WAIT)
    with pytest.raises(ConnectionError):
        shop.parcel.delay(key, "force").get(**WAIT)
    assert len(shop.outside(key)) == 2


def test_a_person_can_settle_what_nobody_can_tell(shop: ModuleType, key: str, gate: Stores) -> None:
    with pytest.raises(ValueError, match="the body failed"):
        shop.letter.delay(key, "error").get(**WAIT)
    record = gate.effects.lookup(f"{shop.letter.name}:{key}")
    assert record is not None
    by_hand = Resolution(applied=True, result='"seen by hand"', by="me", why="asked")
    gate.effects.resolve_uncertain(record.action, by_hand)
    assert shop.letter.delay(key, "error").get(**WAIT) == "seen by hand"
    assert len(shop.outside(key)) == 1


def test_a_soft_time_limit_undoes_a_database_effect(shop: ModuleType, key: str, entries: Entries, gate: Stores) -> None:
    with pytest.raises(Exception, match="SoftTimeLimitExceeded"):
        shop.slow_book.delay(key).get(**WAIT)
    assert entries(key) == []
    assert state(gate, shop.slow_book, key) is State.FREE


def test_a_soft_time_limit_leaves_an_external_effect_uncertain(shop: ModuleType, key: str, gate: Stores) -> None:
    """FC-10, FC-42: a timeout is not a "no"."""
    with pytest.raises(Exception, match="SoftTimeLimitExceeded"):
        shop.slow_charge.delay(key).get(**WAIT)
    record = gate.effects.lookup(f"{shop.slow_charge.name}:{key}")
    assert record is not None
    assert (record.state, record.expired) == (State.UNCERTAIN, False)
    assert len(shop.outside(key)) == 1


def test_a_result_that_is_not_json_leaves_the_effect_done(shop: ModuleType, key: str, entries: Entries) -> None:
    """G24, FC-55: a marker stands in place of the value, for the first caller and for the next."""
    first = shop.book.delay(key, "object").get(**WAIT)
    assert first["fenced"] == "result not kept"
    assert shop.book.delay(key, "object").get(**WAIT) == first
    assert entries(key) == [5]


def test_the_body_cannot_end_the_transaction(shop: ModuleType, key: str, entries: Entries) -> None:
    with pytest.raises(Exception, match="must not end the transaction"):
        shop.book.delay(key, "commit").get(**WAIT)
    assert entries(key) == []


def test_a_lease_is_renewed_while_the_body_runs(shop: ModuleType, key: str, entries: Entries) -> None:
    """FC-02, FC-37: the body outlives its lease several times; copies that arrive meanwhile wait for its result."""
    results = [shop.book.delay(key, "renew") for _ in range(3)]
    assert [result.get(**WAIT) for result in results] == [{"attempt": 1}] * 3
    assert entries(key) == [5]


def test_two_keys_on_one_resource_both_take_effect(shop: ModuleType, key: str, entries: Entries) -> None:
    results = [shop.transfer.delay(f"{key}-{n}", key, "renew") for n in range(2)]
    assert [result.get(**WAIT) for result in results] == [{"attempt": 1}] * 2
    assert entries(key) == [1, 1]


def test_a_message_that_vanished_is_sent_again(shop: ModuleType, key: str, entries: Entries, gate: Stores) -> None:
    """FC-12: the effect was granted to a process that died with its message; only the database knows of it."""
    definition = shop.book.definition
    payload = json.dumps(shop.book.s(key))
    action = definition.action(shop.book.name, definition.arguments((key,), {}), "lost", payload)
    assert isinstance(gate.effects.acquire(action, 0.001), Granted)
    while not entries(key):
        sweep(shop.app)
    assert entries(key) == [5]
    assert state(gate, shop.book, key) is State.DONE


def test_a_redelivered_copy_lets_the_chain_go_on(shop: ModuleType, key: str, entries: Entries) -> None:
    """FC-26: a replay is a normal return."""
    shop.book.delay(key).get(**WAIT)
    assert chain(shop.book.s(key), shop.note.s(key)).delay().get(**WAIT) == {"attempt": 1}
    assert shop.outside(key) == ["next"]
    assert entries(key) == [5]


def test_without_a_key_the_task_id_is_the_key(shop: ModuleType, key: str, entries: Entries) -> None:
    """FC-33: one message, however often delivered; two messages are two effects."""
    assert send_twice(shop.by_task_id, key).get(**WAIT) == {"attempt": 1}
    assert shop.by_task_id.delay(key).get(**WAIT) == {"attempt": 1}
    assert entries(key) == [1, 1]


def test_a_task_that_bypasses_the_callers_side_is_protected(shop: ModuleType, key: str, entries: Entries) -> None:
    """FC-25."""
    results = [shop.app.send_task(shop.book.name, (key,)) for _ in range(2)]
    assert [result.get(**WAIT) for result in results] == [{"attempt": 1}] * 2
    assert entries(key) == [5]


def test_a_killed_worker_process_loses_nothing(shop: ModuleType, key: str, entries: Entries, worker: Any) -> None:
    """The whole process group dies while a body runs; the message comes back to the next worker."""
    result = shop.book.delay(key, "renew")
    while gate_state(shop, key) is not State.IN_FLIGHT:
        pass
    worker.kill()
    worker.start()
    assert result.get(**WAIT) == {"attempt": 2}
    assert entries(key) == [5]


def gate_state(shop: ModuleType, key: str) -> State | None:
    from celery_integration.process import gate_of

    record = gate_of(shop.app).effects.lookup(f"{shop.book.name}:{key}")
    return None if record is None else record.state
