"""Tasks whose effects are in doubt, and a backlog of them."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from typing import Any

from celery import Celery

from celery_integration import Applied, Effect, fenced_task
from celery_integration.delivery import dumped
from celery_integration.process import Gate
from celery_integration.sweep import Swept, sweep
from pgref.contracts.effects import Action, EffectRecord, Granted

PAUSE = 60.0
LEASE = 30.0

asked: Counter[str] = Counter()
verdicts: dict[str, Any] = defaultdict(lambda: Applied("found"))
hanging = threading.Event()
ran: list[str] = []


def _probe(effect: Effect, key: str) -> Any:
    asked[key] += 1
    match verdicts[key]:
        case "hang":
            return hanging.wait()
        case Exception() as error:
            raise error
        case verdict if callable(verdict):
            return verdict(effect)
        case verdict:
            return verdict


@fenced_task(key="{key}", sink="external", scope="sweep")
def risky(effect: Effect, key: str) -> None:
    raise ConnectionError("no answer")


@fenced_task(key="{key}", sink="external", scope="sweep safe", retry_safety="safe")
def harmless(effect: Effect, key: str) -> None:
    ran.append(key)


@fenced_task(key="{key}", sink="external", scope="sweep unasked")
def unasked(effect: Effect, key: str) -> None: ...


@fenced_task(key="{key}", sink="external", scope="sweep slow", settle_seconds=10)
def settling(effect: Effect, key: str) -> None: ...


@fenced_task(key="{key}", sink="external", scope="sweep trusting", trust_late_results=True)
def trusting(effect: Effect, key: str) -> None: ...


@fenced_task(key="{key}", scope="sweep database")
def booked(effect: Effect, key: str) -> None: ...


for task in (risky, harmless, settling):
    task.probe(_probe)


def action_of(app: Celery, task: Any, name: str, *, payload: bool = True) -> Action:
    definition = task.definition
    task = app.tasks[task.name]
    text = dumped(task.signature((name,), task_id=name)) if payload else None
    return definition.action(task.name, definition.arguments((name,), {}), name, text)  # type: ignore[no-any-return]


class Backlog:
    """Uncertain effects, and what became of them."""

    def __init__(self, app: Celery, gate: Gate) -> None:
        self.app, self.gate = app, gate

    def granted(self, task: Any, name: str, *, payload: bool = True) -> tuple[Action, Granted]:
        action = action_of(self.app, task, name, payload=payload)
        granted = self.gate.effects.acquire(action, LEASE)
        assert isinstance(granted, Granted)
        return action, granted

    def uncertain(self, task: Any, *names: str, payload: bool = True) -> None:
        for name in names:
            action, granted = self.granted(task, name, payload=payload)
            self.gate.effects.mark_uncertain(action, granted.lease, "test")
            self.gate.effects.release(action, granted.lease)

    def record(self, task: Any, name: str) -> EffectRecord:
        record = self.gate.effects.lookup(action_of(self.app, task, name).key)
        assert record is not None
        return record

    def swept(self) -> Swept:
        return sweep(self.app, by="ann")
