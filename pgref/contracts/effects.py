"""The side-effect gate: who may run an effect, and what is known about it (G1-G28)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol
from uuid import UUID, uuid4

from pgref.errors import FingerprintMismatch, InvalidArgument, Refused
from pgref.keys import valid_batch, valid_fence, valid_instance, valid_key, valid_sequence, valid_text

__all__ = [
    "Action",
    "Contended",
    "Done",
    "EffectRecord",
    "EffectStore",
    "Evidence",
    "Granted",
    "HistoryEntry",
    "InFlight",
    "Kind",
    "Lease",
    "Outcome",
    "ReconcileClaim",
    "Renewal",
    "Resolution",
    "RetrySafety",
    "Ruling",
    "State",
    "Tally",
    "Uncertain",
    "late_seconds",
    "valid_action",
    "valid_actions",
    "valid_after",
    "valid_claim",
    "valid_completions",
    "valid_credentials",
    "valid_holder",
    "valid_holders",
    "valid_leases",
    "valid_resolution",
    "valid_result",
    "valid_running",
]


class RetrySafety(StrEnum):
    """Whether an effect that was found *not applied* may run again without a person's word."""

    SAFE = "safe"
    UNSAFE = "unsafe"


class State(StrEnum):
    """The state of a key."""

    FREE = "free"
    """May be granted. Entered at first sight, by `abandon` and by the ruling *not applied*; left by `acquire`."""
    IN_FLIGHT = "in_flight"
    """An attempt runs. Entered by `acquire`; left by `complete`, `abandon`, `mark_uncertain` and expiry."""
    UNCERTAIN = "uncertain"
    """It may have happened. Entered by `mark_uncertain` and expiry; left by `resolve_uncertain` and G16."""
    DONE = "done"
    """It happened and its result is kept. Entered by `complete` and the ruling *applied*; left only by retention."""


@dataclass(frozen=True, slots=True)
class Action:
    """One intended side effect.

    ``key`` names it and ``resource`` names what two holders must not write at once (1 to 512 bytes each).
    ``fingerprint`` identifies the input (None skips the check, G9). ``payload`` is opaque text that the store
    keeps, so that the effect can be dispatched again. Raises `InvalidArgument`.
    """

    key: str
    resource: str
    fingerprint: str | None = None
    retry_safety: RetrySafety = RetrySafety.UNSAFE
    payload: str | None = None

    def __post_init__(self) -> None:
        valid_key(self.key, "key")
        valid_key(self.resource, "resource")
        if self.fingerprint is not None:
            valid_key(self.fingerprint, "fingerprint")
        if self.payload is not None:
            valid_text(self.payload, "payload")
        valid_instance(self.retry_safety, RetrySafety, "retry_safety")


@dataclass(frozen=True, slots=True)
class Lease:
    """What a grant hands out. ``expires_at`` is on the store's clock. Raises `InvalidArgument`."""

    resource: str
    fence: int
    holder: UUID
    expires_at: datetime

    def __post_init__(self) -> None:
        valid_key(self.resource, "resource")
        valid_fence(self.fence, fence_min=0)  # no grant has 0; it is a fence below all others, and refused as stale
        valid_instance(self.holder, UUID, "holder")
        valid_instance(self.expires_at, datetime, "expires_at")


@dataclass(frozen=True, slots=True)
class Granted:
    """Run it. ``attempt`` counts the grants of this key over its life (G22)."""

    lease: Lease
    attempt: int


@dataclass(frozen=True, slots=True)
class Done:
    """It happened before; ``result`` is the one that was recorded first."""

    result: str | None


@dataclass(frozen=True, slots=True)
class Uncertain:
    """It may have happened: reconcile before anything else."""

    reason: str
    since: datetime


@dataclass(frozen=True, slots=True)
class InFlight:
    """Another attempt of this key runs; its lease can end in ``retry_after_seconds`` of the store's time."""

    retry_after_seconds: float


@dataclass(frozen=True, slots=True)
class Contended:
    """Another key holds the resource; its lease can end in ``retry_after_seconds`` of the store's time."""

    retry_after_seconds: float


Outcome = Granted | Done | Uncertain | InFlight | Contended


