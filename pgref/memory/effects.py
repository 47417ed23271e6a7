"""The side-effect gate in plain Python: semantics.md, section 1, made executable (G1-G28).

An entry is frozen. Judging functions are pure; a method reads one entry, judges, and writes its successor (history
and evidence included) in one assignment under the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from threading import Lock
from uuid import UUID

from pgref.clock import Clock, SystemClock
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
from pgref.errors import (
    FenceError,
    FenceStale,
    FingerprintMismatch,
    LeaseLost,
    NotHolder,
    NotUncertain,
    ReconcileDeferred,
    ReconcileTaken,
    Refused,
    ResourceMismatch,
    UnsafeNotRetryable,
)
from pgref.keys import shown, valid_fence, valid_instance, valid_key, valid_limit, valid_text, valid_ttl

__all__ = ["MemoryEffectStore"]


@dataclass(frozen=True, slots=True)
class _Entry(EffectRecord):
    """A key: its public record and what authorises calls on it."""

    holder: UUID
    released: bool = False
    ruled_not_applied: bool = False
    due_at: datetime | None = None
    claim: ReconcileClaim | None = None
    """The newest; it stands while ``put_off`` is not set and until it expires."""
    put_off: bool = False
    history: tuple[HistoryEntry, ...] = ()
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True, slots=True)
class _Resource:
    """``fence`` is the highest ever minted (grants and claims), ``granted_fence`` that of the newest grant."""

    fence: int = 0
    granted_fence: int = 0
    key: str = ""


class MemoryEffectStore:
    """An `EffectStore` in this process's memory."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = Lock()
        self._entries: dict[str, _Entry] = {}
        self._resources: dict[str, _Resource] = {}
        self._floor = 0

    # Asking

    def acquire(self, action: Action, ttl_seconds: float, *, holder: UUID | None = None) -> Outcome:
        """Ask to run ``action``, judged in the order done, uncertain, in flight, contended, grant (G1-G9)."""
        valid_action(action)
        ttl = timedelta(seconds=valid_ttl(ttl_seconds))
        asker = valid_holder(holder)
        with self._lock:
            return self._acquire(action, ttl, asker, self._now())

    def acquire_many(
        self, actions: Sequence[Action], ttl_seconds: float, *, holders: Sequence[UUID] | None = None
    ) -> list[Outcome | FingerprintMismatch]:
        """Ask for many at once. Each answer is that of `acquire`, asked one after another in this order."""
        ttl = timedelta(seconds=valid_ttl(ttl_seconds))
        holders = valid_holders(holders, len(valid_actions(actions)))
        with self._lock:
            now = self._now()
            return [self._answer(action, ttl, holder, now) for action, holder in zip(actions, holders, strict=True)]

    def _answer(self, action: Action, ttl: timedelta, holder: UUID, now: datetime) -> Outcome | FingerprintMismatch:
        try:
            return self._acquire(action, ttl, holder, now)
        except FingerprintMismatch as mismatch:
            return mismatch

    def _acquire(self, action: Action, ttl: timedelta, holder: UUID, now: datetime) -> Outcome:
        entry = self._flip_if_expired(self._entry_of(action), now)
        rival = self._rival(action.resource, action.key)
        standing = _judge(entry, rival, (action.resource, holder), now)
        if standing is not None:
            return standing
        self._flip_if_expired(rival, now)
        fence = self._resource(action.resource).fence + 1
        granted = _granted(action, entry, Lease(action.resource, fence, holder, now + ttl), now)
        self._resources[action.resource] = _Resource(fence, fence, action.key)
        self._put(granted)
        return _grant_of(granted)

    # Calls that need a lease

    def complete(self, action: Action, lease: Lease, result: str | None = None) -> str | None:
        """Record that it happened and return the result that stands, the first one (G12, G16, G17)."""
        valid_credentials(action, lease)
        valid_result(result)
        with self._lock:
            return self._complete(action, lease, result, self._now())

    def complete_many(self, completions: Sequence[tuple[Action, Lease, str | None]]) -> list[str | Refused | None]:
        """Record many completions. Each answer is that of `complete`; a refusal is returned, not raised."""
        valid_completions(completions)
        with self._lock:
            now = self._now()
            return [self._completion(action, lease, result, now) for action, lease, result in completions]

    def _completion(self, action: Action, lease: Lease, result: str | None, now: datetime) -> str | Refused | None:
        try:
            return self._complete(action, lease, result, now)
        except Refused as refused:
            return refused

    def _complete(self, action: Action, lease: Lease, result: str | None, now: datetime) -> str | None:
        entry = self._entry_of(action)
        if entry is not None and entry.state is State.DONE:
            return entry.result
        try:
            attempt = _must(_may_complete, self._attempt(action, lease, entry))
        except FenceError:
            self._keep_evidence(entry, Evidence(now, lease.fence, lease.holder, result))
            raise
        self._put(_completed(attempt, result, now))
        return result

    def renew(self, action: Action, lease: Lease, ttl_seconds: float) -> Lease:
        """Extend the lease to now + ``ttl_seconds`` (G13)."""
        valid_credentials(action, lease)
        ttl = timedelta(seconds=valid_ttl(ttl_seconds))
        with self._lock:
            return self._renew(action, lease, ttl, self._now())

    def renew_many(self, leases: Sequence[tuple[Action, Lease]], ttl_seconds: float) -> list[Renewal]:
        """Extend many leases at once. Answers stand in the order asked; nothing is ever busy here."""
        valid_leases(leases)
        ttl = timedelta(seconds=valid_ttl(ttl_seconds))
        with self._lock:
            now = self._now()
            return [self._renewal(action, lease, ttl, now) for action, lease in leases]

    def _renewal(self, action: Action, lease: Lease, ttl: timedelta, now: datetime) -> Renewal:
        try:
            self._renew(action, lease, ttl, now)
        except Refused:
            return Renewal.LOST
        return Renewal.RENEWED

    def _renew(self, action: Action, lease: Lease, ttl: timedelta, now: datetime) -> Lease:
        entry = self._attempt(action, lease, self._entry_of(action))
        _must(lambda e: _is_live(e, now), entry)
        self._put(replace(entry, expires_at=now + ttl))
        return replace(lease, expires_at=now + ttl)

    def renew_running(self, attempts: Sequence[tuple[str, int]], ttl_seconds: float) -> list[Renewal]:
        """Extend live attempts by key and fence. Nothing is ever busy here."""
        valid_running(attempts)
        ttl = timedelta(seconds=valid_ttl(ttl_seconds))
        with self._lock:
            now = self._now()
            return [self._renewal_of_running(self._entries.get(key), fence, now, ttl) for key, fence in attempts]

    def _renewal_of_running(self, entry: _Entry | None, fence: int, now: datetime, ttl: timedelta) -> Renewal:
        if entry is None or entry.fence != fence or not _is_live(entry, now):
            return Renewal.LOST
        if self._resource(entry.resource).granted_fence != fence:
            return Renewal.LOST
        self._put(replace(entry, expires_at=now + ttl))
        return Renewal.RENEWED

    def mark_uncertain(self, action: Action, lease: Lease, reason: str, *, by: str = "") -> None:
        """Say that it may have happened (G14). The resource stays held until release or expiry."""
        valid_credentials(action, lease)
        valid_text(reason, "reason")
        valid_text(by, "by")
        with self._lock:
            now = self._now()
            entry = _intent(action, lease, self._entry_of(action))
            if entry.state is not State.UNCERTAIN:
                _must(lambda e: e.state is State.IN_FLIGHT, entry)
                self._put(_uncertain(entry, now, "marked", by=by, why=reason))

    def release(self, action: Action, lease: Lease) -> None:
        """Free the resource and leave the intent (G15)."""
        valid_credentials(action, lease)
        with self._lock:
            self._put(replace(self._attempt(action, lease, self._entry_of(action)), released=True))

    def abandon(self, action: Action, lease: Lease, *, due_in_seconds: float | None = None) -> None:
        """Withdraw the intent, since it did not happen (G15). A key with a payload can be made due again."""
        valid_credentials(action, lease)
        due_in = None if due_in_seconds is None else timedelta(seconds=valid_ttl(due_in_seconds, "due_in_seconds"))
        with self._lock:
            now = self._now()
            entry = _intent(action, lease, self._entry_of(action))
            if entry.state is not State.FREE:
                _must(lambda e: _is_live(e, now), entry)
                due_at = now + due_in if due_in is not None and entry.payload is not None else None
                self._put(replace(entry, state=State.FREE, due_at=due_at))

    # Reconciliation

    def begin_reconcile(
        self, action: Action, ttl_seconds: float, *, holder: UUID | None = None, early: bool = False
    ) -> ReconcileClaim:
        """Claim the right to look into an uncertain key (G18), with a fence to seal the sink with (G27)."""
        valid_action(action)
        ttl = timedelta(seconds=valid_ttl(ttl_seconds))
        holder = valid_holder(holder)
        valid_instance(early, bool, "early")
        with self._lock:
            now = self._now()
            entry = _must_be_uncertain(action.key, self._flip_if_expired(self._entry_of(action), now))
            standing = _standing_claim(entry, holder, now)
            if standing is not None:
                return standing
            if not early:
                _refuse_put_off(entry, now)
            return self._claim(entry, holder, now, ttl)

    def claim_backlog(
        self, limit: int, ttl_seconds: float, *, holder: UUID | None = None
    ) -> list[tuple[EffectRecord, ReconcileClaim]]:
        """Claim up to ``limit`` uncertain keys that have waited longest for a look (G18, G27)."""
        valid_limit(limit)
        ttl = timedelta(seconds=valid_ttl(ttl_seconds))
        holder = valid_holder(holder)
        with self._lock:
            now = self._now()
            waiting = [(_waits_from(entry), entry.key) for entry in self._uncertain_entries() if not entry.parked]
            claims = {
                key: self._claim(self._entries[key], holder, now, ttl)
                for since, key in sorted(waiting)[:limit]
                if since <= now
            }
            return [(_record(self._entries[key]), claim) for key, claim in claims.items()]

    def _claim(self, entry: _Entry, holder: UUID, now: datetime, ttl: timedelta) -> ReconcileClaim:
        claim = ReconcileClaim(entry.key, entry.resource, self._mint_seal(entry, now), holder, now + ttl)
        looks = entry.looks + 1
        self._put(replace(entry, claim=claim, put_off=False, next_look_at=claim.expires_at, looks=looks, parked=False))
        return claim

    def defer_reconcile(self, claim: ReconcileClaim, seconds: float | None, *, note: str = "", by: str = "") -> None:
        """Give a claim back without a ruling, for ``seconds`` or, with None, until a person rules."""
        valid_instance(claim, ReconcileClaim, "claim")
        put_off = None if seconds is None else timedelta(seconds=valid_ttl(seconds, "seconds"))
        valid_text(note, "note")
        valid_text(by, "by")
        with self._lock:
            now = self._now()
            entry = _must_be_uncertain(claim.key, self._entries.get(claim.key))
            _must_have_claim(entry, claim)
            if entry.put_off:
                return
            if put_off is None:
                entry = _noted(entry, now, "parked", by=by, why=note)
            next_look_at = None if put_off is None else now + put_off
            self._put(replace(entry, put_off=True, next_look_at=next_look_at, parked=put_off is None, note=note))

    def _mint_seal(self, entry: _Entry, now: datetime) -> int:
        resource = self._resource(entry.resource)
        rival = self._rival(entry.resource, entry.key)
        if rival is not None and now < rival.expires_at and rival.fence > self._floor:
            # A fence above a live holder's would make the sink refuse that holder. Below the floor it has lost anyway.
            return resource.granted_fence
        self._resources[entry.resource] = replace(resource, fence=resource.fence + 1)
        return resource.fence + 1

    def resolve_uncertain(
        self, action: Action, resolution: Resolution, *, claim: ReconcileClaim | None = None
    ) -> Ruling:
        """Rule on an uncertain key and return the ruling that stands, the first one (G19, G20)."""
        valid_action(action)
        valid_resolution(resolution)
        valid_claim(claim)
        with self._lock:
            now = self._now()
            found = self._flip_if_expired(self._entry_of(action), now)
            standing = _standing_ruling(found)
            if standing is not None:
                return standing
            entry = _must_be_uncertain(action.key, found)
            if claim is not None:
                _must_have_claim(entry, claim)
            _refuse_unsafe(entry, resolution)
            self._put(_ruled(entry, resolution, now))
            return Ruling(resolution.applied, resolution.result)

    # Looking

    def lookup(self, key: str) -> EffectRecord | None:
        """Return what is known of ``key``. An expired intent shows as in flight until it is flipped."""
        valid_key(key, "key")
        with self._lock:
            entry = self._entries.get(key)
        return entry and _record(entry)

    def history(self, key: str) -> list[HistoryEntry]:
        """Return the marks, expiries and rulings of ``key``, oldest first (G21)."""
        valid_key(key, "key")
        with self._lock:
            entry = self._entries.get(key)
        return list(entry.history) if entry else []

    def evidence(self, key: str) -> list[Evidence]:
        """Return the refused late completions of ``key``, oldest first (G17)."""
        valid_key(key, "key")
        with self._lock:
            entry = self._entries.get(key)
        return list(entry.evidence) if entry else []

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
        """Return up to ``limit`` uncertain keys of those asked for, the oldest first."""
        valid_limit(limit)
        valid_text(prefix, "prefix")
        valid_text(reason, "reason")
        age = (
            None
            if older_than_seconds is None
            else timedelta(seconds=valid_ttl(older_than_seconds, "older_than_seconds"))
        )
        if parked is not None:
            valid_instance(parked, bool, "parked")
        valid_after(after)
        with self._lock:
            now = self._now()
            found = [
                entry
                for entry in self._uncertain_entries()
                if entry.key.startswith(prefix)
                and reason in (entry.reason or "")
                and (age is None or _since(entry) < now - age)
                and (parked is None or entry.parked is parked)
                and (after is None or (_since(entry), entry.key) > (_since(after), after.key))
            ]
        return [_record(entry) for entry in found[:limit]]

    def tallies(self) -> list[Tally]:
        """Count what is uncertain, parked, due and in flight, by scope and reason."""
        with self._lock:
            now = self._now()
            groups: dict[tuple[Kind, str, str | None], list[tuple[datetime, datetime | None]]] = {}
            for entry in self._entries.values():
                fate = _fate(entry, now)
                if fate is not None:
                    kind, since, next_at = fate
                    reason = entry.reason if entry.state is State.UNCERTAIN else None
                    groups.setdefault((kind, entry.key.split(":", 1)[0], reason), []).append((since, next_at))
        return [
            Tally(*group, len(times), min(at for at, _ in times), min((at for _, at in times if at), default=None))
            for group, times in groups.items()
        ]

    def now(self) -> datetime:
        """Return the clock's time."""
        return self._now()

    def _uncertain_entries(self) -> list[_Entry]:
        found = [(e.uncertain_at, e.key, e) for e in self._entries.values() if e.uncertain_at is not None]
        return [entry for _, _, entry in sorted(found, key=lambda item: item[:2])]

    # Sweeping

    def expire_intents(self, limit: int) -> int:
        """Turn up to ``limit`` expired intents uncertain (G3). Return how many."""
        valid_limit(limit)
        with self._lock:
            now = self._now()
            expired = [e for e in self._entries.values() if e.state is State.IN_FLIGHT and now >= e.expires_at]
            chosen = sorted(expired, key=lambda e: (e.granted_at, e.key))[:limit]
            for entry in chosen:
                self._flip_if_expired(entry, now)
            return len(chosen)

    def claim_due(self, limit: int, again_after_seconds: float) -> list[EffectRecord]:
        """Return up to ``limit`` free keys that are due, and each again after ``again_after_seconds``."""
        valid_limit(limit)
        again_after = timedelta(seconds=valid_ttl(again_after_seconds, "again_after_seconds"))
        with self._lock:
            now = self._now()
            due = [(e.due_at, e.key, e) for e in self._entries.values() if e.due_at is not None and e.due_at <= now]
            chosen = [entry for _, _, entry in sorted(due, key=lambda item: item[:2])[:limit]]
            for entry in chosen:
                self._put(replace(entry, due_at=now + again_after))
        return [_record(entry) for entry in chosen]

    def retain(self, older_than_seconds: float, limit: int) -> int:
        """Remove up to ``limit`` keys done for longer than that, the oldest first (G25). Fences stay."""
        valid_limit(limit)
        older_than = timedelta(seconds=valid_ttl(older_than_seconds, "older_than_seconds"))
        with self._lock:
            before = self._now() - older_than
            old = [entry for entry in self._entries.values() if _is_done_before(entry, before)]
            chosen = sorted(old, key=lambda e: (e.granted_at, e.key))[:limit]
            for entry in chosen:
                del self._entries[entry.key]
            return len(chosen)

    # After a failover

    def raise_fences(self, floor: int, *, by: str = "", why: str = "") -> int:
        """Let no later fence be at or below ``floor``, and turn every live intent uncertain (G28). Return how many."""
        valid_fence(floor, "floor")
        valid_text(by, "by")
        valid_text(why, "why")
        with self._lock:
            now = self._now()
            self._floor = max(self._floor, floor)
            live = [entry for entry in self._entries.values() if entry.state is State.IN_FLIGHT]
            for entry in live:
                noted = _noted(entry, now, "fences_raised", by=by, why=why)
                self._put(replace(noted, state=State.UNCERTAIN, reason="fences raised", uncertain_at=now))
            return len(live)

    # Reading and writing; the lock is held

    def _now(self) -> datetime:
        return self._clock.now() or SystemClock().now()

    def _entry_of(self, action: Action) -> _Entry | None:
        entry = self._entries.get(action.key)
        if entry is not None and _differ(entry.fingerprint, action.fingerprint):
            raise FingerprintMismatch(f"{shown(action.key)} is known for another input", key=action.key)
        return entry

    def _resource(self, name: str) -> _Resource:
        known = self._resources.get(name, _Resource())
        return replace(known, fence=max(known.fence, self._floor))

    def _rival(self, resource: str, key: str) -> _Entry | None:
        """Return the entry of another key that holds ``resource``, be its lease live or expired."""
        state = self._resource(resource)
        entry = None if state.key == key else self._entries.get(state.key)
        return entry if entry is not None and _holds(entry, resource, state) else None

    def _attempt(self, action: Action, lease: Lease, entry: _Entry | None) -> _Entry:
        """Return ``entry`` if ``lease`` is its attempt's and the newest of the resource (G11)."""
        _refuse_other_resource(action, lease)
        seen = self._resource(action.resource).granted_fence
        if lease.fence != seen:
            raise _stale(action, lease, seen)
        return _must_be_holder(action, lease, entry)

    def _put(self, entry: _Entry) -> None:
        self._entries[entry.key] = entry

    def _flip_if_expired(self, entry: _Entry | None, now: datetime) -> _Entry | None:
        if entry is None or entry.state is not State.IN_FLIGHT or now < entry.expires_at:
            return entry
        flipped = _uncertain(entry, now, "expired", by="store", why="lease expired")
        self._put(flipped)
        return flipped

    def _keep_evidence(self, entry: _Entry | None, late: Evidence) -> None:
        if entry is None or any((e.fence, e.holder) == (late.fence, late.holder) for e in entry.evidence):
            return
        self._put(replace(entry, evidence=(*entry.evidence, late)))


