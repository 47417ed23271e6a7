"""`DjangoSink`: what the body writes through the ORM commits with the completion, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from django.db import DatabaseError, IntegrityError, OperationalError, connections, transaction
from django.db.transaction import TransactionManagementError

from celery_integration import Effect, EffectBusy
from celery_integration.django import DjangoSink
from celery_integration.process import Gate
from pgref.contracts.effects import Resolution, State
from tests.django.acts import Entries, Put, act, book, pid, state, terminate


def test_body_and_completion_are_one_commit(
    gate: Gate, key: str, body: Put, entries: Entries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are seen by others after the commit, neither before it."""
    seen = []
    complete_within = gate.effects.complete_within

    def look(*arguments: Any) -> None:
        complete_within(*arguments)
        with gate.stores.database.raw() as other:
            (row,) = other.execute("SELECT state FROM pgref.effect_action WHERE key = %s", [arguments[1].key])
        seen.append((entries(key), row[0]))

    monkeypatch.setattr(gate.effects, "complete_within", look)
    body(lambda effect: book(key))
    act(key)
    assert seen == [([], 1)]
    assert (entries(key), state(gate, key)) == ([5], State.DONE)


def test_a_redelivery_returns_the_stored_result(gate: Gate, key: str, body: Put, entries: Entries) -> None:
    @body
    def _(effect: Effect) -> dict[str, int]:
        book(key)
        return {"attempt": effect.attempt}

    assert act(key) == act(key) == {"attempt": 1}
    assert entries(key) == [5]


def test_the_effect_lends_the_connection(key: str, body: Put, connection: Any, entries: Entries) -> None:
    """What the body writes with psycopg is in the same transaction."""

    @body
    def _(effect: Effect) -> bool:
        effect.cursor.execute('INSERT INTO ledger_entry ("order", cents) VALUES (%s, 7)', [key])
        return effect.sink is connection.connection

    assert act(key) is True
    assert entries(key) == [7]


