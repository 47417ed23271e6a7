"""The ways to run a body, called directly: single commit, writes beside an outside call, a sink of the user's."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import sqlalchemy as sa
from celery.exceptions import Reject, Retry
from sqlalchemy.orm import Session

from celery_integration import ConfigurationError, EffectBusy, EffectUncertain
from celery_integration.reconcile import NEEDS_A_PERSON
from celery_integration.sweep import sweep
from pgref.contracts.effects import Granted, Resolution, State
from pgref.errors import FingerprintMismatch, InvalidArgument, OutcomeUnknown
from pgref.postgres import Stores

Entries = Callable[[str], list[int]]


def state(gate: Stores, task: Any, key: str) -> State | None:
    record = gate.effects.lookup(f"{task.name}:{key}")
    return None if record is None else record.state


def coats(shop: ModuleType, key: str) -> list[int]:
    return [int(coat) for coat in shop.redis_client.lrange(f"shop:{{wall:{key}}}:coats", 0, -1)]


# Single commit


def test_one_commit_takes_effect_once(shop: ModuleType, key: str, entries: Entries, gate: Stores) -> None:
    assert shop.jot(key) == shop.jot(key) == {"attempt": 1}
    assert entries(key) == [1]
    assert state(gate, shop.jot, key) is State.DONE


@pytest.mark.parametrize(("how", "error"), [("error", ValueError), ("memory", MemoryError), ("exit", SystemExit)])
def test_one_commit_that_fails_leaves_nothing(
    shop: ModuleType, key: str, entries: Entries, gate: Stores, how: str, error: type[BaseException]
) -> None:
    with pytest.raises(error):
        shop.jot(key, how)
    assert (entries(key), state(gate, shop.jot, key)) == ([], None)


def test_one_commit_with_another_input_is_refused(shop: ModuleType, key: str) -> None:
    shop.jot(key)
    with pytest.raises(FingerprintMismatch):
        shop.jot(key, "other")


def test_one_commit_that_meets_another_comes_back(shop: ModuleType, key: str, entries: Entries, gate: Stores) -> None:
    definition = shop.jot.definition
    action = definition.action(shop.jot.name, definition.arguments((key,), {}), "other")
    with gate.database.transaction() as connection:
        assert isinstance(gate.effects.acquire_within(connection, action), Granted)
        with pytest.raises(EffectBusy):
            shop.jot(key)
    assert entries(key) == []
    assert shop.jot(key) == {"attempt": 1}


@pytest.mark.parametrize("committed", [True, False])
def test_one_commit_without_an_answer_comes_back(
    shop: ModuleType, key: str, entries: Entries, gate: Stores, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    """G26: whether it took place is what the next look says."""
    commit = gate.effects.complete_acquired

    def lost(*arguments: Any) -> None:
        if committed:
            commit(*arguments)
        raise OutcomeUnknown("the commit was not answered")

    monkeypatch.setattr(gate.effects, "complete_acquired", lost)
    with pytest.raises(EffectBusy):
        shop.jot(key)
    monkeypatch.undo()
    assert entries(key) == ([1] if committed else [])
    assert shop.jot(key) == {"attempt": 1}
    assert entries(key) == [1]


def test_one_commit_can_be_retried(shop: ModuleType, key: str, entries: Entries) -> None:
    with pytest.raises(Retry):
        shop.jot(key, "retry")
    assert entries(key) == []


# What an external body writes down


@pytest.mark.parametrize(("how", "cents"), [("return", [1]), ("twice", [1, 2])])
def test_what_is_written_down_commits_with_the_completion(
    shop: ModuleType, key: str, entries: Entries, how: str, cents: list[int]
) -> None:
    assert shop.receipt(key, how) == shop.receipt(key, how) == {"attempt": 1}
    assert (entries(key), len(shop.outside(key))) == (cents, 1)


def test_what_is_written_down_is_undone_if_the_body_fails_later(
    shop: ModuleType, key: str, entries: Entries, gate: Stores
) -> None:
    """What took place outside stands: uncertain, and settled by the probe."""
    with pytest.raises(ValueError, match="the body failed"):
        shop.receipt(key, "error")
    assert (entries(key), state(gate, shop.receipt, key)) == ([], State.UNCERTAIN)
    assert shop.receipt(key, "error") == {"probed": 1}
    assert (entries(key), len(shop.outside(key))) == ([], 1)


def test_what_is_written_down_can_fail(
    shop: ModuleType, key: str, entries: Entries, gate: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any) -> None:
        raise OutcomeUnknown("the commit was not answered")

    monkeypatch.setattr(gate.effects, "complete_and_commit", lost)
    with pytest.raises(EffectBusy):
        shop.receipt(key)
    assert (entries(key), state(gate, shop.receipt, key), len(shop.outside(key))) == ([], State.IN_FLIGHT, 1)


def test_a_transaction_is_for_bodies_without_one(shop: ModuleType, key: str) -> None:
    with pytest.raises(ConfigurationError, match="has its transaction"):
        shop.misplaced(key)


# A sink of the user's


def test_a_sink_takes_effect_once(shop: ModuleType, key: str, gate: Stores) -> None:
    assert shop.paint(key) == shop.paint(key) == {"attempt": 1}
    assert (coats(shop, key), state(gate, shop.paint, key)) == ([1], State.DONE)


@pytest.mark.parametrize(("how", "error"), [("error", ValueError), ("exit", SystemExit), ("memory", MemoryError)])
def test_a_body_that_fails_before_its_sink_writes_leaves_nothing(
    shop: ModuleType, key: str, gate: Stores, how: str, error: type[BaseException]
) -> None:
    with pytest.raises(error):
        shop.paint(key, how)
    assert (coats(shop, key), state(gate, shop.paint, key)) == ([], State.FREE)


def test_a_sink_whose_answer_is_lost_is_sealed_and_probed(
    shop: ModuleType, key: str, gate: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G27: what the probe sees is final, since the uncertain attempt can write no more."""
    monkeypatch.setattr(shop.wall, "lost", True)
    with pytest.raises(EffectBusy):
        shop.paint(key)
    assert (coats(shop, key), state(gate, shop.paint, key)) == ([1], State.UNCERTAIN)
    monkeypatch.undo()
    assert shop.paint(key) == {"probed": 1}
    assert coats(shop, key) == [1]
    assert shop.wall.seen_fence(f"wall:{key}") == 2