@dataclass(frozen=True, slots=True)
class Resolution:
    """A verdict for an uncertain key: it was applied (with ``result``), or not. ``by`` and ``why`` go to the history.

    ``force_retryable`` frees an UNSAFE key on somebody's own word that nothing can still arrive.
    """

    applied: bool
    result: str | None = None
    by: str = ""
    why: str = ""
    force_retryable: bool = False

    def __post_init__(self) -> None:
        valid_instance(self.applied, bool, "applied")
        valid_result(self.result)
        valid_text(self.by, "by")
        valid_text(self.why, "why")
        valid_instance(self.force_retryable, bool, "force_retryable")
        if self.applied and self.force_retryable:
            raise InvalidArgument("force_retryable contradicts applied")
        if self.result is not None and not self.applied:
            raise InvalidArgument("result contradicts not applied")


@dataclass(frozen=True, slots=True)
class Ruling:
    """The verdict that stands for a key: the first one given."""

    applied: bool
    result: str | None


@dataclass(frozen=True, slots=True)
class ReconcileClaim:
    """The right to look into an uncertain key until ``expires_at``. ``fence`` is the one to seal a sink with (G27)."""

    key: str
    resource: str
    fence: int
    holder: UUID
    expires_at: datetime


class Renewal(StrEnum):
    """What `renew_many` found for one lease."""

    RENEWED = "renewed"
    BUSY = "busy"
    """Another transaction holds the row right now; ask again."""
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class EffectRecord:
    """Everything the store knows of a key. Times are on the store's clock."""

    key: str
    resource: str
    state: State
    fence: int
    attempt: int
    retry_safety: RetrySafety
    created_at: datetime
    granted_at: datetime
    expires_at: datetime
    uncertain_at: datetime | None
    completed_at: datetime | None
    expired: bool
    """The uncertain state was entered by expiry, not by a mark."""
    fingerprint: str | None
    reason: str | None
    payload: str | None
    result: str | None
    next_look_at: datetime | None
    """Of an uncertain key: when its claim ends, or until when it was put off. None: at once, or it is parked."""
    looks: int
    """Of an uncertain key: how often a reconciler has claimed it."""
    parked: bool
    """No reconciler is given it; it waits for a person."""
    note: str | None
    """What the last reconciler that put it off had to say."""

    @property
    def action(self) -> Action:
        """The action that this record is of, to reconcile it."""
        return Action(self.key, self.resource, self.fingerprint, self.retry_safety, self.payload)


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One mark, expiry, ruling or force (G21)."""

    at: datetime
    event: str
    fence: int
    by: str
    why: str


class Kind(StrEnum):
    """What a `Tally` counts."""

    UNCERTAIN = "uncertain"
    PARKED = "parked"
    """Uncertain, and waiting for a person."""
    DUE = "due"
    """Free and wanted: to be dispatched, now or later."""
    IN_FLIGHT = "in_flight"
    """An attempt runs."""
    EXPIRED = "expired"
    """An attempt's lease ended in silence, and no sweep has turned it uncertain yet."""


@dataclass(frozen=True, slots=True)
class Tally:
    """How many keys of one scope, the part before the first colon, share a fate, and since when the oldest does."""

    kind: Kind
    scope: str
    reason: str | None
    """Why they are uncertain; None for others."""
    count: int
    oldest_at: datetime
    """When the oldest became uncertain, was granted, or is due."""
    next_at: datetime | None
    """When the first of them is to be taken up by a sweep; it is late if that is past. None: no sweep takes them up."""

    @property
    def reason_class(self) -> str:
        """The reason before its first colon, one of few: the class of an exception without its text. Empty for none."""
        return (self.reason or "").partition(":")[0]


def late_seconds(tallies: Sequence[Tally], now: datetime) -> float:
    """Return for how long the first of what waits for a sweep has waited at ``now``; 0 if nothing does."""
    return max([0.0, *((now - tally.next_at).total_seconds() for tally in tallies if tally.next_at is not None)])


@dataclass(frozen=True, slots=True)
class Evidence:
    """A completion that came too late and was refused (G17)."""

    at: datetime
    fence: int
    holder: UUID
    result: str | None


