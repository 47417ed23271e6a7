"""The side-effect gate on PostgreSQL: each method is one call of one SQL function (sql/effects.sql)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
import sqlalchemy as sa

from pgref.clock import Clock, DatabaseClock
from pgref.contracts.effects import (
    Action,
    Contended,
    Done,
    EffectRecord,
    Evidence,
    Granted,
    HistoryEntry,
    InFlight,
    Kind,
    Lease,
    Outcome,
    ReconcileClaim,
    Renewal,
    Resolution,
    RetrySafety,
    Ruling,
    State,
    Tally,
    Uncertain,
    valid_action,
    valid_actions,
    valid_after,
    valid_claim,
    valid_completions,
    valid_credentials,
    valid_holder,
    valid_holders,
    valid_leases,
    valid_resolution,
    valid_result,
    valid_running,
)
from pgref.errors import FingerprintMismatch, InvalidArgument, Refused, cause_of
from pgref.keys import valid_fence, valid_instance, valid_key, valid_limit, valid_text, valid_ttl
from pgref.postgres._connection import Database
from pgref.postgres._errors import refusal, rolled_back, sqlstate
from pgref.postgres.schema import quoted

__all__ = ["PostgresEffectStore"]

Connection = sa.Connection | psycopg.Connection[Any]
"""In a transaction of the caller's, of SQLAlchemy or psycopg."""

_STATES = (State.FREE, State.IN_FLIGHT, State.UNCERTAIN, State.DONE)
_TYPES = {"retry_safe": "boolean", "fence": "bigint", "holder": "uuid"}
_REFUSED_IN_TRANSACTION = "PGR01"
_RECORD_COLUMNS = (
    "key, resource, state, fence, attempt, retry_safe, created_at, granted_at, expires_at, uncertain_at, completed_at, "
    "expired, fingerprint, reason, payload, result, reconcile_expires_at, looks, parked, note"
)


class _Answer(NamedTuple):
    """A row of the SQL type; which fields are set depends on the verdict."""

    verdict: str
    fence: Any
    at: Any
    attempt: Any
    value: str | None
    seconds: Any


