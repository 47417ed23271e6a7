"""What beat runs for the gate."""

from __future__ import annotations

import logging
import socket
from dataclasses import asdict
from typing import Any

from celery import Celery, Task, shared_task

from celery_integration.settings import Settings
from celery_integration.sweep import sweep
from pgref.errors import Unavailable

__all__ = ["schedule", "sweep_task"]

logger = logging.getLogger(__name__)


@shared_task(name="fenced.sweep", bind=True, ignore_result=True)
def sweep_task(self: Task[Any, Any]) -> None:
    """Expire, probe, rule and dispatch again; see `celery_integration.sweep.sweep`."""
    try:
        swept = sweep(self.app, by=f"{self.name} on {self.request.hostname or socket.gethostname()}")
    except Unavailable as error:
        logger.warning("no sweep: %s", error)
        return
    logger.info("swept: %s", asdict(swept))


def schedule(app: Celery) -> None:
    """Add ``fenced.sweep`` to the beat schedule of ``app``, every ``fenced_sweep_seconds``.

    A sweep that was not run before the next one is due is dropped: the next one does its work.
    """
    seconds = Settings.of(app).sweep_seconds
    entry = {"task": "fenced.sweep", "schedule": seconds, "options": {"expires": seconds}}
    app.conf.beat_schedule = {**(app.conf.beat_schedule or {}), "fenced.sweep": entry}