def test_it_works_with_server_side_binding(
    key: str, body: Put, connection: Any, entries: Entries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The completion goes through a cursor of Django's."""
    connection.close()
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", {"server_side_binding": True})
    body(lambda effect: book(key) or type(effect.cursor).__name__)
    assert act(key) == act(key) == "ServerBindingCursor"
    assert entries(key) == [5]


@pytest.mark.parametrize("error", [ValueError("failed"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_an_exception_rolls_both_back(gate: Gate, key: str, body: Put, entries: Entries, error: BaseException) -> None:
    @body
    def _(effect: Effect) -> None:
        book(key)
        raise error

    with pytest.raises(type(error)):
        act(key)
    assert (entries(key), state(gate, key)) == ([], State.FREE)
    body(lambda effect: book(key, cents=effect.attempt))
    act(key)
    assert entries(key) == [2]


def test_a_refused_completion_rolls_the_body_back(gate: Gate, key: str, body: Put, entries: Entries) -> None:
    """Somebody has ruled meanwhile: their word stands, and the body's writes are gone."""

    @body
    def _(effect: Effect) -> str:
        book(key)
        record = gate.effects.lookup(effect.key)
        assert record is not None
        assert effect._held is not None
        gate.effects.mark_uncertain(record.action, effect._held.lease, "no answer")
        gate.effects.resolve_uncertain(record.action, Resolution(True, '"theirs"', by="ann", why="asked by phone"))
        return "mine"

    with pytest.raises(EffectBusy):
        act(key)
    assert entries(key) == []
    assert act(key) == "theirs"


def test_an_error_that_was_swallowed_is_no_success(gate: Gate, key: str, body: Put, entries: Entries) -> None:
    """PostgreSQL has given the transaction up; the completion meets that."""

    @body
    def _(effect: Effect) -> None:
        book(key)
        with pytest.raises(DatabaseError), connections["default"].cursor() as cursor:
            cursor.execute("SELECT 1/0")

    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        act(key)
    assert (entries(key), state(gate, key)) == ([], State.FREE)


def swallowed(key: str) -> None:
    with pytest.raises(ValueError, match="inside"), transaction.atomic(savepoint=False):
        raise ValueError("inside")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda key: transaction.set_rollback(True),
        swallowed,
        lambda key: connections["default"].close(),
    ],
    ids=["set_rollback", "swallowed without a savepoint", "close"],
)
def test_a_silent_rollback_is_no_success(
    gate: Gate, key: str, body: Put, entries: Entries, spoil: Callable[[str], None]
) -> None:
    """Django would leave the block without an error, and nothing would be written."""

    @body
    def _(effect: Effect) -> None:
        book(key)
        spoil(key)

    with pytest.raises((TransactionManagementError, EffectBusy)):
        act(key)
    assert (entries(key), state(gate, key)) == ([], State.FREE)
    body(lambda effect: book(key))
    act(key)
    assert entries(key) == [5]


@pytest.mark.parametrize(
    "end",
    [transaction.commit, transaction.rollback, lambda: transaction.set_autocommit(True)],
    ids=["commit", "rollback", "set_autocommit"],
)
def test_a_body_cannot_end_the_transaction(
    gate: Gate, key: str, body: Put, entries: Entries, end: Callable[[], None]
) -> None:
    @body
    def _(effect: Effect) -> None:
        book(key)
        end()

    with pytest.raises(TransactionManagementError):
        act(key)
    assert (entries(key), state(gate, key)) == ([], State.FREE)


def test_a_constraint_that_fails_at_the_commit_is_the_bodys_error(
    gate: Gate, key: str, body: Put, entries: Entries, connection: Any
) -> None:
    """Django defers its foreign keys to the commit: the completion is gone with the rest, and it can run again."""

    @body
    def _(effect: Effect) -> None:
        book(key)
        with connection.cursor() as cursor:
            cursor.execute("CREATE TEMP TABLE twice (n int UNIQUE DEFERRABLE INITIALLY DEFERRED) ON COMMIT DROP")
            cursor.execute("INSERT INTO twice VALUES (1), (1)")

    with pytest.raises(IntegrityError):
        act(key)
    assert (entries(key), state(gate, key)) == ([], State.FREE)


def test_a_commit_whose_answer_is_lost_is_looked_up(
    key: str, body: Put, entries: Entries, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = connection._commit

    def silent() -> None:
        commit()
        connection.connection.close()
        raise OperationalError("no answer") from psycopg.OperationalError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(connection, "_commit", silent)
        body(lambda effect: book(key) or "first")
        assert act(key) == "first"
    assert act(key) == "first"
    assert entries(key) == [5]


def test_a_commit_that_never_arrived_runs_again(
    gate: Gate, key: str, body: Put, entries: Entries, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = connection._commit

    def cut() -> None:
        terminate(gate, pid(connection))
        commit()

    with monkeypatch.context() as patch:
        patch.setattr(connection, "_commit", cut)
        body(lambda effect: book(key))
        with pytest.raises(EffectBusy):
            act(key)
    assert (entries(key), state(gate, key)) == ([], State.FREE)
    act(key)
    assert entries(key) == [5]


def book_and_fail(key: str) -> None:
    book(key, 2)
    raise ValueError("inside")


def test_atomic_blocks_inside_are_savepoints(key: str, body: Put, entries: Entries) -> None:
    @body
    def _(effect: Effect) -> None:
        book(key, 1)
        with pytest.raises(ValueError, match="inside"), transaction.atomic():
            book_and_fail(key)
        with transaction.atomic():
            book(key, 3)

    act(key)
    assert sorted(entries(key)) == [1, 3]


def test_a_durable_block_inside_is_refused(gate: Gate, key: str, body: Put, entries: Entries) -> None:
    """By Django: it could not keep its promise."""

    @body
    def _(effect: Effect) -> None:
        book(key)
        with transaction.atomic(durable=True):
            pass

    with pytest.raises(RuntimeError, match="durable"):
        act(key)
    assert (entries(key), state(gate, key)) == ([], State.FREE)


def test_hooks_run_after_the_commit(gate: Gate, key: str, body: Put, entries: Entries) -> None:
    seen: list[Any] = []

    @body
    def _(effect: Effect) -> None:
        transaction.on_commit(lambda: seen.append((entries(key), state(gate, key))))
        book(key)

    act(key)
    act(key)
    assert seen == [([5], State.DONE)]


def test_hooks_do_not_run_after_a_rollback(key: str, body: Put) -> None:
    seen: list[str] = []

    @body
    def _(effect: Effect) -> None:
        transaction.on_commit(lambda: seen.append("hook"))
        raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        act(key)
    assert seen == []


def test_a_hook_that_fails_undoes_nothing(gate: Gate, key: str, body: Put, entries: Entries) -> None:
    """The effect is done and the task returns its result."""

    def hook() -> None:
        raise ValueError("the hook failed")

    @body
    def _(effect: Effect) -> str:
        transaction.on_commit(hook)
        book(key)
        return "done"

    assert act(key) == "done"
    assert (entries(key), state(gate, key)) == ([5], State.DONE)


def test_a_hooks_error_is_raised_after_the_commit(key: str, entries: Entries) -> None:
    """By the sink, as by Django."""

    def hook() -> None:
        raise ValueError("the hook failed")

    def write() -> None:
        with DjangoSink().open():
            book(key)
            transaction.on_commit(hook)

    with pytest.raises(ValueError, match="the hook failed"):
        write()
    assert entries(key) == [5]


def test_a_hook_can_run_the_next_task(key: str, body: Put, entries: Entries) -> None:
    """As `delay` does in eager mode: the transaction is over by then. FC-23."""
    from examples.django.ledger.tasks import book as following

    @body
    def _(effect: Effect) -> None:
        transaction.on_commit(lambda: following(key, 7))
        book(key)

    act(key)
    assert sorted(entries(key)) == [5, 7]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_body_cannot_end_it_below_django(gate: Gate, key: str, body: Put, entries: Entries, end: str) -> None:
    @body
    def _(effect: Effect) -> None:
        book(key)
        getattr(effect.sink, end)()
        raise ValueError("after")

    from celery_integration import ConfigurationError

    with pytest.raises(ConfigurationError):
        act(key)
    assert (entries(key), state(gate, key)) == ([], State.FREE)