class EffectStore(Protocol):
    """The gate. Every call is one transaction, safe to repeat after a lost answer.

    Besides the errors named below every method can raise `Unavailable` (nothing written), `OutcomeUnknown`
    (the answer was lost and could not be settled), `FingerprintMismatch` (G9) and `InvalidArgument`.
    """

    def acquire(self, action: Action, ttl_seconds: float, *, holder: UUID | None = None) -> Outcome:
        """Ask to run ``action``, judged in the order done, uncertain, in flight, contended, grant (G1-G8).

        ``holder`` (128 random bits, minted if absent) makes a repeated question get the same unexpired grant.
        """

    def acquire_many(
        self, actions: Sequence[Action], ttl_seconds: float, *, holders: Sequence[UUID] | None = None
    ) -> list[Outcome | FingerprintMismatch]:
        """Ask for up to `pgref.keys.BATCH_MAX` actions, each key once, at once; the answers stand in the order asked.

        Each is what `acquire` would answer, one after another. A mismatch is an answer here, not raised.
        """

    def complete_many(self, completions: Sequence[tuple[Action, Lease, str | None]]) -> list[str | Refused | None]:
        """Record up to `pgref.keys.BATCH_MAX` completions, each key once.

        For each, in the order asked: the result that stands, or the refusal, which is not raised here.
        """

    def complete(self, action: Action, lease: Lease, result: str | None = None) -> str | None:
        """Record that it happened and return the result that stands, the first one (G12, G16).

        Raises `ResourceMismatch`, `FenceStale`, `NotHolder` or `LeaseLost`; the refused result is kept as evidence
        (G17).
        """

    def renew(self, action: Action, lease: Lease, ttl_seconds: float) -> Lease:
        """Extend the lease to the store's now + ``ttl_seconds`` (G13). Raises `LeaseLost` and the fence errors."""

    def renew_many(self, leases: Sequence[tuple[Action, Lease]], ttl_seconds: float) -> list[Renewal]:
        """Extend many leases in one statement that waits for no row lock. Answers stand in the order asked."""

    def renew_running(self, attempts: Sequence[tuple[str, int]], ttl_seconds: float) -> list[Renewal]:
        """Extend the live attempts with these keys and fences, for somebody who has seen that they run (G13).

        For bodies that leave their own process no time to renew. As `renew_many`: waits for no row lock.
        """

    def mark_uncertain(self, action: Action, lease: Lease, reason: str, *, by: str = "") -> None:
        """Say that it may have happened (G14). Works when the resource has changed hands; raises the fence errors."""

    def release(self, action: Action, lease: Lease) -> None:
        """Free the resource and leave the intent (G15). Raises the fence errors."""

    def abandon(self, action: Action, lease: Lease, *, due_in_seconds: float | None = None) -> None:
        """Withdraw the intent, since it did not happen, and free the resource if still held (G15).

        With ``due_in_seconds`` the key is listed by `claim_due` after that time, until it is granted again.
        Raises the fence errors.
        """

    def begin_reconcile(
        self, action: Action, ttl_seconds: float, *, holder: UUID | None = None, early: bool = False
    ) -> ReconcileClaim:
        """Claim the right to look into an uncertain key (G18, G27).

        Raises `NotUncertain`, `ReconcileTaken`, or `ReconcileDeferred` unless ``early`` asks in spite of that.
        """

    def claim_backlog(
        self, limit: int, ttl_seconds: float, *, holder: UUID | None = None
    ) -> list[tuple[EffectRecord, ReconcileClaim]]:
        """Claim up to ``limit`` uncertain keys that are neither claimed nor put off nor parked (G18, G27).

        Those that have waited longest for a look; locked rows are skipped. In no order. A lost answer leaves claims
        that end by themselves.
        """

    def defer_reconcile(self, claim: ReconcileClaim, seconds: float | None, *, note: str = "", by: str = "") -> None:
        """Give a claim back without a ruling: nobody is given the key for ``seconds``, or, with None, it is parked.

        A parked key waits for a person, which is in its history (G21). Raises `NotUncertain`, or `ReconcileTaken`
        when the claim is no longer the key's.
        """

    def resolve_uncertain(
        self, action: Action, resolution: Resolution, *, claim: ReconcileClaim | None = None
    ) -> Ruling:
        """Rule on an uncertain key and return the ruling that stands, the first one (G19, G20).

        *Not applied* makes a key with a payload due at once. With ``claim`` the ruling holds only for what was
        uncertain when it was claimed: somebody who looked too slowly does not free a later attempt.
        Raises `NotUncertain`, `UnsafeNotRetryable`, or `ReconcileTaken` when the claim is no longer the key's.
        """

    def raise_fences(self, floor: int, *, by: str = "", why: str = "") -> int:
        """Let no later grant of any resource be at or below ``floor``, and turn every live intent uncertain (G28).

        For an operator after a failover or restore that may have lost commits. Returns how many intents were turned.
        """

    def retain(self, older_than_seconds: float, limit: int) -> int:
        """Remove up to ``limit`` keys done for longer than that, each with its history (G25). Return how many.

        Uncertain, in-flight and free keys are never removed, fences never lowered, locked rows skipped.
        """

    def lookup(self, key: str) -> EffectRecord | None:
        """Return what is known of ``key``, without a lock. An expired intent is in flight until it is flipped."""

    def history(self, key: str) -> list[HistoryEntry]:
        """Return the marks, expiries and rulings of ``key``, oldest first."""

    def evidence(self, key: str) -> list[Evidence]:
        """Return the refused late completions of ``key``, oldest first."""

    def expire_intents(self, limit: int) -> int:
        """Turn up to ``limit`` expired intents uncertain (G3), skipping locked rows. Return how many."""

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
        """Return up to ``limit`` uncertain keys, the oldest first, from the one that follows ``after``.

        Of those only the keys that begin with ``prefix``, whose reason contains ``reason``, that have been uncertain
        for longer than ``older_than_seconds``, and that are ``parked`` or not.
        """

    def tallies(self) -> list[Tally]:
        """Count what is uncertain, parked, due and in flight, by scope and reason. In no order."""

    def now(self) -> datetime:
        """Return the store's time, by which all is judged (G23)."""

    def claim_due(self, limit: int, again_after_seconds: float) -> list[EffectRecord]:
        """Return up to ``limit`` free keys that are due; each comes again only after ``again_after_seconds``."""


