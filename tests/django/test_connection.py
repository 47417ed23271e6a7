"""What `DjangoSink` demands of Django's connection, and how it treats one that stays open."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connections, transaction

from celery_integration import ConfigurationError, EffectBusy
from celery_integration.django import DjangoSink
from celery_integration.process import Gate
from pgref.contracts.effects import Action, Granted, RetrySafety, State
from pgref.errors import SchemaError, Unavailable
from tests.django.acts import Entries, Put, act, book, pid, state, terminate


def test_inside_another_transaction_it_is_refused(gate: Gate, key: str, body: Put, entries: Entries) -> None:
    """As in a view under ATOMIC_REQUESTS. FC-23."""
    body(lambda effect: book(key))
    with transaction.atomic(), pytest.raises(ConfigurationError, match="on_commit"):
        act(key)
    assert (entries(key), state(gate, key)) == ([], State.FREE)


def ran(case: type[unittest.TestCase]) -> list[str]:
    """Run the one test of a class and return its errors."""
    result = unittest.TestResult()
    unittest.TestSuite([case()]).run(result)
    assert result.testsRun == 1
    return [text for _, text in [*result.errors, *result.failures]]


def test_djangos_test_case_is_refused(key: str, body: Put) -> None:
    """Its transaction is never committed; Django itself lets a durable block pass there."""
    from django.test import TestCase

    body(lambda effect: book(key))

    class Case(TestCase):  # type: ignore[misc]  # Django is not typed
        def runTest(self) -> None:  # noqa: N802
            act(key)

    (error,) = ran(Case)
    assert "ConfigurationError" in error
    assert "TransactionTestCase" in error


def test_djangos_transaction_test_case_works(gate: Gate, key: str, body: Put, entries: Entries) -> None:
    """It empties the tables afterwards, but not the gate's: its keys stay done."""
    from django.test import TransactionTestCase

    body(lambda effect: book(key))

    class Case(TransactionTestCase):  # type: ignore[misc]  # Django is not typed
        def runTest(self) -> None:  # noqa: N802
            act(key)
            act(key)
            assert entries(key) == [5]

    assert ran(Case) == []
    assert (entries(key), state(gate, key)) == ([], State.DONE)


def test_without_autocommit_it_is_refused(gate: Gate, key: str, body: Put, entries: Entries) -> None:
    """Leaving the block would commit nothing. What the caller has not committed yet is left alone."""
    body(lambda effect: book(key))
    transaction.set_autocommit(False)
    try:
        book(key, 1)
        with pytest.raises(ConfigurationError, match="autocommit"):
            act(key)
        transaction.commit()
    finally:
        transaction.set_autocommit(True)
    assert (entries(key), state(gate, key)) == ([1], State.FREE)


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_above_read_committed_it_is_refused(
    gate: Gate, key: str, body: Put, entries: Entries, connection: Any, level: str
) -> None:
    """The renewal of the lease would make its own completion fail."""
    body(lambda effect: book(key))
    with connection.cursor() as cursor:
        cursor.execute(f"SET default_transaction_isolation = '{level}'")
    with pytest.raises(ConfigurationError, match=f"not {level.upper()}"):
        act(key)
    assert (entries(key), state(gate, key)) == ([], State.FREE)


@pytest.fixture
def alias(project: object) -> Iterator[Callable[..., DjangoSink]]:
    """Make another database alias, like the default one but for what is given."""
    name = "other"

    def alias(**settings: Any) -> DjangoSink:
        connections.settings[name] = {**connections.settings["default"], **settings}
        return DjangoSink(using=name)

    yield alias
    connections[name].close()
    del connections[name], connections.settings[name]


def test_another_database_is_refused(alias: Callable[..., DjangoSink]) -> None:
    sink = alias(ENGINE="django.db.backends.sqlite3", NAME=":memory:")
    with pytest.raises(ConfigurationError, match="PostgreSQL under psycopg 3"), sink.open():
        pass


def test_a_database_without_the_gate_takes_no_completion(
    gate: Gate, key: str, alias: Callable[..., DjangoSink]
) -> None:
    """What fenced.W001 warns of cannot end in half an effect."""
    action = Action(key, key, retry_safety=RetrySafety.SAFE)
    granted = gate.effects.acquire(action, 60)
    assert isinstance(granted, Granted)
    with pytest.raises(SchemaError), alias(NAME="postgres").open() as connection:
        gate.effects.complete_within(connection, action, granted.lease)


def test_a_database_that_is_away_is_unavailable(alias: Callable[..., DjangoSink]) -> None:
    """Nothing was written: the delivery comes back."""
    with pytest.raises(Unavailable), alias(PORT=1).open():
        pass


def test_the_connection_stays_open(key: str, body: Put, connection: Any) -> None:
    """CONN_MAX_AGE."""
    pids = []
    body(lambda effect: pids.append(pid(connection)))
    act(key)
    with DjangoSink().open():
        pids.append(pid(connection))
    assert pids[0] == pids[1]


def test_a_connection_past_its_age_is_opened_anew(key: str, body: Put, connection: Any) -> None:
    connection.ensure_connection()
    before = pid(connection)
    connection.close_at = 0
    body(lambda effect: pid(connection))
    assert act(key) != before


def test_a_dead_connection_is_noticed(gate: Gate, key: str, body: Put, connection: Any, entries: Entries) -> None:
    """CONN_HEALTH_CHECKS."""
    connection.ensure_connection()
    terminate(gate, pid(connection))
    body(lambda effect: book(key))
    act(key)
    assert entries(key) == [5]


def test_without_health_checks_a_dead_connection_costs_one_delivery(
    gate: Gate, key: str, body: Put, connection: Any, entries: Entries, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection.ensure_connection()
    monkeypatch.setattr(connection, "health_check_enabled", False)
    terminate(gate, pid(connection))
    body(lambda effect: book(key))
    with pytest.raises(EffectBusy):
        act(key)
    act(key)
    assert entries(key) == [5]