# Judging


def _judge(entry: _Entry | None, rival: _Entry | None, asker: tuple[str, UUID], now: datetime) -> Outcome | None:
    """Done > uncertain > in flight > contended > grant, which is None."""
    match entry:
        case _Entry(state=State.DONE, result=result):
            return Done(result)
        case _Entry(state=State.UNCERTAIN, reason=str(reason), uncertain_at=datetime() as since):
            return Uncertain(reason, since)
        case _Entry(state=State.IN_FLIGHT):
            same = (entry.resource, entry.holder) == asker
            return _grant_of(entry) if same else InFlight(_seconds_left(entry, now))
    if rival is not None and now < rival.expires_at:
        return Contended(_seconds_left(rival, now))
    return None


def _differ(known: str | None, asked: str | None) -> bool:
    return known is not None and asked is not None and known != asked


def _holds(entry: _Entry, resource: str, state: _Resource) -> bool:
    newest = entry.resource == resource and entry.fence == state.granted_fence
    return newest and entry.state in {State.IN_FLIGHT, State.UNCERTAIN} and not entry.released


def _seconds_left(entry: _Entry, now: datetime) -> float:
    return (entry.expires_at - now).total_seconds()


def _is_live(entry: _Entry, now: datetime) -> bool:
    return entry.state is State.IN_FLIGHT and now < entry.expires_at


