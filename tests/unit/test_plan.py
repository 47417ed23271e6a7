"""What is planned for an uncertain effect, by its record, its task, and the time."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from celery_integration.definition import Definition, Policy
from celery_integration.reconcile import NEEDS_A_PERSON, SETTLING, Step, plan
from pgref.contracts.effects import EffectRecord, RetrySafety, State

SINCE = datetime(2026, 1, 1, tzinfo=UTC)
PAUSE = 60.0
RECORD = EffectRecord(
    key="charge:1",
    resource="charge:1",
    state=State.UNCERTAIN,
    fence=1,
    attempt=1,
    retry_safety=RetrySafety.UNSAFE,
    created_at=SINCE,
    granted_at=SINCE,
    expires_at=SINCE,
    uncertain_at=SINCE,
    completed_at=None,
    expired=True,
    fingerprint=None,
    reason="expired",
    payload="{}",
    result=None,
    next_look_at=SINCE + timedelta(seconds=PAUSE),
    looks=1,
    parked=False,
    note=None,
)


def defined(*, probe: bool = False, **policy: Any) -> Definition:
    def body(effect: Any) -> None: ...

    definition = Definition(body, Policy(**policy))
    definition.probe = body if probe else None  # type: ignore[assignment]  # never asked
    return definition


DATABASE = defined()
UNSAFE = defined(sink="external")
UNSAFE_PROBED = defined(sink="external", probe=True)
SAFE = defined(sink="external", retry_safety=RetrySafety.SAFE)
SAFE_PROBED = defined(sink="external", retry_safety=RetrySafety.SAFE, probe=True)


@pytest.mark.parametrize(
    ("definition", "step"),
    [
        (DATABASE, Step.NOT_APPLIED),
        (UNSAFE, Step.PARK),
        (UNSAFE_PROBED, Step.PROBE),
        (SAFE, Step.FREE),
        (SAFE_PROBED, Step.PROBE),
        (None, Step.WAIT),
    ],
    ids=["database", "unsafe", "unsafe with a probe", "safe", "safe with a probe", "unknown"],
)
def test_the_step_follows_from_the_task(definition: Definition | None, step: Step) -> None:
    """G20: what may run again, what is asked, and what only a person can settle."""
    [todo] = plan([(RECORD, definition)], SINCE, PAUSE)
    assert (todo.record, todo.step) == (RECORD, step)


@pytest.mark.parametrize("definition", [DATABASE, SAFE_PROBED, None])
def test_what_was_attempted_too_often_is_parked(definition: Definition | None) -> None:
    """G22: whatever its task allows."""
    [todo] = plan([(replace(RECORD, reason=NEEDS_A_PERSON), definition)], SINCE, PAUSE)
    assert (todo.step, todo.note) == (Step.PARK, NEEDS_A_PERSON)


def test_without_a_message_nothing_can_be_asked() -> None:
    [todo] = plan([(replace(RECORD, payload=None), None)], SINCE, PAUSE)
    assert todo.step is Step.PARK


@pytest.mark.parametrize(
    ("looks", "seconds"), [(0, 60), (1, 60), (2, 120), (3, 240), (7, 64 * 60), (8, 64 * 60), (1000, 64 * 60)]
)
def test_pauses_double(looks: int, seconds: float) -> None:
    """Up to about an hour, from the setting's minute."""
    [todo] = plan([(replace(RECORD, looks=looks), None)], SINCE, PAUSE)
    assert todo.wait_seconds == seconds


@pytest.mark.parametrize("policy", [{"probe": True}, {"retry_safety": RetrySafety.SAFE}, {}])
def test_a_provider_is_given_time_to_settle(policy: dict[str, Any]) -> None:
    """Whatever comes next, it comes when what was sent must have become visible."""
    definition = defined(sink="external", settle_seconds=10, **policy)
    [todo] = plan([(RECORD, definition)], SINCE + timedelta(seconds=4), PAUSE)
    assert (todo.step, todo.note, todo.wait_seconds) == (Step.WAIT, SETTLING, 6)
    [todo] = plan([(RECORD, definition)], SINCE + timedelta(seconds=10), PAUSE)
    assert todo.step is not Step.WAIT


def test_a_whole_backlog() -> None:
    backlog = [(RECORD, SAFE), (replace(RECORD, key="other"), None), (RECORD, DATABASE)]
    assert [todo.step for todo in plan(backlog, SINCE, PAUSE)] == [Step.FREE, Step.WAIT, Step.NOT_APPLIED]
    assert plan([], SINCE, PAUSE) == []
