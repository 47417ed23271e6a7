"""The task class behind `fenced_task`: one function with the control flow."""

from __future__ import annotations

import logging
import time
from typing import Any, NoReturn
from uuid import uuid4

from celery import Task
from celery.exceptions import Reject
from sqlalchemy.orm import Session

from celery_integration.definition import Call, Definition
from celery_integration.delivery import come_back, dumped, payload_of
from celery_integration.effect import RetryLater
from celery_integration.errors import EffectUncertain
from celery_integration.execution import Attempt, Interrupted, Returned, run_granted, run_in_one_commit
from celery_integration.process import Gate, gate_of
from celery_integration.reconcile import NEEDS_A_PERSON, Later, may_run, reconcile
from celery_integration.results import load_result
from celery_integration.signals import Answer, tell
from pgref.contracts.effects import Contended, Done, Granted, InFlight, Outcome, State, Uncertain
from pgref.errors import FingerprintMismatch, InvalidArgument, OutcomeUnknown, SchemaError, Unavailable
from pgref.keys import shown

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

    def accept(self, session: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Want the effect in the caller's transaction; see `FencedFunction.accept`."""
        connection = session.connection() if isinstance(session, Session) else session
        task_id = str(uuid4())
        payload = dumped(self.signature(args, kwargs, task_id=task_id))
        if payload is None:
            raise InvalidArgument("the arguments must be JSON, to be kept in the database")
        action = self.definition.action(self.name, self.definition.arguments(args, kwargs), task_id, payload)
        gate_of(self.app).effects.accept_within(connection, action)
        return task_id

    def retry(self, *args: Any, **options: Any) -> Any:
        """As ``Task.retry``; if the retry cannot be sent, the broker keeps the message that asked for it."""
        try:
            return super().retry(*args, **options)
        except Reject as rejected:
            raise Reject(rejected.args[0], requeue=True) from rejected

    def run_fenced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Acquire, run, complete; and for every answer of the gate that is not a grant, what to do about it."""
        gate = gate_of(self.app)
        call = self._call(gate, args, kwargs)
        try:
            return self._answered(gate, call)
        except Interrupted as error:
            logger.warning("%s was interrupted and comes back: %s", shown(call.action.key), error)
            tell(self, call.action.key, Answer.INTERRUPTED)
            self._come_back(call, gate.settings.comeback_seconds_max)
        except (Unavailable, OutcomeUnknown, SchemaError) as error:
            logger.error("%s comes back: %s", shown(call.action.key), error)  # noqa: TRY400  the database is away, not the code
            tell(self, call.action.key, Answer.AWAY)
            self._come_back(call, AWAY_SECONDS)
        except FingerprintMismatch:
            tell(self, call.action.key, Answer.REFUSED)
            raise
        except RetryLater as retry:
            raise self.retry(throw=False, **retry.options) from retry.__cause__

    def _answered(self, gate: Gate, call: Call) -> Any:
        key = call.action.key
        while True:
            asked_at = time.monotonic()
            match self._ask(gate, call):
                case Returned(value=value, granted=granted):
                    tell(self, key, Answer.DONE, granted)
                    return value
                case Granted() as granted:
                    value = self._run(Attempt(gate, call, granted, asked_at))
                    tell(self, key, Answer.DONE, granted)
                    return value
                case Done(result=result):
                    tell(self, key, Answer.REPLAYED)
                    return load_result(result)
                case InFlight(retry_after_seconds=seconds) | Contended(retry_after_seconds=seconds) as busy:
                    tell(self, key, Answer.IN_FLIGHT if isinstance(busy, InFlight) else Answer.CONTENDED)
                    self._come_back(call, min(seconds, gate.settings.comeback_seconds_max))
                case Uncertain(reason=reason):
                    match reconcile(gate, call, reason):
                        case None:
                            tell(self, key, Answer.UNCERTAIN)
                            raise _uncertain(call, reason)
                        case Later(seconds=seconds):
                            tell(self, key, Answer.IN_FLIGHT)
                            self._come_back(call, min(seconds, gate.settings.comeback_seconds_max))

    def _ask(self, gate: Gate, call: Call) -> Returned | Outcome:
        """Ask the gate. A message that was delivered before is likely done: then a look is enough."""
        if self.request.retries or (self.request.delivery_info or {}).get("redelivered"):
            record = gate.effects.lookup(call.action.key)
            if record is not None and record.state is State.DONE and record.fingerprint == call.action.fingerprint:
                return Done(record.result)
        if self.definition.policy.single_commit:
            return run_in_one_commit(gate, call)
        return gate.effects.acquire(call.action, call.lease_seconds)

    def _run(self, attempt: Attempt) -> Any:
        if not may_run(attempt.gate, attempt.call, attempt.granted.attempt):
            attempt.mark_because(NEEDS_A_PERSON)
            raise _uncertain(attempt.call, NEEDS_A_PERSON)
        return run_granted(attempt)

    def _call(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        bound = self.definition.arguments(args, kwargs)
        request = self.request
        action = self.definition.action(self.name, bound, request.id or str(uuid4()), payload_of(self, args, kwargs))
        lease_seconds = self.definition.policy.lease_seconds or gate.settings.lease_seconds
        return Call(self, self.definition, action, args, kwargs, lease_seconds)

    def _come_back(self, call: Call, seconds: float) -> NoReturn:
        come_back(self, call.args, dict(call.kwargs), key=call.action.key, seconds=seconds)


def _uncertain(call: Call, reason: str) -> EffectUncertain:
    return EffectUncertain(f"{shown(call.action.key)} may have happened: {reason}", key=call.action.key)