def _is_done_before(entry: _Entry, before: datetime) -> bool:
    return entry.completed_at is not None and max(entry.completed_at, entry.granted_at) < before


def _may_complete(entry: _Entry) -> bool:
    """In flight, though expired; or uncertain by that very expiry, not by a mark (G16)."""
    return entry.state is State.IN_FLIGHT or (entry.state is State.UNCERTAIN and entry.expired)


def _must(judge: Callable[[_Entry], bool], entry: _Entry) -> _Entry:
    if not judge(entry):
        raise LeaseLost(f"the intent of {shown(entry.key)} no longer stands", key=entry.key)
    return entry


def _intent(action: Action, lease: Lease, entry: _Entry | None) -> _Entry:
    """Return ``entry`` if ``lease`` is its attempt's, whoever has the resource now (G15)."""
    _refuse_other_resource(action, lease)
    if entry is not None and lease.fence < entry.fence:
        raise _stale(action, lease, entry.fence)
    return _must_be_holder(action, lease, entry)


def _refuse_other_resource(action: Action, lease: Lease) -> None:
    if lease.resource != action.resource:
        raise ResourceMismatch(f"lease on {shown(lease.resource)} used for {shown(action.resource)}", key=action.key)


def _stale(action: Action, lease: Lease, seen: int) -> FenceStale:
    message = f"fence {lease.fence} of {shown(action.resource)} is not the newest, {seen}"
    return FenceStale(message, key=action.key, fence=lease.fence, seen=seen)


