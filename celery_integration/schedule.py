"""What beat runs for the gate."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from celery import Celery, Task, shared_task

from celery_integration.process import gate_of
from celery_integration.running import renew
from celery_integration.settings import Settings
from celery_integration.sweep import dispatch, retain, sweep
from pgref.errors import Unavailable

__all__ = ["dispatch_task", "renew_task", "retain_task", "schedule", "sweep_task"]

logger = logging.getLogger(__name__)

ANSWERS_SECONDS = 1.0


@shared_task(name="fenced.sweep", bind=True, ignore_result=True)
def sweep_task(self: Task[Any, Any]) -> None:
    """Expire, probe, rule and dispatch again; see `celery_integration.sweep.sweep`."""
    with _next_time(self):
        swept = sweep(self.app, by=f"{self.name} on {self.request.hostname or socket.gethostname()}")
        logger.info("swept: %s", asdict(swept))


@shared_task(name="fenced.dispatch", bind=True, ignore_result=True)
def dispatch_task(self: Task[Any, Any]) -> None:
    """Send the messages of effects that are free and wanted: accepted, not applied, or lost on their way."""
    with _next_time(self):
        if dispatched := dispatch(self.app):
            logger.info("dispatched: %d", dispatched)


@shared_task(name="fenced.renew", bind=True, ignore_result=True)
def renew_task(self: Task[Any, Any]) -> None:
    """Renew the leases of the tasks that workers report as running, whose bodies may hold the interpreter."""
    with _next_time(self):
        period_seconds = gate_of(self.app).settings.renew_period_seconds
        if renewed := renew(self.app, min(ANSWERS_SECONDS, period_seconds / 2)):
            logger.info("renewed: %s", {str(answer): count for answer, count in renewed.items()})


@shared_task(name="fenced.retain", bind=True, ignore_result=True)
def retain_task(self: Task[Any, Any]) -> None:
    """Remove what has been done for longer than ``fenced_retention_seconds``; without that setting, nothing."""
    with _next_time(self):
        if removed := retain(self.app):
            logger.info("removed: %d", removed)


@contextmanager
def _next_time(task: Task[Any, Any]) -> Iterator[None]:
    """While the database is away there is nothing to do but to wait for the next time."""
    try:
        yield
    except Unavailable as error:
        logger.warning("no %s now: %s", task.name, error)


def schedule(app: Celery) -> None:
    """Add the tasks of this module to the beat schedule of ``app``.

    Their periods are settings. Two beats do no harm, and a beat that was down misses nothing: what was not run before
    it is due again is dropped, and the next run does its work. Keep a worker process free for them.
    """
    settings = Settings.of(app)
    periods = {
        "fenced.sweep": settings.sweep_seconds,
        "fenced.dispatch": settings.dispatch_seconds,
        "fenced.renew": settings.renew_period_seconds,
        "fenced.retain": settings.retain_seconds,
    }
    entries = {
        name: {"task": name, "schedule": seconds, "options": {"expires": seconds}} for name, seconds in periods.items()
    }
    app.conf.beat_schedule = {**(app.conf.beat_schedule or {}), **entries}