class PostgresEffectStore:
    """`EffectStore` in a schema of a PostgreSQL database."""

    def __init__(self, database: Database, *, schema: str = "pgref", clock: Clock | None = None) -> None:
        self._database = database
        self._schema = quoted(schema)
        self._clock = clock or DatabaseClock()

    def acquire(self, action: Action, ttl_seconds: float, *, holder: UUID | None = None) -> Outcome:
        valid_action(action)
        ttl = _interval(ttl_seconds)
        holder = valid_holder(holder)
        safe = action.retry_safety is RetrySafety.SAFE
        answer = self._ask(
            "acquire",
            action.key,
            action.resource,
            action.fingerprint,
            safe,
            action.payload,
            holder,
            ttl,
            self._clock.now(),
        )
        return _outcome(answer, action, holder)

    def acquire_many(
        self, actions: Sequence[Action], ttl_seconds: float, *, holders: Sequence[UUID] | None = None
    ) -> list[Outcome | FingerprintMismatch]:
        ttl = _interval(ttl_seconds)
        holders = valid_holders(holders, len(valid_actions(actions)))
        columns: dict[str, list[Any]] = {
            "key": [action.key for action in actions],
            "resource": [action.resource for action in actions],
            "fingerprint": [action.fingerprint for action in actions],
            "retry_safe": [action.retry_safety is RetrySafety.SAFE for action in actions],
            "payload": [action.payload for action in actions],
            "holder": [str(holder) for holder in holders],
        }
        rows = self._rows_of_many("acquire_many", columns, ttl, self._clock.now())
        answers = {ordinal: _Answer(*row) for ordinal, *row in rows}
        return [
            self._one_of_many(answers[ordinal], action, holder, ttl_seconds)
            for ordinal, (action, holder) in enumerate(zip(actions, holders, strict=True), 1)
        ]

    def _one_of_many(
        self, answer: _Answer, action: Action, holder: UUID, ttl_seconds: float
    ) -> Outcome | FingerprintMismatch:
        try:
            if answer.verdict == "again":
                return self.acquire(action, ttl_seconds, holder=holder)
            return _outcome(answer, action, holder)
        except FingerprintMismatch as mismatch:
            return mismatch

    def complete(self, action: Action, lease: Lease, result: str | None = None) -> str | None:
        answer = self._ask("complete", *_credentials(action, lease), valid_result(result), self._clock.now())
        if answer.verdict in {"completed", "done"}:
            return answer.value
        raise _lease_refusal(answer, action, lease)

    def complete_many(self, completions: Sequence[tuple[Action, Lease, str | None]]) -> list[str | Refused | None]:
        valid_completions(completions)
        columns = _columns([(action, lease) for action, lease, _ in completions])
        columns["result"] = [result for _, _, result in completions]
        rows = self._rows_of_many("complete_many", columns, self._clock.now())
        again = {ordinal for ordinal, verdict in rows if verdict == "again"}
        return [
            self._alone(*completion) if ordinal in again else completion[2]
            for ordinal, completion in enumerate(completions, 1)
        ]

    def _alone(self, action: Action, lease: Lease, result: str | None) -> str | Refused | None:
        try:
            return self.complete(action, lease, result)
        except Refused as refused:
            return refused

    def accept_within(self, connection: Connection, action: Action) -> None:
        """Want the effect as of the commit of the caller's transaction: `claim_due` finds it then, or nothing is known.

        A key that is known keeps its state, and one that is free is due again. Raises `FingerprintMismatch`,
        `InvalidArgument` if there is no payload to dispatch, or `Unavailable`.
        """
        if valid_action(action).payload is None:
            raise InvalidArgument("action must have a payload to dispatch")
        safe = action.retry_safety is RetrySafety.SAFE
        arguments = (action.key, action.resource, action.fingerprint, safe, action.payload, self._clock.now())
        with _in_transaction(action):
            row = self._database.ask(connection, self._statement("accept_here", len(arguments)), arguments)
        if (verdict := _Answer(*row).verdict) != "accepted":
            raise refusal(verdict, action.key)

    def complete_within(self, connection: Connection, action: Action, lease: Lease, result: str | None = None) -> None:
        """Complete in the caller's transaction, so that effect and completion commit together or not at all.

        Raises the fence errors, `LeaseLost` when the key is already done, or `Unavailable` (busy, or the connection
        is lost): the transaction must then be rolled back.
        """
        call = self._completion(action, lease, result)
        with _in_transaction(action, lease):
            self._database.ask(connection, *call)

    def complete_and_commit(
        self, connection: sa.Connection, action: Action, lease: Lease, result: str | None = None
    ) -> None:
        """As `complete_within`, with the COMMIT in the same round trip, on a connection of `Database.transaction`.

        Raises what that raises, and `OutcomeUnknown` when the commit was not answered.
        """
        call = self._completion(action, lease, result)
        with _in_transaction(action, lease):
            self._database.commit(connection, *call)

    def _completion(self, action: Action, lease: Lease, result: str | None) -> tuple[str, tuple[object, ...]]:
        arguments = (*_credentials(action, lease), valid_result(result), self._clock.now())
        return self._statement("complete_here", len(arguments)), arguments

    def acquire_within(self, connection: Connection, action: Action) -> Outcome:
        """Judge as `acquire` does, in the transaction that carries the effect: the start of the single-commit form.

        What is granted is written by `complete_acquired`, in the same transaction, or not at all: there is no intent
        that could expire, the lease is good for nothing else, and only the grants that were completed count as
        attempts. Another call like this is told "in flight" or "contended" at once, for as long as the transaction
        lasts. `acquire` knows nothing of it: whoever is granted the key or the resource that way first wins, and
        `complete_acquired` is refused. End the transaction with a commit also when nothing was granted (G3).
        Raises `FingerprintMismatch`, or `Unavailable`.
        """
        valid_action(action)
        holder = valid_holder(None)
        arguments = (action.key, action.resource, action.fingerprint, self._clock.now())
        with _in_transaction(action):
            row = self._database.ask(connection, self._statement("acquire_here", len(arguments)), arguments)
        return _outcome(_Answer(*row), action, holder)

    def complete_acquired(
        self, connection: sa.Connection, action: Action, lease: Lease, result: str | None = None
    ) -> None:
        """Grant, complete and commit in one round trip what `acquire_within` has granted in this transaction.

        Raises `FenceStale` or `LeaseLost` when the resource or the key was granted to another meanwhile,
        `FingerprintMismatch`, `Unavailable`: the transaction must then be rolled back; and `OutcomeUnknown` when the
        commit was not answered.
        """
        valid_credentials(action, lease)
        arguments = (
            action.key,
            action.resource,
            action.fingerprint,
            lease.fence,
            lease.holder,
            action.retry_safety is RetrySafety.SAFE,
            action.payload,
            valid_result(result),
            self._clock.now(),
        )
        with _in_transaction(action, lease):
            self._database.commit(connection, self._statement("complete_acquired_here", len(arguments)), arguments)

    def renew(self, action: Action, lease: Lease, ttl_seconds: float) -> Lease:
        answer = self._ask("renew", *_credentials(action, lease), _interval(ttl_seconds), self._clock.now())
        if answer.verdict == "renewed":
            return Lease(lease.resource, lease.fence, lease.holder, answer.at)
        raise _lease_refusal(answer, action, lease)

    def renew_many(self, leases: Sequence[tuple[Action, Lease]], ttl_seconds: float) -> list[Renewal]:
        columns = _columns(valid_leases(leases))
        rows = self._rows_of_many("renew_many", columns, _interval(ttl_seconds), self._clock.now())
        return [Renewal(verdict) for _, verdict in rows]

    def renew_running(self, attempts: Sequence[tuple[str, int]], ttl_seconds: float) -> list[Renewal]:
        columns: dict[str, list[Any]] = {
            "key": [key for key, _ in valid_running(attempts)],
            "fence": [fence for _, fence in attempts],
        }
        rows = self._rows_of_many("renew_running", columns, _interval(ttl_seconds), self._clock.now())
        return [Renewal(verdict) for _, verdict in rows]

    def mark_uncertain(self, action: Action, lease: Lease, reason: str, *, by: str = "") -> None:
        valid_text(reason, "reason")
        self._settle(action, lease, "mark_uncertain", reason, valid_text(by, "by"), self._clock.now())

    def release(self, action: Action, lease: Lease) -> None:
        self._settle(action, lease, "release")

    def abandon(self, action: Action, lease: Lease, *, due_in_seconds: float | None = None) -> None:
        due_in = None if due_in_seconds is None else _interval(due_in_seconds, "due_in_seconds")
        self._settle(action, lease, "abandon", due_in, self._clock.now())

    def begin_reconcile(
        self, action: Action, ttl_seconds: float, *, holder: UUID | None = None, early: bool = False
    ) -> ReconcileClaim:
        valid_action(action)
        ttl = _interval(ttl_seconds)
        holder = valid_holder(holder)
        valid_instance(early, bool, "early")
        answer = self._ask("begin_reconcile", action.key, action.fingerprint, holder, ttl, early, self._clock.now())
        if answer.verdict == "claimed":
            return ReconcileClaim(action.key, str(answer.value), answer.fence, holder, answer.at)
        raise _ruling_refusal(answer, action.key)

    def claim_backlog(
        self, limit: int, ttl_seconds: float, *, holder: UUID | None = None
    ) -> list[tuple[EffectRecord, ReconcileClaim]]:
        valid_limit(limit)
        ttl = _interval(ttl_seconds)
        holder = valid_holder(holder)
        columns = f"reconcile_fence, {_RECORD_COLUMNS}"
        rows = self._rows("claim_backlog", limit, holder, ttl, self._clock.now(), columns=columns)
        return [_claimed(fence, holder, _record(tuple(row))) for fence, *row in rows]

    def defer_reconcile(self, claim: ReconcileClaim, seconds: float | None, *, note: str = "", by: str = "") -> None:
        valid_instance(claim, ReconcileClaim, "claim")
        put_off = None if seconds is None else _interval(seconds, "seconds")
        valid_text(note, "note")
        valid_text(by, "by")
        answer = self._ask("defer_reconcile", claim.key, claim.holder, put_off, note, by, self._clock.now())
        if answer.verdict != "ok":
            raise _ruling_refusal(answer, claim.key)

    def resolve_uncertain(
        self, action: Action, resolution: Resolution, *, claim: ReconcileClaim | None = None
    ) -> Ruling:
        valid_action(action)
        valid_resolution(resolution)
        valid_claim(claim)
        answer = self._ask(
            "resolve_uncertain",
            action.key,
            action.fingerprint,
            resolution.applied,
            resolution.result,
            resolution.by,
            resolution.why,
            resolution.force_retryable,
            self._clock.now(),
            None if claim is None else claim.holder,
        )
        if answer.verdict in {"applied", "not_applied"}:
            return Ruling(answer.verdict == "applied", answer.value)
        raise _ruling_refusal(answer, action.key)

    def raise_fences(self, floor: int, *, by: str = "", why: str = "") -> int:
        arguments = (valid_fence(floor, "floor"), valid_text(by, "by"), valid_text(why, "why"), self._clock.now())
        # It touches every resource there is.
        rows = self._database.call(self._statement("raise_fences", len(arguments)), arguments, patient=True)
        return int(rows[0][0])

    def retain(self, older_than_seconds: float, limit: int) -> int:
        older_than = _interval(older_than_seconds, "older_than_seconds")
        rows = self._rows("retain", older_than, valid_limit(limit), self._clock.now())
        return int(rows[0][0])

    def lookup(self, key: str) -> EffectRecord | None:
        records = self._records("lookup", valid_key(key, "key"))
        return records[0] if records else None

    def history(self, key: str) -> list[HistoryEntry]:
        rows = self._rows("history", valid_key(key, "key"), columns='at, event, fence, "by", why')
        return [HistoryEntry(*row) for row in rows]

    def evidence(self, key: str) -> list[Evidence]:
        rows = self._rows("evidence", valid_key(key, "key"), columns="at, fence, holder, result")
        return [Evidence(*row) for row in rows]

    def expire_intents(self, limit: int) -> int:
        rows = self._rows("expire_intents", valid_limit(limit), self._clock.now())
        return int(rows[0][0])

    def backlog(
        self,
        limit: int,
        *,
        prefix: str = "",
        reason: str = "",
        older_than_seconds: float | None = None,
        parked: bool | None = None,
        after: EffectRecord | None = None,
    ) -> list[EffectRecord]:
        valid_limit(limit)
        valid_text(prefix, "prefix")
        valid_text(reason, "reason")
        age = None if older_than_seconds is None else _interval(older_than_seconds, "older_than_seconds")
        if parked is not None:
            valid_instance(parked, bool, "parked")
        valid_after(after)
        page = (after and after.uncertain_at, after and after.key)
        return self._records("backlog", limit, prefix, reason, age, parked, *page, self._clock.now())

    def tallies(self) -> list[Tally]:
        rows = self._rows("tallies", self._clock.now(), columns="kind, scope, reason, count, oldest_at, next_at")
        return [Tally(Kind(kind), *rest) for kind, *rest in rows]

    def now(self) -> datetime:
        """Return the database's time, or that of the clock that was given."""
        now: datetime = self._rows("now", self._clock.now())[0][0]
        return now

    def claim_due(self, limit: int, again_after_seconds: float) -> list[EffectRecord]:
        again_after = _interval(again_after_seconds, "again_after_seconds")
        return self._records("claim_due", valid_limit(limit), again_after, self._clock.now())

    def _settle(self, action: Action, lease: Lease, function: str, *arguments: object) -> None:
        answer = self._ask(function, *_credentials(action, lease), *arguments)
        if answer.verdict != "ok":
            raise _lease_refusal(answer, action, lease)

    def _ask(self, function: str, *arguments: object) -> _Answer:
        return _Answer(*self._rows(function, *arguments)[0])

    def _records(self, function: str, *arguments: object) -> list[EffectRecord]:
        return [_record(row) for row in self._rows(function, *arguments, columns=_RECORD_COLUMNS)]

    def _rows(self, function: str, *arguments: object, columns: str = "*") -> list[tuple[Any, ...]]:
        return self._database.call(self._statement(function, len(arguments), columns), arguments)

    def _rows_of_many(self, function: str, columns: dict[str, list[Any]], *arguments: object) -> list[tuple[Any, ...]]:
        """Call a function for many, whose arrays travel as JSON: the driver takes ten times as long to write arrays."""
        arrays = [f"ARRAY(SELECT json_array_elements_text(%s::json)::{_TYPES.get(name, 'text')})" for name in columns]
        placeholders = ", ".join([*arrays, *["%s"] * len(arguments)])
        texts = [json.dumps(column, ensure_ascii=False) for column in columns.values()]
        statement = f"SELECT * FROM {self._schema}.effect_{function}({placeholders})"
        return self._database.call(statement, (*texts, *arguments))

    def _statement(self, function: str, count: int, columns: str = "*") -> str:
        return f"SELECT {columns} FROM {self._schema}.effect_{function}({', '.join(['%s'] * count)})"