def _must_be_holder(action: Action, lease: Lease, entry: _Entry | None) -> _Entry:
    attempt = (lease.resource, lease.fence, lease.holder)
    if entry is None or (entry.resource, entry.fence, entry.holder) != attempt:
        raise NotHolder(f"the lease is not the one of {shown(action.key)}", key=action.key)
    return entry


def _must_be_uncertain(key: str, entry: _Entry | None) -> _Entry:
    if entry is None or entry.state is not State.UNCERTAIN:
        state = entry and entry.state
        raise NotUncertain(f"{shown(key)} is {state or 'unknown'}", key=key, state=state)
    return entry


def _must_have_claim(entry: _Entry, claim: ReconcileClaim) -> None:
    if entry.claim is None or entry.claim.holder != claim.holder:
        raise ReconcileTaken(f"{shown(entry.key)} is no longer held by this claim", key=entry.key)


def _refuse_put_off(entry: _Entry, now: datetime) -> None:
    until = entry.next_look_at
    if entry.parked or (entry.put_off and until is not None and now < until):
        seconds = None if until is None else (until - now).total_seconds()
        raise ReconcileDeferred(f"{shown(entry.key)} is put off", key=entry.key, retry_after_seconds=seconds)


def _since(record: EffectRecord) -> datetime:
    assert record.uncertain_at is not None
    return record.uncertain_at


