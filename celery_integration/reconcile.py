"""Uncertain effects: ask the outside world, rule, and dispatch again what is free and still wanted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from celery import Celery
from kombu.utils import json

from celery_integration.definition import Call, Definition, Verdict
from celery_integration.delivery import signature_of
from celery_integration.effect import Applied, Effect, NotApplied, Unknown
from celery_integration.process import Gate, gate_of
from celery_integration.results import dump_result
from pgref.contracts.effects import Action, EffectRecord, ReconcileClaim, Resolution, RetrySafety, Ruling
from pgref.errors import FenceStale, NotUncertain, ReconcileTaken, UnsafeNotRetryable

__all__ = ["NEEDS_A_PERSON", "Step", "may_run", "reconcile", "step_for", "sweep"]

logger = logging.getLogger(__name__)

NEEDS_A_PERSON = "needs a person: it was attempted too often"
"""The reason of an effect that is not run any more, whatever its task allows."""


class Step(StrEnum):
    """What to do about an uncertain effect."""

    NOT_APPLIED = "not_applied"
    """A database effect that is not done did not happen: rule so."""
    FREE = "free"
    """Running it again is harmless and nothing can be asked: rule *not applied*."""
    PROBE = "probe"
    """Ask the probe."""
    LEAVE = "leave"
    """Only a person can tell."""


def step_for(definition: Definition) -> Step:
    """Return what the policy of a task allows for its uncertain effects."""
    if definition.policy.in_transaction:
        return Step.NOT_APPLIED
    if definition.probe is not None:
        return Step.PROBE
    return Step.FREE if definition.policy.safety is RetrySafety.SAFE else Step.LEAVE


def may_run(gate: Gate, call: Call, attempt: int) -> bool:
    """Say whether a granted attempt may run, or is one too many since the start or a person's last word."""
    allowed = call.definition.policy.max_attempts or gate.settings.max_attempts
    if attempt <= allowed:
        return True
    parked = [entry for entry in gate.effects.history(call.action.key) if entry.why == NEEDS_A_PERSON]
    return attempt < (allowed + 1) * (len(parked) + 1)  # the grant that was not run counts as well


def reconcile(gate: Gate, call: Call, reason: str) -> Ruling | None:
    """Try to settle the uncertain effect of ``call`` and return the ruling, or None if it stays uncertain.

    At most one reconciler asks the probe at a time; a probe that fails or cannot tell is asked again after
    ``fenced_reconcile_seconds``. A sink that can be sealed is sealed first, so that what is seen then is final (G27).
    """
    effects, action, by = gate.effects, call.action, f"{call.task.name} on {call.worker}"
    step = step_for(call.definition)
    if step is Step.LEAVE or reason == NEEDS_A_PERSON:
        return None
    try:
        if step is Step.NOT_APPLIED:
            return effects.resolve_uncertain(action, Resolution(False, by=by, why="no commit, so no effect"))
        seal = getattr(call.definition.policy.sink, "seal", None)
        if step is Step.FREE and seal is None:
            return effects.resolve_uncertain(action, Resolution(False, by=by, why="safe to run again"))
        claim = effects.begin_reconcile(action, gate.settings.reconcile_seconds)
        if seal is not None and not _sealed(seal, claim):
            return None
        if step is Step.FREE:
            ruling = Resolution(False, by=by, why="sealed, and safe to run again")
            return effects.resolve_uncertain(action, ruling, claim=claim)
        effect = Effect(call.task, action, fence=claim.fence, attempt=0)
        return _rule(gate, action, claim, _ask(call, effect), by)
    except (ReconcileTaken, UnsafeNotRetryable):
        return None
    except NotUncertain:
        # Somebody ruled, or completed late, since it was found uncertain: the gate knows.
        return Ruling(False, None)


def _sealed(seal: Callable[[str, int], None], claim: ReconcileClaim) -> bool:
    """Shut the uncertain attempt out of its sink, and say whether it is."""
    try:
        seal(claim.resource, claim.fence)
    except FenceStale:
        return True  # a newer fence has shut it out already
    except Exception:
        logger.exception("cannot seal the sink of %s now", claim.key)
        return False
    return True


def _ask(call: Call, effect: Effect) -> Verdict:
    probe = call.definition.probe
    assert probe is not None
    try:
        verdict = probe(effect, *call.args, **call.kwargs)
    except Exception as error:
        logger.exception("the probe of %s failed", call.action.key)
        return Unknown(f"{type(error).__name__}: {error}")
    if not isinstance(verdict, (Applied, NotApplied, Unknown)):
        logger.error("the probe of %s returned %r, not Applied, NotApplied or Unknown", call.action.key, type(verdict))
        return Unknown("no verdict")
    return verdict


def _rule(gate: Gate, action: Action, claim: ReconcileClaim, verdict: Verdict, by: str) -> Ruling | None:
    match verdict:
        case Unknown():
            return None
        case Applied(result=result):
            text, _ = dump_result(action.key, result, gate.settings.result_bytes_max)
            return gate.effects.resolve_uncertain(action, Resolution(True, text, by=by, why="probe: applied"))
        case NotApplied():
            why = f"probe: not applied {verdict}".strip()
            ruling = Resolution(False, by=by, why=why, force_retryable=verdict.force)
            # What was not there when the probe looked may be there now, if the claim has passed to another.
            return gate.effects.resolve_uncertain(action, ruling, claim=claim)


@dataclass(frozen=True, slots=True)
class Swept:
    """What one sweep did, in keys."""

    expired: int
    settled: int
    left: int
    dispatched: int


def sweep(app: Celery) -> Swept:
    """Expire what is overdue, settle what can be settled, dispatch what is free and still wanted.

    Any number of sweeps can run at once. Raises `Unavailable` if the database is away; nothing is lost by that.
    """
    gate = gate_of(app)
    batch = gate.settings.sweep_batch_max
    expired = gate.effects.expire_intents(batch)
    settled = Counter(_settle(app, gate, record) for record in gate.effects.unclaimed_backlog(batch))
    due = gate.effects.claim_due(batch, gate.settings.redispatch_seconds)
    dispatched = sum(_dispatch(app, record) for record in due)
    return Swept(expired, settled[True], settled[False], dispatched)


def _settle(app: Celery, gate: Gate, record: EffectRecord) -> bool:
    try:
        call = _call_of(app, gate, record)
        if call is None or step_for(call.definition) is Step.LEAVE or record.reason == NEEDS_A_PERSON:
            # Claimed all the same, so that the next sweep begins with those that were looked at longest ago.
            gate.effects.begin_reconcile(record.action, gate.settings.reconcile_seconds)
            return False
        return reconcile(gate, call, record.reason or "") is not None
    except (ReconcileTaken, NotUncertain):
        return False
    except Exception:
        logger.exception("cannot settle %s now", record.key)
        return False


def _call_of(app: Celery, gate: Gate, record: EffectRecord) -> Call | None:
    if record.payload is None:
        return None
    message = json.loads(record.payload)
    task = app.tasks.get(message["task"])
    definition = getattr(task, "definition", None)
    if task is None or not isinstance(definition, Definition):
        logger.error("%s is of task %s, which is not known here", record.key, message["task"])
        return None
    return Call(task, definition, record.action, tuple(message["args"]), message["kwargs"], gate.settings.lease_seconds)


def _dispatch(app: Celery, record: EffectRecord) -> bool:
    assert record.payload is not None
    try:
        signature_of(app, record.payload).apply_async()
    except Exception:
        logger.exception("cannot dispatch %s now", record.key)
        return False
    logger.info("dispatched %s again", record.key)
    return True
