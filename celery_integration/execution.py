"""The ways to run a granted body: in the transaction that also completes it, or outside the database."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from celery.exceptions import Ignore, Reject, Retry

from celery_integration.effect import Effect, NotApplied, RetryLater
from celery_integration.process import Gate
from celery_integration.results import dump_result, load_result
from pgref import signals
from pgref.contracts.effects import State
from pgref.errors import FenceError, OutcomeUnknown, PgrefError, Refused, Unavailable

if TYPE_CHECKING:
    from celery_integration.definition import Call
    from celery_integration.leases import HeldLease
    from pgref.contracts.effects import Granted

__all__ = ["Interrupted", "run_in_transaction", "run_outside"]

logger = logging.getLogger(__name__)

RETRY_GRACE_SECONDS = 60.0


class Interrupted(Exception):
    """The store, not the body, ended the attempt: ask the gate again."""


@dataclass(frozen=True)
class Attempt:
    """A granted call in this process."""

    gate: Gate
    call: Call
    granted: Granted
    asked_at: float
    """Monotonic time before the lease was asked for."""

    def kept(self) -> AbstractContextManager[HeldLease]:
        """Renew the lease while the block runs."""
        return self.gate.keeper.keep(self.call.action, self.granted.lease, self.call.lease_seconds, self.asked_at)

    def abandon(self, error: BaseException) -> None:
        """Withdraw the intent after a definite failure. If the store is away, expiry will settle it."""
        due_in = _retry_due(error)
        try:
            self.gate.effects.abandon(self.call.action, self.granted.lease, due_in_seconds=due_in)
        except PgrefError as refused:
            logger.warning("cannot withdraw %s: %s", self.call.action.key, refused)

    def mark(self, error: BaseException) -> None:
        """Say that it may have happened. If the store is away, the intent stands and expires into the same state."""
        reason = f"{type(error).__name__}: {error}"[:500].replace("\0", "").encode("utf-8", "replace").decode()
        try:
            self.gate.effects.mark_uncertain(self.call.action, self.granted.lease, reason, by=self.call.worker)
        except PgrefError as refused:
            logger.warning("cannot mark %s uncertain: %s", self.call.action.key, refused)


def _retry_due(error: BaseException) -> float | None:
    """Return when a retry is due: its message is on its way, the database sends another only if that one is lost."""
    if not isinstance(error, (RetryLater, Retry)):
        return None
    countdown = error.options.get("countdown") if isinstance(error, RetryLater) else None
    return float(countdown or 0) + RETRY_GRACE_SECONDS


def run_in_transaction(attempt: Attempt) -> Any:
    """Run a database effect: body and completion are one commit, or neither is.

    Raises what the body raises, after the attempt was withdrawn, or `Interrupted`.
    """
    gate, call, lease = attempt.gate, attempt.call, attempt.granted.lease
    completing = False
    with ExitStack() as holding, attempt.kept() as held:
        effect = Effect(call.task, call.action, fence=lease.fence, attempt=attempt.granted.attempt, held=held)
        try:
            with gate.stores.database.transaction() as connection:
                effect.bind(connection)
                try:
                    value = call.run(effect)
                    effect.flush()
                finally:
                    effect.unbind()
                text, value = dump_result(call.action.key, value, gate.settings.result_bytes_max)
                holding.enter_context(signals.held())
                completing = True
                gate.effects.complete_and_commit(connection, call.action, lease, text)
            return value
        except BaseException as error:
            holding.enter_context(signals.held())
            if not completing:
                attempt.abandon(error)
                raise
            if isinstance(error, FenceError):
                raise Interrupted(str(error)) from error
            return _settled(attempt, error)


def _settled(attempt: Attempt, error: BaseException) -> Any:
    """Withdraw the intent of a commit that was not answered: under its row lock that is final, or it was done."""
    action, lease = attempt.call.action, attempt.granted.lease
    try:
        attempt.gate.effects.abandon(action, lease)
    except Refused:
        record = attempt.gate.effects.lookup(action.key)
        if record is not None and record.state is State.DONE and record.fence == lease.fence:
            return load_result(record.result)
    except (Unavailable, OutcomeUnknown) as away:
        logger.warning("the commit of %s cannot be settled now: %s", action.key, away)
    if isinstance(error, (PgrefError, sa.exc.DBAPIError)):
        raise Interrupted(f"the commit failed: {error}") from error
    raise error


def run_outside(attempt: Attempt) -> Any:
    """Run an external effect: no transaction is open during the body, completion follows it.

    Raises what the body raises, after the attempt was withdrawn (it did not happen) or marked uncertain, or
    `Interrupted`.
    """
    gate, call, lease = attempt.gate, attempt.call, attempt.granted.lease
    with ExitStack() as holding, attempt.kept() as held:
        effect = Effect(call.task, call.action, fence=lease.fence, attempt=attempt.granted.attempt, held=held)
        try:
            value = call.run(effect)
            holding.enter_context(signals.held())
        except BaseException as error:
            holding.enter_context(signals.held())
            if _did_not_happen(error, effect, call):
                attempt.abandon(error)
            else:
                attempt.mark(error)
            raise
        text, value = dump_result(call.action.key, value, gate.settings.result_bytes_max)
        try:
            standing = gate.effects.complete(call.action, lease, text)
        except (Refused, Unavailable, OutcomeUnknown) as error:
            raise Interrupted(str(error)) from error
        return value if standing == text else load_result(standing)


def _did_not_happen(error: BaseException, effect: Effect, call: Call) -> bool:
    if isinstance(error, (Retry, Ignore, Reject, RetryLater)):
        return not effect.started
    return isinstance(error, (NotApplied, *call.definition.policy.not_applied))
