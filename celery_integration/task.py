"""The task class behind `fenced_task`: one function with the control flow."""

from __future__ import annotations

import logging
import time
from typing import Any, NoReturn
from uuid import uuid4

from celery import Task

from celery_integration.definition import Call, Definition
from celery_integration.delivery import come_back, payload_of
from celery_integration.effect import RetryLater
from celery_integration.errors import EffectUncertain
from celery_integration.execution import Attempt, Interrupted, run_in_transaction, run_outside
from celery_integration.process import Gate, gate_of
from celery_integration.reconcile import reconcile
from celery_integration.results import load_result
from pgref.contracts.effects import Contended, Done, Granted, InFlight, Uncertain
from pgref.errors import OutcomeUnknown, SchemaError, Unavailable

__all__ = ["FencedTask"]

logger = logging.getLogger(__name__)

AWAY_SECONDS = 5.0


class FencedTask(Task):  # type: ignore[type-arg]
    """A Celery task whose body runs behind the gate."""

    abstract = True
    definition: Definition
    acks_late = True
    reject_on_worker_lost = True
    acks_on_failure_or_timeout = False

    def apply_async(  # type: ignore[override]
        self, args: Any = None, kwargs: Any = None, task_id: str | None = None, **options: Any
    ) -> Any:
        """As ``Task.apply_async``; a key that cannot be made from the arguments fails here, in the caller."""
        task_id = task_id or str(uuid4())
        bound = self.definition.bind(tuple(args or ()), dict(kwargs or {}))
        if bound is not None:
            self.definition.action(self.name, bound, task_id)
        return super().apply_async(args, kwargs, task_id=task_id, **options)

    def run_fenced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Acquire, run, complete; and for every answer of the gate that is not a grant, what `celery.md` says."""
        gate = gate_of(self.app)
        call = self._call(gate, args, kwargs)
        try:
            while True:
                asked_at = time.monotonic()
                match gate.effects.acquire(call.action, call.lease_seconds):
                    case Granted() as granted:
                        return self._run(Attempt(gate, call, granted, asked_at))
                    case Done(result=result):
                        return load_result(result)
                    case InFlight(retry_after_seconds=seconds) | Contended(retry_after_seconds=seconds):
                        self._come_back(call, min(seconds, gate.settings.comeback_seconds_max))
                    case Uncertain(reason=reason):
                        if reconcile(gate, call) is None:
                            raise _uncertain(call, reason)
        except Interrupted as error:
            logger.warning("%s was interrupted and comes back: %s", call.action.key, error)
            self._come_back(call, gate.settings.comeback_seconds_max)
        except (Unavailable, OutcomeUnknown, SchemaError) as error:
            logger.error("%s comes back: %s", call.action.key, error)  # noqa: TRY400  the database is away, not the code
            self._come_back(call, AWAY_SECONDS)

    def _run(self, attempt: Attempt) -> Any:
        run = run_outside if self.definition.policy.sink == "external" else run_in_transaction
        try:
            return run(attempt)
        except RetryLater as retry:
            raise self.retry(throw=False, **retry.options) from retry.__cause__

    def _call(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        bound = self.definition.arguments(args, kwargs)
        request = self.request
        action = self.definition.action(self.name, bound, request.id or str(uuid4()), payload_of(self, args, kwargs))
        lease_seconds = self.definition.policy.lease_seconds or gate.settings.lease_seconds
        return Call(self, self.definition, action, args, kwargs, lease_seconds)

    def _come_back(self, call: Call, seconds: float) -> NoReturn:
        come_back(self, call.args, dict(call.kwargs), key=call.action.key, seconds=seconds)


def _uncertain(call: Call, reason: str) -> EffectUncertain:
    return EffectUncertain(f"{call.action.key!r} may have happened: {reason}", key=call.action.key)
