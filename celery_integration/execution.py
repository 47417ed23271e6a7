"""The ways to run a body: in the transaction that also completes it, in one single commit, in a sink, or outside."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
import sqlalchemy as sa
from celery.exceptions import Ignore, Reject, Retry

from celery_integration.delivery import retry_delay_seconds
from celery_integration.effect import Effect, NotApplied, RetryLater
from celery_integration.process import Gate
from celery_integration.results import dump_result, load_result, told
from celery_integration.signals import Answer, tell
from pgref import signals
from pgref.contracts.effects import Granted, Outcome, State
from pgref.errors import FenceError, OutcomeUnknown, PgrefError, Refused, Unavailable
from pgref.keys import shown

if TYPE_CHECKING:
    from celery_integration.definition import Call
    from celery_integration.leases import HeldLease

__all__ = ["Attempt", "Interrupted", "Returned", "run_granted", "run_in_one_commit"]

logger = logging.getLogger(__name__)

RETRY_GRACE_SECONDS = 60.0


class Interrupted(Exception):
    """The store, not the body, ended the attempt: ask the gate again."""


@dataclass(frozen=True, slots=True)
class Returned:
    """What a body returned whose effect is done."""

    value: Any
    granted: Granted


@dataclass(frozen=True)
class Attempt:
    """A granted call in this process."""

    gate: Gate
    call: Call
    granted: Granted
    asked_at: float
    """Monotonic time before the lease was asked for."""

    def effect(self, held: HeldLease) -> Effect:
        """Return what the body gets."""
        return Effect(
            self.call.task, self.call.action, fence=self.granted.lease.fence, attempt=self.granted.attempt, held=held
        )

    def kept(self) -> AbstractContextManager[HeldLease]:
        """Renew the lease while the block runs."""
        return self.gate.keeper.keep(self.call.action, self.granted.lease, self.call.lease_seconds, self.asked_at)

    def dumped(self, value: Any) -> tuple[str, Any]:
        """Return the text to store for a result, and the value to return."""
        return dump_result(self.call.action.key, value, self.gate.settings.result_bytes_max)

    def abandon(self, error: BaseException) -> None:
        """Withdraw the intent after a definite failure. If the store is away, expiry will settle it."""
        due_in = _retry_due(self.call, error)
        tell(self.call.task, self.call.action.key, Answer.WITHDRAWN, self.granted)
        try:
            self.gate.effects.abandon(self.call.action, self.granted.lease, due_in_seconds=due_in)
        except PgrefError as refused:
            logger.warning("cannot withdraw %s: %s", shown(self.call.action.key), refused)

    def mark(self, error: BaseException) -> None:
        """Say that it may have happened. If the store is away, the intent stands and expires into the same state."""
        self.mark_because(told(error))

    def mark_because(self, reason: str) -> None:
        """As `mark`, with a reason in words."""
        tell(self.call.task, self.call.action.key, Answer.MARKED, self.granted)
        try:
            self.gate.effects.mark_uncertain(self.call.action, self.granted.lease, reason, by=self.call.worker)
        except PgrefError as refused:
            logger.warning("cannot mark %s uncertain: %s", shown(self.call.action.key), refused)


def _retry_due(call: Call, error: BaseException) -> float | None:
    """Return when a retry is due: its message is on its way, the database sends another only if that one is lost.

    A greenlet that is killed in a shutdown ends its body too, and Celery acknowledges its message.
    """
    killed = not isinstance(error, (Exception, SystemExit, KeyboardInterrupt))
    delay = 0.0 if killed else retry_delay_seconds(call.task, error)
    return None if delay is None else delay + RETRY_GRACE_SECONDS


def run_granted(attempt: Attempt) -> Any:
    """Run the body in the way that its task says, and return its result.

    Raises what the body raises, after the attempt was withdrawn (it did not happen) or marked uncertain, or
    `Interrupted`.
    """
    match attempt.call.definition.policy.sink:
        case "database":
            return _run_in_transaction(attempt)
        case "external":
            return _run_outside(attempt)
        case sink if hasattr(sink, "open"):
            return _run_in_transaction(attempt)
        case _:
            return _run_in_sink(attempt)


def _run_in_transaction(attempt: Attempt) -> Any:
    """Run a database effect: body and completion are one commit, or neither is."""
    gate, call, lease = attempt.gate, attempt.call, attempt.granted.lease
    completing = False
    with ExitStack() as holding, attempt.kept() as held:
        try:
            with _transaction(attempt) as connection:
                value = _bound(call, attempt.effect(held), connection)
                text, value = attempt.dumped(value)
                holding.enter_context(signals.held())
                completing = True
                if call.definition.policy.sink == "database":
                    gate.effects.complete_and_commit(connection, call.action, lease, text)
                else:
                    gate.effects.complete_within(connection, call.action, lease, text)
            return value
        except BaseException as error:
            holding.enter_context(signals.held())
            if not completing:
                attempt.abandon(error)
                raise
            if isinstance(error, FenceError):
                raise Interrupted(str(error)) from error
            return _settled(attempt, error)


def _transaction(attempt: Attempt) -> AbstractContextManager[Any]:
    sink: Any = attempt.call.definition.policy.sink
    if sink == "database":
        return attempt.gate.stores.database.transaction()
    transaction: AbstractContextManager[Any] = sink.open()
    return transaction


def _bound(call: Call, effect: Effect, connection: Any) -> Any:
    """Run the body with an open transaction, and return its result when all it wrote is sent."""
    effect.bind(connection)
    try:
        value = call.run(effect)
        effect.flush()
        return value
    finally:
        effect.unbind()


def _settled(attempt: Attempt, error: BaseException) -> Any:
    """Withdraw the intent of a commit that was not answered: under its row lock that is final, or it was done."""
    action, lease = attempt.call.action, attempt.granted.lease
    try:
        attempt.gate.effects.abandon(action, lease)
    except Refused:
        record = attempt.gate.effects.lookup(action.key)
        if record is not None and record.state is State.DONE and record.fence == lease.fence:
            logger.exception("%s is done; what followed its commit failed", shown(action.key), exc_info=error)
            return load_result(record.result)
    except (Unavailable, OutcomeUnknown) as away:
        logger.warning("the commit of %s cannot be settled now: %s", shown(action.key), away)
    if isinstance(error, (PgrefError, sa.exc.DBAPIError)) or isinstance(error.__cause__, psycopg.OperationalError):
        raise Interrupted(f"the commit failed: {error}") from error
    raise error


def run_in_one_commit(gate: Gate, call: Call) -> Returned | Outcome:
    """Judge, run the body and complete in one commit, or return why the body did not run.

    Raises what the body raises, after everything was rolled back, or `Interrupted`.
    """
    completing = False
    with ExitStack() as holding:
        try:
            with gate.stores.database.transaction() as connection:
                outcome = gate.effects.acquire_within(connection, call.action)
                if not isinstance(outcome, Granted):
                    return outcome
                effect = Effect(call.task, call.action, fence=outcome.lease.fence, attempt=outcome.attempt)
                value = _bound(call, effect, connection)
                text, value = dump_result(call.action.key, value, gate.settings.result_bytes_max)
                holding.enter_context(signals.held())
                completing = True
                gate.effects.complete_acquired(connection, call.action, outcome.lease, text)
            return Returned(value, outcome)
        except BaseException as error:
            if completing and isinstance(error, (FenceError, Unavailable, OutcomeUnknown, sa.exc.DBAPIError)):
                raise Interrupted(f"the commit failed: {error}") from error
            if not isinstance(error, PgrefError):
                tell(call.task, call.action.key, Answer.WITHDRAWN)
            raise


def _run_outside(attempt: Attempt) -> Any:
    """Run an external effect: no transaction is open during the body unless it opens one; completion follows it."""
    gate, call, lease = attempt.gate, attempt.call, attempt.granted.lease
    with ExitStack() as holding, attempt.kept() as held:
        effect = attempt.effect(held)
        completing = False
        standing = None
        try:
            with _writes(attempt, effect) as writes:
                value = call.run(effect)
                holding.enter_context(signals.held())
                text, value = attempt.dumped(value)
                completing = True
                if writes.connection is None:
                    standing = gate.effects.complete(call.action, lease, text)
                else:
                    standing = text
                    gate.effects.complete_and_commit(writes.connection, call.action, lease, text)
        except BaseException as error:
            holding.enter_context(signals.held())
            if completing and isinstance(error, (Refused, Unavailable, OutcomeUnknown)):
                raise Interrupted(str(error)) from error
            if not completing and _did_not_happen(error, effect, call):
                attempt.abandon(error)
            else:
                attempt.mark(error)
            raise
        return value if standing == text else load_result(standing)


class _Writes:
    """The transaction that an external body opens for what it writes down of its effect."""

    connection: sa.Connection | None = None


@contextmanager
def _writes(attempt: Attempt, effect: Effect) -> Iterator[_Writes]:
    writes = _Writes()
    with ExitStack() as closing:

        def opened() -> sa.Connection:
            if writes.connection is None:
                writes.connection = closing.enter_context(attempt.gate.stores.database.transaction())
            return writes.connection

        effect.opens(opened)
        try:
            yield writes
        finally:
            effect.opens(None)


def _did_not_happen(error: BaseException, effect: Effect, call: Call) -> bool:
    if isinstance(error, (Retry, Ignore, Reject, RetryLater)):
        return not effect.started
    return isinstance(error, (NotApplied, *call.definition.policy.not_applied))


def _run_in_sink(attempt: Attempt) -> Any:
    """Run a body whose writes a fenced sink of the user's makes when it has ended; completion follows them."""
    gate, call, lease = attempt.gate, attempt.call, attempt.granted.lease
    sink: Any = call.definition.policy.sink
    sending = False

    with ExitStack() as holding, attempt.kept() as held:
        effect = attempt.effect(held)

        def write(handle: Any) -> Any:
            nonlocal sending
            value = _bound(call, effect, handle)
            sending = True
            return value

        try:
            value = sink.write_fenced(call.action.resource, lease.fence, write)
            holding.enter_context(signals.held())
        except BaseException as error:
            holding.enter_context(signals.held())
            definite = isinstance(error, PgrefError) and not isinstance(error, OutcomeUnknown)
            if not sending or definite or isinstance(error, (NotApplied, *call.definition.policy.not_applied)):
                attempt.abandon(error)
            else:
                attempt.mark(error)
            if definite and isinstance(error, (FenceError, Unavailable)):
                raise Interrupted(str(error)) from error
            raise
        text, value = attempt.dumped(value)
        try:
            standing = gate.effects.complete(call.action, lease, text)
        except (Refused, Unavailable, OutcomeUnknown) as error:
            raise Interrupted(str(error)) from error
        return value if standing == text else load_result(standing)