def _waits_from(entry: _Entry) -> datetime:
    return entry.next_look_at or _since(entry)


def _fate(entry: _Entry, now: datetime) -> tuple[Kind, datetime, datetime | None] | None:
    """Return what the entry is tallied as, since when, and when a sweep is to take it up."""
    match entry:
        case _Entry(state=State.UNCERTAIN, parked=True):
            return Kind.PARKED, _since(entry), None
        case _Entry(state=State.UNCERTAIN):
            return Kind.UNCERTAIN, _since(entry), _waits_from(entry)
        case _Entry(state=State.IN_FLIGHT, granted_at=granted_at, expires_at=expires_at):
            return (Kind.IN_FLIGHT, granted_at, None) if now < expires_at else (Kind.EXPIRED, granted_at, expires_at)
        case _Entry(due_at=datetime() as due_at):
            return Kind.DUE, due_at, due_at
    return None


def _standing_claim(entry: _Entry, holder: UUID, now: datetime) -> ReconcileClaim | None:
    claim = entry.claim
    if claim is None or entry.put_off or now >= claim.expires_at:
        return None
    if claim.holder != holder:
        seconds = (claim.expires_at - now).total_seconds()
        raise ReconcileTaken(f"{shown(entry.key)} has a reconciler", key=entry.key, retry_after_seconds=seconds)
    return claim