def _credentials(action: Action, lease: Lease) -> tuple[object, ...]:
    valid_credentials(action, lease)
    return (action.key, action.resource, action.fingerprint, lease.resource, lease.fence, lease.holder)


@contextmanager
def _in_transaction(action: Action, lease: Lease | None = None) -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        if sqlstate(error) != _REFUSED_IN_TRANSACTION:
            ours = rolled_back(error)
            raise ours from cause_of(ours, error)
        verdict = error.diag.message_detail or "lease_lost"
        raise refusal(verdict, action.key, fence=lease and lease.fence) from None


def _columns(leases: Sequence[tuple[Action, Lease]]) -> dict[str, list[Any]]:
    """Return credentials by column, as the functions for many take them."""
    return {
        "key": [action.key for action, _ in leases],
        "resource": [action.resource for action, _ in leases],
        "fingerprint": [action.fingerprint for action, _ in leases],
        "lease_resource": [lease.resource for _, lease in leases],
        "fence": [lease.fence for _, lease in leases],
        "holder": [str(lease.holder) for _, lease in leases],
    }


def _outcome(answer: _Answer, action: Action, holder: UUID) -> Outcome:
    match answer.verdict:
        case "granted":
            return Granted(Lease(action.resource, answer.fence, holder, answer.at), answer.attempt)
        case "done":
            return Done(answer.value)
        case "uncertain":
            return Uncertain(answer.value or "", answer.at)
        case "in_flight":
            return InFlight(answer.seconds)
        case "contended":
            return Contended(answer.seconds)
    raise refusal(answer.verdict, action.key)


def _interval(seconds: float, argument: str = "ttl_seconds") -> timedelta:
    return timedelta(seconds=valid_ttl(seconds, argument))


def _record(row: tuple[Any, ...]) -> EffectRecord:
    key, resource, state, fence, attempt, safe, *rest = row
    safety = RetrySafety.SAFE if safe else RetrySafety.UNSAFE
    return EffectRecord(key, resource, _STATES[state], fence, attempt, safety, *rest)


def _claimed(fence: int, holder: UUID, record: EffectRecord) -> tuple[EffectRecord, ReconcileClaim]:
    assert record.next_look_at is not None
    return record, ReconcileClaim(record.key, record.resource, fence, holder, record.next_look_at)


def _lease_refusal(answer: _Answer, action: Action, lease: Lease) -> Exception:
    return refusal(answer.verdict, action.key, fence=lease.fence, seen=answer.fence or 0)


def _ruling_refusal(answer: _Answer, key: str) -> Exception:
    state = None if answer.attempt is None else _STATES[answer.attempt].value
    return refusal(answer.verdict, key, state=state, retry_after_seconds=answer.seconds)