# What every store accepts: each returns its argument or raises `InvalidArgument` before anything is sent.


def valid_action(value: object, argument: str = "action") -> Action:
    """Return ``value`` if it is an `Action`."""
    return valid_instance(value, Action, argument)


def valid_credentials(action: object, lease: object) -> tuple[Action, Lease]:
    """Return ``action`` and ``lease`` if they are what they are called."""
    return valid_action(action), valid_instance(lease, Lease, "lease")


def valid_resolution(value: object) -> Resolution:
    """Return ``value`` if it is a `Resolution`."""
    return valid_instance(value, Resolution, "resolution")


def valid_claim(value: object) -> ReconcileClaim | None:
    """Return ``value`` if it is None or a `ReconcileClaim`."""
    return None if value is None else valid_instance(value, ReconcileClaim, "claim")


def valid_after(value: object) -> EffectRecord | None:
    """Return ``value`` if it is None or the record of an uncertain key."""
    if value is not None and valid_instance(value, EffectRecord, "after").uncertain_at is None:
        raise InvalidArgument("after must be the record of an uncertain key")
    return value  # type: ignore[return-value]


def valid_result(value: object) -> str | None:
    """Return ``value`` if it is None or text that can be stored."""
    return None if value is None else valid_text(value, "result")


def valid_holder(value: object) -> UUID:
    """Return ``value`` if it is a UUID, a new one if it is None."""
    return uuid4() if value is None else valid_instance(value, UUID, "holder")


def valid_holders(values: Sequence[UUID] | None, length: int) -> Sequence[UUID]:
    """Return ``values`` if they are ``length`` distinct UUIDs, new ones if they are None."""
    if values is None:
        return [uuid4() for _ in range(length)]
    for value in valid_sequence(values, "holders"):
        valid_instance(value, UUID, "each of holders")
    return valid_batch(values, "holders", length)


def valid_actions(values: Sequence[Action]) -> Sequence[Action]:
    """Return ``values`` if they are a batch of actions, each key once."""
    keys = [valid_action(value, "each of actions").key for value in valid_sequence(values, "actions")]
    valid_batch(keys, "actions")
    return values


def valid_completions(values: Sequence[tuple[Action, Lease, str | None]]) -> Sequence[tuple[Action, Lease, str | None]]:
    """Return ``values`` if they are a batch of completions, each key once."""
    for action, lease, result in _tuples(values, 3, "completions"):
        valid_credentials(action, lease)
        valid_result(result)
    valid_batch([action.key for action, _, _ in values], "completions")
    return values


def valid_leases(values: Sequence[tuple[Action, Lease]]) -> Sequence[tuple[Action, Lease]]:
    """Return ``values`` if they are actions with their leases."""
    for action, lease in _tuples(values, 2, "leases"):
        valid_credentials(action, lease)
    return values


def valid_running(values: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int]]:
    """Return ``values`` if they are a batch of keys with their fences, each key once."""
    for key, fence in _tuples(values, 2, "attempts"):
        valid_key(key, "each key of attempts")
        valid_fence(fence, "each fence of attempts")
    valid_batch([key for key, _ in values], "attempts")
    return values


def _tuples(values: Sequence[Any], length: int, argument: str) -> Sequence[Any]:
    for value in valid_sequence(values, argument):
        if len(valid_instance(value, tuple, f"each of {argument}")) != length:
            raise InvalidArgument(f"each of {argument} must have {length} parts, not {len(value)}")
    return values