def _standing_ruling(entry: _Entry | None) -> Ruling | None:
    if entry is not None and entry.state is State.DONE:
        return Ruling(applied=True, result=entry.result)
    if entry is not None and entry.state is State.FREE and entry.ruled_not_applied:
        return Ruling(applied=False, result=None)
    return None


def _refuse_unsafe(entry: _Entry, resolution: Resolution) -> None:
    if not resolution.applied and not resolution.force_retryable and entry.retry_safety is RetrySafety.UNSAFE:
        raise UnsafeNotRetryable(f"{shown(entry.key)} may not run again without force_retryable", key=entry.key)


# Successors of an entry


def _granted(action: Action, entry: _Entry | None, lease: Lease, now: datetime) -> _Entry:
    return _Entry(
        key=action.key,
        resource=action.resource,
        state=State.IN_FLIGHT,
        fence=lease.fence,
        attempt=entry.attempt + 1 if entry else 1,
        retry_safety=action.retry_safety,
        created_at=entry.created_at if entry else now,
        granted_at=now,
        expires_at=lease.expires_at,
        uncertain_at=None,
        completed_at=None,
        expired=False,
        fingerprint=action.fingerprint,
        reason=None,
        payload=action.payload,
        result=None,
        next_look_at=None,
        looks=0,
        parked=False,
        note=None,
        holder=lease.holder,
        history=entry.history if entry else (),
        evidence=entry.evidence if entry else (),
    )


