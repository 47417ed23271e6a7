"""OpenTelemetry, by its API alone: attributes on the span of the task, and metrics.

Needs the extra ``otel``, and an SDK of yours that exports. Without one nothing is recorded, and nothing fails.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from celery import Celery
from opentelemetry import metrics, trace
from opentelemetry.metrics import CallbackOptions, Observation

from celery_integration import signals
from celery_integration.process import gate_of
from celery_integration.sweep import Swept
from pgref.contracts.effects import Granted, late_seconds
from pgref.errors import PgrefError

__all__ = ["instrument", "observe_backlog"]

UID = "pgref.otel"

_meter = metrics.get_meter("pgref")
_answers = _meter.create_counter("pgref.answers", description="Deliveries, by what came of them.")
_leases_lost = _meter.create_counter("pgref.leases.lost", description="Leases that were lost while their body ran.")
_swept = _meter.create_counter("pgref.swept", description="Keys that sweeps took up, by what they did.")
_sweep_seconds = _meter.create_histogram("pgref.sweep.duration", unit="s", description="How long sweeps take.")
_removed = _meter.create_counter("pgref.removed", description="Done effects that retention removed.")


def instrument(*, keys: bool = True) -> None:
    """Write what comes of a delivery onto the current span, and count it. Safe to repeat.

    The span gets ``pgref.answer``, ``pgref.fence``, ``pgref.attempt`` and ``pgref.key``; ``keys=False`` leaves the key
    out, where keys are confidential.
    """

    def answered(sender: Any, key: str, answer: signals.Answer, granted: Granted | None, **_: Any) -> None:
        _answers.add(1, {"task": sender.name, "answer": str(answer)})
        attributes: dict[str, str | int] = {"pgref.answer": str(answer)}
        if keys:
            attributes["pgref.key"] = key
        if granted is not None:
            attributes.update({"pgref.fence": granted.lease.fence, "pgref.attempt": granted.attempt})
        trace.get_current_span().set_attributes(attributes)

    signals.effect_answered.disconnect(dispatch_uid=UID)
    signals.effect_answered.connect(answered, weak=False, dispatch_uid=UID)
    signals.lease_lost.connect(_count_lost_lease, weak=False, dispatch_uid=UID)
    signals.swept.connect(_count_sweep, weak=False, dispatch_uid=UID)
    signals.effects_removed.connect(_count_removed, weak=False, dispatch_uid=UID)


def observe_backlog(app: Celery) -> None:
    """Add gauges of the backlog of ``app``: in one process of a deployment, since each asks the database.

    A database that is away gives none.
    """

    def observed(_: CallbackOptions) -> Iterable[Observation]:
        try:
            tallies = gate_of(app).effects.tallies()
        except PgrefError:
            return
        for tally in tallies:
            labels = {"state": str(tally.kind), "task": tally.scope, "reason": tally.reason_class}
            yield Observation(tally.count, labels)

    def late(_: CallbackOptions) -> Iterable[Observation]:
        try:
            effects = gate_of(app).effects
            yield Observation(late_seconds(effects.tallies(), effects.now()))
        except PgrefError:
            return

    _meter.create_observable_gauge("pgref.effects", [observed], description="Effects that are not done, by state.")
    _meter.create_observable_gauge(
        "pgref.sweep.late", [late], unit="s", description="For how long something has waited for a sweep."
    )


def _count_lost_lease(**_: Any) -> None:
    _leases_lost.add(1)


def _count_sweep(swept: Swept, seconds: float, **_: Any) -> None:
    _sweep_seconds.record(seconds)
    for what in Swept.__slots__:
        _swept.add(getattr(swept, what), {"what": what})


def _count_removed(count: int, **_: Any) -> None:
    _removed.add(count)
