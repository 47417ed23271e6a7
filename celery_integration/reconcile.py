"""Uncertain effects: plan what to do about one, look into it, and rule or put it off."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from celery import Celery
from kombu.utils import json

from celery_integration.definition import Call, Definition
from celery_integration.effect import Applied, Effect, NotApplied, Unknown
from celery_integration.probing import ask
from celery_integration.process import Gate
from celery_integration.results import dump_result, load_result, storable, told
from pgref.contracts.effects import Action, EffectRecord, ReconcileClaim, Resolution, RetrySafety, Ruling
from pgref.errors import FenceStale, NotUncertain, ReconcileDeferred, ReconcileTaken, UnsafeNotRetryable
from pgref.keys import shown

__all__ = [
    "NEEDS_A_PERSON",
    "Later",
    "Step",
    "Todo",
    "call_of",
    "carry_out",
    "may_run",
    "plan",
    "reconcile",
    "shut_out",
    "store_time",
]

logger = logging.getLogger(__name__)

NEEDS_A_PERSON = "needs a person: it was attempted too often"
"""The reason of an effect that is not run any more, whatever its task allows."""

SETTLING = "waits for its provider to settle"

BACKOFF_DOUBLINGS_MAX = 6
LOOKS_AT_UNSAFE_MAX = 5
"""So often *not applied* is heard of an unsafe effect, since it may land late, before the key is parked."""


class Step(StrEnum):
    """What to do about an uncertain effect."""

    NOT_APPLIED = "not_applied"
    """A database effect that is not done did not happen: rule so."""
    FREE = "free"
    """Running it again is harmless and nothing can be asked: rule *not applied*."""
    PROBE = "probe"
    """Ask the probe."""
    WAIT = "wait"
    """Put it off."""
    PARK = "park"
    """Only a person can tell."""


@dataclass(frozen=True, slots=True)
class Todo:
    """What to do about one record, why, and for how long to put it off."""

    record: EffectRecord
    step: Step
    note: str = ""
    wait_seconds: float = 0.0


def plan(backlog: Iterable[tuple[EffectRecord, Definition | None]], now: datetime, pause_seconds: float) -> list[Todo]:
    """Say what to do about each uncertain effect; its definition is None where its task is not known.

    ``now`` is the store's time. ``pause_seconds`` lie between the first look and the second, and double from there.
    """
    return [_todo(record, definition, now, pause_seconds) for record, definition in backlog]


def _todo(record: EffectRecord, definition: Definition | None, now: datetime, pause_seconds: float) -> Todo:
    if record.reason == NEEDS_A_PERSON:
        return Todo(record, Step.PARK, NEEDS_A_PERSON)
    if definition is None:
        if record.payload is None:
            return Todo(record, Step.PARK, "its message could not be kept, so nothing can be asked")
        return Todo(
            record,
            Step.WAIT,
            "its message cannot be read here, or its task is not known",
            _pause(record, pause_seconds),
        )
    if definition.policy.in_transaction:
        return Todo(record, Step.NOT_APPLIED, "no commit, so no effect")
    unsettled = _unsettled_seconds(record, definition, now)
    if unsettled > 0:
        return Todo(record, Step.WAIT, SETTLING, unsettled)
    if definition.probe is not None:
        return Todo(record, Step.PROBE)
    if definition.policy.safety is RetrySafety.SAFE:
        return Todo(record, Step.FREE, "safe to run again")
    return Todo(record, Step.PARK, "needs a person: no probe can be asked, and it is not safe to run again")


def _unsettled_seconds(record: EffectRecord, definition: Definition, now: datetime) -> float:
    if record.uncertain_at is None:
        return 0.0
    return (definition.policy.settle_seconds or 0.0) - (now - record.uncertain_at).total_seconds()


def _pause(record: EffectRecord, pause_seconds: float) -> float:
    return float(pause_seconds * 2 ** min(max(record.looks - 1, 0), BACKOFF_DOUBLINGS_MAX))


def may_run(gate: Gate, call: Call, attempt: int) -> bool:
    """Say whether a granted attempt may run, or is one too many since the start or a person's last word."""
    allowed = call.definition.policy.max_attempts or gate.settings.max_attempts
    if attempt <= allowed:
        return True
    history = gate.effects.history(call.action.key)
    refused = [entry for entry in history if (entry.event, entry.why) == ("marked", NEEDS_A_PERSON)]
    return attempt < (allowed + 1) * (len(refused) + 1)  # the grant that was not run counts as well


@dataclass(frozen=True, slots=True)
class Later:
    """Nothing is known yet, and somebody looks or will: ask again after this time."""

    seconds: float


