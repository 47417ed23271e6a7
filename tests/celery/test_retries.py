"""Retries of Celery's and of the user's: of failures, never of answers (FC-15, FC-16)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from celery_integration import EffectBusy, EffectUncertain
from pgref.contracts.effects import State
from pgref.postgres import Stores

Entries = Callable[[str], list[int]]
WAIT: dict[str, Any] = {"timeout": 60}


def attempts(gate: Stores, task: Any, key: str) -> tuple[int, State]:
    record = gate.effects.lookup(f"{task.name}:{key}")
    assert record is not None
    return record.attempt, record.state


@pytest.mark.usefixtures("worker")
def test_a_definite_failure_is_retried_as_often_as_asked(
    shop: ModuleType, key: str, entries: Entries, gate: Stores
) -> None:
    """FC-16: once and three retries, each undone."""
    with pytest.raises(ValueError, match="the body failed"):
        shop.eager_beaver.delay(key, "error").get(**WAIT)
    assert entries(key) == []
    assert attempts(gate, shop.eager_beaver, key) == (4, State.FREE)
    assert len(shop.sent(key)) == 4


@pytest.mark.usefixtures("worker")
def test_an_ambiguous_failure_is_not_repeated_by_a_retry(shop: ModuleType, key: str, gate: Stores) -> None:
    """FC-16: the retry finds it uncertain, which nothing retries."""
    with pytest.raises(EffectUncertain):
        shop.eager_letter.delay(key).get(**WAIT)
    assert (len(shop.outside(key)), len(shop.sent(key))) == (1, 2)
    assert attempts(gate, shop.eager_letter, key) == (1, State.UNCERTAIN)


@pytest.mark.usefixtures("worker")
def test_a_copy_that_meets_the_first_uses_up_no_retries(
    shop: ModuleType, key: str, entries: Entries, gate: Stores
) -> None:
    """FC-16: a copy that has to come back more often than it may retry ends with the stored result."""
    results = [shop.eager_beaver.delay(key, "renew") for _ in range(5)]
    assert [result.get(**WAIT) for result in results] == [{"attempt": 1}] * 5
    assert entries(key) == [1]
    assert set(shop.sent(key)) == {result.id for result in results}
    assert attempts(gate, shop.eager_beaver, key) == (1, State.DONE)


def test_a_late_success_is_evidence(shop: ModuleType, key: str, gate: Stores) -> None:
    """FC-15, G17: refused as a write of an attempt that was ruled on, and kept."""
    with pytest.raises(EffectBusy):
        shop.stalled(key)
    (evidence,) = gate.effects.evidence(f"{shop.stalled.name}:{key}")
    assert (evidence.fence, evidence.result) == (1, '{"attempt": 1}')
    assert attempts(gate, shop.stalled, key) == (1, State.FREE)