def test_a_sink_that_has_seen_a_newer_fence_refuses(shop: ModuleType, key: str, gate: Stores) -> None:
    shop.wall.seal(f"wall:{key}", 7)
    with pytest.raises(EffectBusy):
        shop.paint(key)
    assert (coats(shop, key), state(gate, shop.paint, key)) == ([], State.FREE)


def test_a_sink_that_cannot_be_sealed_now_is_not_probed(
    shop: ModuleType, key: str, gate: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shop.wall, "lost", True)
    with pytest.raises(EffectBusy):
        shop.paint(key)

    def away(*_: object) -> None:
        raise ConnectionError("away")

    monkeypatch.setattr(shop.wall, "seal", away)
    with pytest.raises(EffectUncertain):
        shop.paint(key)
    assert state(gate, shop.paint, key) is State.UNCERTAIN


# Attempts


def test_a_key_that_is_attempted_too_often_waits_for_a_person(shop: ModuleType, key: str, gate: Stores) -> None:
    """FC-07, G22: counted on the key. A person's *not applied* allows as many again."""
    for _ in range(2):
        with pytest.raises(ValueError, match="the body failed"):
            shop.stubborn(key)
    for _ in range(3):
        with pytest.raises(EffectUncertain, match="needs a person"):
            shop.stubborn(key)
        sweep(shop.app)
    record = gate.effects.lookup(f"{shop.stubborn.name}:{key}")
    assert record is not None
    assert (record.state, record.reason, shop.outside(key)) == (State.UNCERTAIN, NEEDS_A_PERSON, ["1", "2"])
    gate.effects.resolve_uncertain(record.action, Resolution(applied=False, by="ann", why="mended"))
    for _ in range(2):
        with pytest.raises(ValueError, match="the body failed"):
            shop.stubborn(key)
    with pytest.raises(EffectUncertain, match="needs a person"):
        shop.stubborn(key)
    assert shop.outside(key) == ["1", "2", "4", "5"]


# Wanted in a transaction of the caller's


def test_what_is_rolled_back_is_not_wanted(shop: ModuleType, key: str, gate: Stores) -> None:
    """FC-30 (a)."""
    with Session(gate.engine) as session:
        shop.book.accept(session, key)
        session.rollback()
    assert state(gate, shop.book, key) is None


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("again", [1, 2])
def test_what_is_committed_takes_effect(shop: ModuleType, key: str, gate: Stores, entries: Entries, again: int) -> None:
    """FC-30 (b): without a message of the caller's, once, however often it is wanted."""
    for _ in range(again):
        with Session(gate.engine) as session, session.begin():
            session.execute(sa.insert(shop.entry).values(key=key, cents=1))
            task_id = shop.book.accept(session, key)
            uuid.UUID(task_id)
    while state(gate, shop.book, key) is not State.DONE:
        sweep(shop.app)
    assert sorted(entries(key)) == [1] * again + [5]


def test_a_connection_will_do(shop: ModuleType, key: str, gate: Stores) -> None:
    with gate.engine.begin() as connection:
        shop.book.accept(connection, key)
    with gate.database.raw() as connection_, connection_.transaction():
        shop.book.accept(connection_, key)
    assert state(gate, shop.book, key) is State.FREE
    assert shop.book(key) == {"attempt": 1}


def test_another_input_is_not_wanted(shop: ModuleType, key: str, gate: Stores) -> None:
    with gate.engine.begin() as connection:
        shop.book.accept(connection, key)
        with pytest.raises(FingerprintMismatch):
            shop.book.accept(connection, key, cents=6)


def test_what_cannot_be_kept_is_refused(shop: ModuleType, gate: Stores) -> None:
    with gate.engine.begin() as connection:
        with pytest.raises(InvalidArgument):
            shop.by_task_id.accept(connection, object())
        assert connection.execute(sa.text("SELECT 1")).scalar_one() == 1


# Retries that cannot be sent


def test_a_retry_that_cannot_be_sent_keeps_its_message(
    shop: ModuleType, key: str, gate: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FC-13: the broker keeps what asked for the retry, and the database knows that it is wanted."""
    task = shop.book._get_current_object()

    def away(*_: Any, **__: Any) -> None:
        raise OSError("the broker is away")

    monkeypatch.setattr("celery.canvas.Signature.apply_async", away)
    task.push_request(args=(key, "retry"), kwargs={}, id=str(uuid.uuid4()), called_directly=False, retries=0)
    try:
        with pytest.raises(Reject) as rejected:
            task.run(key, "retry")
    finally:
        task.pop_request()
    assert vars(rejected.value)["requeue"] is True
    record = gate.effects.lookup(f"{task.name}:{key}")
    assert record is not None
    assert record.state is State.FREE