def reconcile(gate: Gate, call: Call, reason: str) -> Ruling | Later | None:
    """Try to settle the uncertain effect of ``call``; None if it stays uncertain.

    At most one reconciler asks the probe at a time; a probe that fails or cannot tell is asked again after
    ``fenced_reconcile_seconds``, then after twice that, and so on. A sink that can be sealed is sealed first, so that
    what is seen then is final (G27).
    """
    effects, action, by = gate.effects, call.action, f"{call.task.name} on {call.worker}"
    if reason == NEEDS_A_PERSON:
        return None
    try:
        if call.definition.policy.in_transaction:
            return effects.resolve_uncertain(action, Resolution(False, by=by, why="no commit, so no effect"))
        claim = effects.begin_reconcile(action, gate.settings.reconcile_seconds)
        record = effects.lookup(action.key)
        if record is None:
            raise NotUncertain(key=action.key)
        [todo] = plan([(record, call.definition)], store_time(gate, claim), gate.settings.reconcile_seconds)
        match carry_out(gate, call, todo, claim, by):
            case Ruling() as ruling:
                return ruling
            case Todo(note=note, wait_seconds=seconds):
                return Later(seconds) if note == SETTLING else None
    except ReconcileTaken as taken:
        # Without a time it is our own claim that has passed to another while we looked.
        return None if taken.retry_after_seconds is None else Later(taken.retry_after_seconds)
    except ReconcileDeferred as deferred:
        record = effects.lookup(action.key)
        settling = record is not None and record.note == SETTLING
        return Later(deferred.retry_after_seconds or 0.0) if settling else None
    except NotUncertain:
        # Somebody ruled, or completed late, since it was found uncertain: the gate knows.
        return Ruling(False, None)


def store_time(gate: Gate, claim: ReconcileClaim) -> datetime:
    """Return the store's time when the claim was given."""
    return claim.expires_at - timedelta(seconds=gate.settings.reconcile_seconds)


def carry_out(gate: Gate, call: Call | None, todo: Todo, claim: ReconcileClaim, by: str) -> Ruling | Todo:
    """Do what was planned. If that settles nothing, give the claim back, and return why and for how long."""
    found = _look(gate, call, todo, claim, by)
    if isinstance(found, Resolution):
        try:
            return _rule(gate, todo.record.action, found, claim)
        except UnsafeNotRetryable:
            found = _unsafe(gate, todo.record)
    seconds = None if found.step is Step.PARK else found.wait_seconds
    gate.effects.defer_reconcile(claim, seconds, note=found.note, by=by)
    return found


def _rule(gate: Gate, action: Action, ruling: Resolution, claim: ReconcileClaim) -> Ruling:
    if ruling.applied:
        return gate.effects.resolve_uncertain(action, ruling)
    # What was not there when the probe looked may be there now, if the claim has passed to another.
    return gate.effects.resolve_uncertain(action, ruling, claim=claim)


def _look(gate: Gate, call: Call | None, todo: Todo, claim: ReconcileClaim, by: str) -> Resolution | Todo:
    """Find out what happened: return a ruling, or why and for how long to wait for one."""
    record = todo.record
    if call is not None and call.definition.policy.trust_late_results:
        for late in gate.effects.evidence(record.key):
            return Resolution(True, late.result, by=by, why=f"completed too late, with fence {late.fence}")
    if todo.step is Step.NOT_APPLIED:
        return Resolution(False, by=by, why=todo.note)
    if call is None or todo.step in (Step.WAIT, Step.PARK):
        return todo
    waiting = Todo(record, Step.WAIT, wait_seconds=_pause(record, gate.settings.reconcile_seconds))
    if failed := shut_out(call, claim):
        return replace(waiting, note=f"its sink cannot be sealed: {failed}")
    if todo.step is Step.FREE:
        return Resolution(False, by=by, why=todo.note)
    effect = Effect(
        call.task,
        record.action,
        fence=claim.fence,
        attempt=record.attempt,
        late_results=lambda: [load_result(late.result) for late in gate.effects.evidence(record.key)],
    )
    match ask(call, effect, gate.settings.probe_limit_seconds):
        case Applied(result=result):
            text, _ = dump_result(record.key, result, gate.settings.result_bytes_max)
            return Resolution(True, text, by=by, why="probe: applied")
        case NotApplied() as verdict:
            why = f"probe: not applied {storable(str(verdict))}".strip()
            return Resolution(False, by=by, why=why, force_retryable=verdict.force)
        case Unknown(why=why):
            return replace(waiting, note=f"probe: {storable(why) or 'cannot tell'}")


def _unsafe(gate: Gate, record: EffectRecord) -> Todo:
    """Look again at an unsafe effect that is not there, since it may land late, but not for ever."""
    note = "needs a person: it is not there, and not safe to run again"
    if record.looks >= LOOKS_AT_UNSAFE_MAX:
        return Todo(record, Step.PARK, note)
    return Todo(record, Step.WAIT, note, _pause(record, gate.settings.reconcile_seconds))


def shut_out(call: Call, claim: ReconcileClaim) -> str | None:
    """Shut the uncertain attempt out of its sink, if that can be sealed (G27); return what failed."""
    seal = getattr(call.definition.policy.sink, "seal", None)
    try:
        if seal is not None:
            seal(claim.resource, claim.fence)
    except FenceStale:
        return None  # a newer fence has shut it out already
    except Exception as error:
        logger.exception("cannot seal the sink of %s now", shown(claim.key))
        return told(error)
    return None


def call_of(app: Celery, gate: Gate, record: EffectRecord) -> Call | None:
    """Return the call that the record's message was of, if it can be read and its task is known here."""
    if record.payload is None:
        return None
    try:
        message = json.loads(record.payload)
        task: Any = app.tasks[message["task"]]
        definition: Definition = task.definition
        args, kwargs = tuple(message["args"]), dict(message["kwargs"])
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        logger.error("cannot tell here what %s is a task of: %s", shown(record.key), told(error))  # noqa: TRY400
        return None
    return Call(task, definition, record.action, args, kwargs, gate.settings.lease_seconds)
