"""Leases of the tasks that workers report as running, for bodies that leave their own process no time to renew."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from celery import Celery
from celery.worker.control import inspect_command
from celery.worker.state import active_requests
from kombu.utils import json

from celery_integration.definition import Definition
from celery_integration.process import gate_of
from celery_integration.settings import Settings
from pgref.contracts.effects import EffectStore, Renewal, State
from pgref.errors import InvalidArgument
from pgref.keys import BATCH_MAX

__all__ = ["fenced_leases", "renew"]

UNREPORTED_PART = 1 / 4
"""Tasks that have run for less than this part of their lease are not reported: their own process comes first."""


def renew(app: Celery, answers_seconds: float) -> Counter[Renewal]:
    """Renew the leases of what workers report as running, and count the answers.

    Exactly those: the attempt in flight must have come from the message that the worker reports. Workers have
    ``answers_seconds`` to answer.
    """
    gate = gate_of(app)
    attempts: defaultdict[float, dict[str, int]] = defaultdict(dict)
    for reported in _reported(app, answers_seconds):
        fence = _fence_of(gate.effects, reported["key"], reported["id"])
        if fence is not None:
            attempts[reported["lease_seconds"]][reported["key"]] = fence
    counts: Counter[Renewal] = Counter()
    for lease_seconds, fences in attempts.items():
        asked = list(fences.items())
        for start in range(0, len(asked), BATCH_MAX):
            counts.update(gate.effects.renew_running(asked[start : start + BATCH_MAX], lease_seconds))
    return counts


def _reported(app: Celery, answers_seconds: float) -> Iterator[dict[str, Any]]:
    for replies in app.control.broadcast("fenced_leases", reply=True, timeout=answers_seconds) or []:
        for reply in replies.values():
            if isinstance(reply, list):  # else it is the error of a worker that does not know the command
                yield from reply


def _fence_of(effects: EffectStore, key: str, task_id: str) -> int | None:
    """Return the fence of the attempt in flight, if it came from the message with this id."""
    record = effects.lookup(key)
    if record is None or record.state is not State.IN_FLIGHT or record.payload is None:
        return None
    return record.fence if json.loads(record.payload)["options"].get("task_id") == task_id else None


@inspect_command(name="fenced_leases")
def fenced_leases(state: Any, **_: Any) -> list[dict[str, Any]]:
    """List the fenced tasks that have run here for a while: task id, key, and lease in seconds."""
    lease_seconds = Settings.of(state.app).lease_seconds
    return [lease for request in list(active_requests) for lease in _lease_of(request, lease_seconds)]


def _lease_of(request: Any, lease_seconds: float) -> Iterator[dict[str, Any]]:
    definition = getattr(request.task, "definition", None)
    if not isinstance(definition, Definition) or definition.policy.single_commit or request.time_start is None:
        return
    lease_seconds = definition.policy.lease_seconds or lease_seconds
    if time.time() - request.time_start < lease_seconds * UNREPORTED_PART:
        return
    try:
        arguments = definition.arguments(tuple(request.args), request.kwargs)
        key = definition.action(request.task.name, arguments, request.id).key
    except (InvalidArgument, TypeError):
        return  # its body does not run either
    yield {"id": request.id, "key": key, "lease_seconds": lease_seconds}
