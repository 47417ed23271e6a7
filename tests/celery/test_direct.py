"""Direct calls and eager mode behave like a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from celery_integration import EffectBusy
from pgref.contracts.effects import Granted
from pgref.errors import FingerprintMismatch
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