def _grant_of(entry: _Entry) -> Granted:
    return Granted(Lease(entry.resource, entry.fence, entry.holder, entry.expires_at), entry.attempt)


def _completed(entry: _Entry, result: str | None, now: datetime) -> _Entry:
    if entry.state is State.UNCERTAIN:
        entry = _noted(entry, now, "completed_late", by="holder", why="")
    return replace(_settled(entry), state=State.DONE, result=result, completed_at=now)


def _uncertain(entry: _Entry, now: datetime, event: str, *, by: str, why: str) -> _Entry:
    noted = _noted(entry, now, event, by=by, why=why)
    return replace(noted, state=State.UNCERTAIN, reason=why, uncertain_at=now, expired=event == "expired")


def _ruled(entry: _Entry, resolution: Resolution, now: datetime) -> _Entry:
    by, why = resolution.by, resolution.why
    if resolution.applied:
        entry = _noted(_settled(entry), now, "ruled_applied", by=by, why=why)
        return replace(entry, state=State.DONE, result=resolution.result, completed_at=now)
    entry = _noted(_settled(entry), now, "ruled_not_applied", by=by, why=why)
    if entry.retry_safety is RetrySafety.UNSAFE:
        entry = _noted(entry, now, "forced", by=by, why=why)
    due_at = now if entry.payload is not None else None
    return replace(entry, state=State.FREE, ruled_not_applied=True, due_at=due_at)


def _settled(entry: _Entry) -> _Entry:
    return replace(
        entry,
        uncertain_at=None,
        expired=False,
        reason=None,
        claim=None,
        put_off=False,
        next_look_at=None,
        looks=0,
        parked=False,
        note=None,
    )


def _noted(entry: _Entry, at: datetime, event: str, *, by: str, why: str) -> _Entry:
    return replace(entry, history=(*entry.history, HistoryEntry(at, event, entry.fence, by, why)))


def _record(entry: _Entry) -> EffectRecord:
    return EffectRecord(**{field.name: getattr(entry, field.name) for field in fields(EffectRecord)})
