"""Signals, as Celery's own, to hear what becomes of effects. A receiver that fails is logged, and harms nothing.

@effect_answered.connect
def hear(sender, key, answer, **_): ...
"""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import Any

from celery.utils.dispatch import Signal

from pgref.contracts.effects import Granted
from pgref.keys import shown

__all__ = ["Answer", "effect_answered", "effects_removed", "lease_lost", "swept", "tell"]

logger = logging.getLogger(__name__)

effect_answered = Signal(name="effect_answered", providing_args=["key", "answer", "granted"])
"""What came of a delivery. ``sender`` is the task, ``key`` the effect's, ``answer`` an `Answer`, and ``granted`` the
grant, with fence and attempt, if there was one."""

lease_lost = Signal(name="lease_lost", providing_args=["key"])
"""A lease could not be renewed while its body ran. ``sender`` is the class of the keeper."""

swept = Signal(name="swept", providing_args=["swept", "seconds"])
"""A sweep ended. ``sender`` is the app, ``swept`` a `celery_integration.sweep.Swept`, ``seconds`` how long it took."""

effects_removed = Signal(name="effects_removed", providing_args=["count"])
"""Retention removed so many done effects. ``sender`` is the app."""


class Answer(StrEnum):
    """What came of a delivery."""

    DONE = "done"
    """The body ran, and its effect is on record."""
    REPLAYED = "replayed"
    """It was done before; the first result was returned."""
    WITHDRAWN = "withdrawn"
    """The body failed, and nothing has happened."""
    MARKED = "marked"
    """The body ended so that it may have happened."""
    UNCERTAIN = "uncertain"
    """It may have happened before, and that could not be settled now."""
    IN_FLIGHT = "in_flight"
    """Another attempt runs, or somebody looks into it; the delivery comes back."""
    CONTENDED = "contended"
    """Another effect holds the resource; the delivery comes back."""
    INTERRUPTED = "interrupted"
    """The lease was lost or a commit not answered; the delivery comes back."""
    AWAY = "away"
    """The database is away; the delivery comes back."""
    REFUSED = "refused"
    """The key stands for another input."""


def tell(sender: Any, key: str, answer: Answer, granted: Granted | None = None) -> None:
    """Send `effect_answered`, and log the same, with its parts as fields of the record."""
    fields = {
        "fenced_key": shown(key),
        "fenced_task": sender.name,
        "fenced_answer": str(answer),
        "fenced_fence": granted and granted.lease.fence,
        "fenced_attempt": granted and granted.attempt,
    }
    logger.info("%s: %s", fields["fenced_key"], answer, extra=fields)
    effect_answered.send(sender=sender, key=key, answer=answer, granted=granted)
