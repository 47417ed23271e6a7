"""The suite of the effect store: semantics.md, section 1, one claim a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from pgref.conformance.harness import ALL, APPLIED, NOT_APPLIED, SCENES, TTL, EffectStoreHarness
from pgref.conformance.races import EffectStoreRaces
from pgref.contracts.effects import (
    Action,
    Contended,
    Done,
    EffectStore,
    Evidence,
    Granted,
    HistoryEntry,
    InFlight,
    Lease,
    Renewal,
    Resolution,
    RetrySafety,
    Ruling,
    State,
    Uncertain,
)
from pgref.errors import (
    FenceError,
    FenceStale,
    FingerprintMismatch,
    InvalidArgument,
    LeaseLost,
    NotHolder,
    NotUncertain,
    ReconcileTaken,
    ResourceMismatch,
    UnsafeNotRetryable,
)

__all__ = ["EffectStoreConformance"]

UNSAFE = RetrySafety.UNSAFE
FORCED = Resolution(applied=False, by="ann", why="my word", force_retryable=True)

CALLS: dict[str, Callable[[EffectStore, Action, Lease], object]] = {
    "complete": lambda store, action, lease: store.complete(action, lease, "late"),
    "renew": lambda store, action, lease: store.renew(action, lease, TTL),
    "mark_uncertain": lambda store, action, lease: store.mark_uncertain(action, lease, "timeout"),
    "release": lambda store, action, lease: store.release(action, lease),
    "abandon": lambda store, action, lease: store.abandon(action, lease),
}
OK, LOST, STALE, OTHER, WRONG = None, LeaseLost, FenceStale, NotHolder, ResourceMismatch
Answers = tuple[type[FenceError] | None, ...]

# fmt: off
BY_SCENE: dict[str, Answers] = {
    #                              complete renew  mark   release abandon
    "live":                       (OK,      OK,    OK,    OK,     OK),
    "released":                   (OK,      OK,    OK,    OK,     OK),
    "expired":                    (OK,      LOST,  OK,    OK,     LOST),
    "flipped":                    (OK,      LOST,  OK,    OK,     LOST),
    "reconciling":                (OK,      LOST,  OK,    OK,     LOST),
    "marked":                     (LOST,    LOST,  OK,    OK,     LOST),
    "done":                       (OK,      LOST,  LOST,  OK,     LOST),
    "ruled applied":              (OK,      LOST,  LOST,  OK,     LOST),
    "abandoned":                  (LOST,    LOST,  LOST,  OK,     OK),
    "ruled not applied":          (LOST,    LOST,  LOST,  OK,     OK),
    "regranted":                  (STALE,   STALE, STALE, STALE,  STALE),
    "retaken":                    (STALE,   STALE, OK,    STALE,  OK),
    "overtaken":                  (STALE,   STALE, OK,    STALE,  LOST),
    "unknown":                    (STALE,   STALE, OTHER, STALE,  OTHER),
    "unknown, lease of another":  (OTHER,   OTHER, OTHER, OTHER,  OTHER),
    "released, lease of another": (OTHER,   OTHER, OTHER, OTHER,  OTHER),
}
BY_FORGERY: dict[str, Answers] = {
    #                              complete renew  mark   release abandon
    "resource":                   (WRONG,   WRONG, WRONG, WRONG,  WRONG),
    "resource, fence, holder":    (WRONG,   WRONG, WRONG, WRONG,  WRONG),
    "lower fence":                (STALE,   STALE, STALE, STALE,  STALE),
    "lower fence, holder":        (STALE,   STALE, STALE, STALE,  STALE),
    "higher fence":               (STALE,   STALE, OTHER, STALE,  OTHER),
    "holder":                     (OTHER,   OTHER, OTHER, OTHER,  OTHER),
}
# fmt: on
FORGERIES: dict[str, Callable[[Lease], Lease]] = {
    "resource": lambda lease: replace(lease, resource=lease.resource + "'"),
    "resource, fence, holder": lambda lease: replace(lease, resource="elsewhere", fence=1, holder=uuid4()),
    "lower fence": lambda lease: replace(lease, fence=lease.fence - 1),
    "lower fence, holder": lambda lease: replace(lease, fence=lease.fence - 1, holder=uuid4()),
    "higher fence": lambda lease: replace(lease, fence=lease.fence + 1),
    "holder": lambda lease: replace(lease, holder=uuid4()),
}


def _cases(table: dict[str, Answers], *, accepted: bool | None = None) -> list[Any]:
    """Return (row, call, error) of ``table``, all or only the accepted or the refused ones."""
    cells = [(row, call, error) for row, errors in table.items() for call, error in zip(CALLS, errors, strict=True)]
    chosen = [cell for cell in cells if accepted in {None, cell[2] is None}]
    return [pytest.param(*cell, id=f"{cell[0]}-{cell[1]}") for cell in chosen]


class _Acquire(EffectStoreHarness):
    """Who is granted what, and what the others are told."""

    def test_done_returns_the_first_result(self) -> None:
        """G1: a done key returns the result recorded first, without a lease."""
        action = self.action()
        self.store.complete(action, self.granted(action), "first")
        with self.unchanged(action):
            assert self.acquire(action) == Done("first")

    @pytest.mark.parametrize("result", [None, "", "null", "ä\n\U0001f600", "x" * 100_000])
    def test_result_is_kept_exactly(self, result: str | None) -> None:
        """G1: the result comes back as it was given, an empty one is not None."""
        action = self.action()
        assert self.store.complete(action, self.granted(action), result) == result
        assert self.acquire(action) == Done(result)

    def test_done_is_judged_before_contended(self) -> None:
        """G1: done is told although another key holds the resource."""
        action = self.action()
        self.store.complete(action, self.granted(action), "first")
        self.granted(self.action("other"))
        assert self.acquire(action) == Done("first")

    def test_uncertain_is_judged_before_contended(self) -> None:
        """G2: uncertain is told although another key holds the resource."""
        action = self.action()
        self.store.release(action, self.marked(action))
        self.granted(self.action("other"))
        outcome = self.acquire(action)
        assert isinstance(outcome, Uncertain)
        assert outcome.reason == "timeout"

    def test_uncertain_tells_reason_and_time(self) -> None:
        """G2: uncertain comes with the reason and the time of the mark."""
        action = self.action()
        self.marked(action)
        since = self.clock.now()
        self.tick(1)
        assert self.acquire(action) == Uncertain("timeout", since)

    def test_expired_intent_becomes_uncertain(self) -> None:
        """G3: an intent found expired is turned uncertain, which stays although nothing was granted."""
        action = self.action()
        lease = self.granted(action)
        self.tick()
        flip = Uncertain("lease expired", self.clock.now())
        assert self.acquire(action) == flip
        self.tick(1)
        assert self.acquire(action, holder=lease.holder) == flip
        assert self.record(action).expired
        assert self.events(action) == ["expired"]

    def test_lookup_does_not_flip(self) -> None:
        """G3: an expired intent shows as in flight until a call flips it."""
        action = self.action()
        self.granted(action)
        self.tick()
        assert self.state(action) is State.IN_FLIGHT

    def test_expire_intents_flips(self) -> None:
        """G3: the sweep turns expired intents uncertain and leaves live ones."""
        expired, released, live = (self.action(name, on=name) for name in ("expired", "released", "live"))
        self.granted(expired)
        self.store.release(released, self.granted(released))
        self.granted(live, ttl=2 * TTL)
        self.tick()
        assert self.store.expire_intents(ALL) >= len([expired, released])
        assert self.state(expired) is self.state(released) is State.UNCERTAIN
        assert self.state(live) is State.IN_FLIGHT
        assert self.events(expired) == ["expired"]

    def test_expire_intents_is_bounded(self) -> None:
        """G3: the sweep flips no more than its limit in one call."""
        actions = [self.action(f"key {n}", on=f"resource {n}") for n in range(3)]
        for action in actions:
            self.granted(action)
        self.tick()
        self.store.expire_intents(ALL)
        assert self.store.expire_intents(1) == 0
        self.granted(self.action("a", on="a"))
        self.granted(self.action("b", on="b"))
        self.tick()
        assert self.store.expire_intents(1) == 1

    def test_in_flight_refuses_a_new_holder(self) -> None:
        """G4: a key in flight is refused to every new holder, with the time that its lease has left."""
        action = self.action()
        self.granted(action)
        self.tick(TTL / 4)
        with self.unchanged(action):
            assert self.acquire(action) == InFlight(TTL * 3 / 4)

    def test_in_flight_holds_after_release(self) -> None:
        """G4, G15: a released resource does not make the key acquirable, nor does its next holder."""
        action = self.action()
        self.store.release(action, self.granted(action))
        assert isinstance(self.acquire(action), InFlight)
        self.granted(self.action("other"))
        assert isinstance(self.acquire(action), InFlight)

    def test_same_holder_gets_the_same_grant(self) -> None:
        """G4, G26: a question repeated by its holder gets the same lease and attempt."""
        holder = uuid4()
        first = self.acquire(self.action(), holder=holder)
        assert isinstance(first, Granted)
        assert first.lease.holder == holder
        with self.unchanged(self.action()):
            assert self.acquire(self.action(), holder=holder) == first

    def test_same_holder_on_another_resource_is_refused(self) -> None:
        """G4: the same question names the same resource; another one is told that the key is in flight."""
        lease = self.granted(self.action())
        with self.unchanged(self.action()):
            assert isinstance(self.acquire(self.action(on="elsewhere"), holder=lease.holder), InFlight)

    def test_same_holder_sees_the_renewed_lease(self) -> None:
        """G4, G13: after a renewal the repeated question is answered with the new expiry."""
        action = self.action()
        lease = self.granted(action)
        renewed = self.store.renew(action, lease, 3 * TTL)
        assert self.acquire(action, holder=lease.holder) == Granted(renewed, 1)

    def test_another_client_gets_the_same_answers(self) -> None:
        """G4, G7: two clients of the same data are told the same."""
        store, action, holder = self.second_store(), self.action(), uuid4()
        first = self.acquire(action, holder=holder)
        assert store.acquire(action, TTL, holder=holder) == first
        assert isinstance(store.acquire(action, TTL), InFlight)
        assert isinstance(store.acquire(self.action("other"), TTL), Contended)

    def test_contended_writes_nothing(self) -> None:
        """G5: contended tells the time left, and the key stays unknown."""
        holder, refused = self.action("holder"), self.action("refused")
        lease = self.granted(holder)
        self.tick(TTL / 4)
        with self.unchanged(holder, refused):
            assert self.acquire(refused) == Contended(TTL * 3 / 4)
        assert self.store.lookup(refused.key) is None
        self.store.complete(holder, lease)
        assert self.granted(refused).fence == lease.fence + 1

    def test_resources_are_independent(self) -> None:
        """G5, G6: keys on different resources do not contend, and each resource counts from 1."""
        assert self.granted(self.action("a", on="a")).fence == 1
        assert self.granted(self.action("b", on="b")).fence == 1

    def test_grant_is_recorded(self) -> None:
        """G6: the first grant has fence 1 and attempt 1, and is on record with the holder's input."""
        action = self.action(fingerprint="f", payload="p", safety=UNSAFE)
        outcome, now = self.acquire(action), self.clock.now()
        assert isinstance(outcome, Granted)
        lease, record = outcome.lease, self.record(action)
        assert (lease.resource, lease.fence, outcome.attempt) == (action.resource, 1, 1)
        assert (record.resource, record.fence, record.attempt) == (action.resource, 1, 1)
        assert (record.fingerprint, record.payload, record.retry_safety) == ("f", "p", UNSAFE)
        assert (record.state, record.uncertain_at, record.completed_at) == (State.IN_FLIGHT, None, None)
        assert record.expires_at == lease.expires_at
        self.tick(0)
        assert record.created_at == record.granted_at == now
        assert lease.expires_at == now + timedelta(seconds=TTL)

    @pytest.mark.parametrize("name", SCENES)
    def test_resource_after(self, name: str) -> None:
        """G6, G15: in each state the resource is held or free as listed, and a free one grants the next fence."""
        scene = SCENES[name](self)
        self.resource_is("resource", held=scene.held, newest=scene.newest)

    def test_takeover_of_an_expired_lease(self) -> None:
        """G3, G6: an expired lease is taken over with a higher fence, and its key turned uncertain with it."""
        old = self.action("old")
        self.granted(old)
        self.tick()
        assert self.granted(self.action("new")).fence == len(["old", "new"])
        assert self.state(old) is State.UNCERTAIN
        assert self.store.history(old.key) == [HistoryEntry(self.clock.now(), "expired", 1, "store", "lease expired")]

    def test_takeover_leaves_a_mark(self) -> None:
        """G6, G14: a marked key holds its resource until its lease expires; taking over does not touch the mark."""
        old = self.action("old")
        self.marked(old)
        assert isinstance(self.acquire(self.action("new")), Contended)
        self.tick()
        with self.unchanged(old):
            self.granted(self.action("new"))

    def test_grant_replaces_the_input(self) -> None:
        """G6: a freed key is granted with the new action's resource, input and retry safety."""
        first = self.action(fingerprint="f", payload="p")
        self.store.abandon(first, self.granted(first), due_in_seconds=TTL)
        created_at = self.record(first).created_at
        self.tick(1)
        again = self.action(on="elsewhere", safety=UNSAFE)
        lease = self.granted(again)
        record = self.record(again)
        assert (record.resource, record.fingerprint, record.payload) == (again.resource, None, None)
        assert (record.retry_safety, record.attempt, record.fence, lease.fence) == (UNSAFE, 2, 1, 1)
        assert (record.created_at, record.granted_at) == (created_at, self.clock.now())
        self.resource_is("resource", held=False, newest=1)

    def test_fences_only_rise(self) -> None:
        """G8: no way for an effect to end lowers the next fence of its resource."""
        fences = []
        for n, call in enumerate(["complete", "abandon", "release", "mark_uncertain", "complete"] * 2):
            action = self.action(f"key {n}")
            lease = self.granted(action)
            fences.append(lease.fence)
            CALLS[call](self.store, action, lease)
            if call == "mark_uncertain":
                self.store.begin_reconcile(action, TTL)
                self.store.resolve_uncertain(action, APPLIED if n < len(CALLS) else NOT_APPLIED)
        assert fences == sorted(set(fences))

    def test_attempts_are_counted(self) -> None:
        """G22: the attempt number counts grants, through abandon and rulings."""
        action = self.action()
        self.store.abandon(action, self.granted(action))
        self.marked(action)
        self.store.resolve_uncertain(action, NOT_APPLIED)
        outcome = self.acquire(action)
        assert isinstance(outcome, Granted)
        assert outcome.attempt == self.record(action).attempt == len(["abandoned", "ruled", "now"])


class _Fingerprint(EffectStoreHarness):
    """The same key for another input."""

    @pytest.mark.parametrize("name", [name for name in SCENES if "unknown" not in name])
    def test_another_input_is_refused(self, name: str) -> None:
        """G9, G10: every call with another fingerprint is refused in every state and changes nothing."""
        self.fingerprint = "one"
        scene = SCENES[name](self)
        other = replace(scene.action, fingerprint="two")
        calls: list[Callable[[], object]] = [
            lambda: self.acquire(other, holder=scene.lease.holder),
            lambda: self.store.begin_reconcile(other, TTL),
            lambda: self.store.resolve_uncertain(other, APPLIED),
            *[lambda call=call: call(self.store, other, scene.lease) for call in CALLS.values()],
        ]
        for call in calls:
            with self.refused(FingerprintMismatch, scene.action):
                call()

    def test_the_result_is_not_shown(self) -> None:
        """G9: a refusal for another input does not carry the stored result."""
        action = self.action(fingerprint="one")
        self.store.complete(action, self.granted(action), "secret")
        with pytest.raises(FingerprintMismatch) as info:
            self.acquire(self.action(fingerprint="two"))
        assert "secret" not in str(info.value) + repr(vars(info.value))

    @pytest.mark.parametrize(("first", "second"), [("one", None), (None, "two"), (None, None), ("one", "one")])
    def test_the_check_is_skipped(self, first: str | None, second: str | None) -> None:
        """G9: equal fingerprints agree, and an action without one skips the check."""
        action = self.action(fingerprint=first)
        self.store.complete(action, self.granted(action), "result")
        assert self.acquire(self.action(fingerprint=second)) == Done("result")


class _Credentials(EffectStoreHarness):
    """The five calls that need a lease."""

    @pytest.mark.parametrize(("name", "call", "error"), _cases(BY_SCENE, accepted=False))
    def test_refused_in_state(self, name: str, call: str, error: type[FenceError]) -> None:
        """G10, G11, G13, G15, G16: a call that the state of the key forbids is refused and changes nothing."""
        scene = SCENES[name](self)
        before = self.trace(scene.action, self.action("other"))
        with pytest.raises(error) as info:
            CALLS[call](self.store, scene.action, scene.lease)
        assert info.type is error
        assert info.value.key == scene.action.key
        after = self.trace(scene.action, self.action("other"))
        assert [row[:2] for row in after] == [row[:2] for row in before]
        assert after == before or call == "complete"
        self.resource_is("resource", held=scene.held, newest=scene.newest)

    @pytest.mark.parametrize(("name", "call", "error"), _cases(BY_SCENE, accepted=True))
    def test_accepted_in_state(self, name: str, call: str, error: None) -> None:
        """G12, G13, G14, G15, G16, G26: what is accepted can be repeated, answers the same and changes nothing."""
        scene = SCENES[name](self)
        answer = CALLS[call](self.store, scene.action, scene.lease)
        if not self.capabilities.manual_clock and call == "renew":
            return
        with self.unchanged(scene.action, self.action("other")):
            assert CALLS[call](self.store, scene.action, scene.lease) == answer
        assert error is None

    @pytest.mark.parametrize(("name", "call", "error"), _cases(BY_FORGERY))
    def test_wrong_lease(self, name: str, call: str, error: type[FenceError]) -> None:
        """G10, G11: resource, fence and holder are checked in this order, and a refusal changes nothing."""
        action = self.action()
        self.store.abandon(action, self.granted(action))
        lease = self.granted(action)
        before = self.trace(action)
        with pytest.raises(error) as info:
            CALLS[call](self.store, action, FORGERIES[name](lease))
        assert info.type is error
        assert [row[:2] for row in self.trace(action)] == [row[:2] for row in before]
        self.resource_is("resource", held=True, newest=lease.fence)
        self.store.complete(action, lease)

    @pytest.mark.parametrize("call", CALLS)
    def test_lease_moved_to_a_resource_with_the_same_fence(self, call: str) -> None:
        """G11: action and lease that agree on another resource are still not the intent of this key."""
        lease = self.granted(self.action())
        self.granted(self.action("other", on="elsewhere"))
        moved = self.action(on="elsewhere")
        with pytest.raises(NotHolder):
            CALLS[call](self.store, moved, replace(lease, resource=moved.resource))
        assert self.state(moved) is State.IN_FLIGHT

    def test_stale_tells_the_fences(self) -> None:
        """G11: the refusal of an old fence names it and the newest."""
        action = self.action()
        old = self.granted(action)
        self.store.abandon(action, old)
        self.granted(action)
        with pytest.raises(FenceStale) as info:
            self.store.release(action, old)
        assert (info.value.fence, info.value.seen) == (1, 2)

    def test_complete_records(self) -> None:
        """G12: completing records result and time, and frees the resource."""
        action = self.action()
        lease = self.granted(action)
        self.tick(1)
        assert self.store.complete(action, lease, "result") == "result"
        record = self.record(action)
        assert (record.state, record.result, record.completed_at) == (State.DONE, "result", self.clock.now())
        assert self.events(action) == []
        self.resource_is("resource", held=False, newest=1)

    @pytest.mark.parametrize("forgery", FORGERIES)
    def test_done_key_returns_the_first_result_to_any_lease(self, forgery: str) -> None:
        """G12, G17: completing a done key returns the first result whatever the lease, and is no evidence."""
        action = self.action()
        lease = self.granted(action)
        self.store.complete(action, lease, "first")
        with self.unchanged(action):
            assert self.store.complete(action, FORGERIES[forgery](lease), "second") == "first"

    def test_release_after_complete(self) -> None:
        """G12: a release after the completion, by the same lease, changes nothing."""
        action = self.action()
        lease = self.granted(action)
        self.store.complete(action, lease, "result")
        with self.unchanged(action):
            self.store.release(action, lease)
        self.resource_is("resource", held=False, newest=1)

    def test_renew_extends_intent_and_resource(self) -> None:
        """G13: the new expiry is now + ttl for intent and resource; fence and holder stay."""
        action = self.action()
        lease = self.granted(action)
        self.tick(TTL / 2)
        renewed = self.store.renew(action, lease, TTL)
        assert renewed == replace(lease, expires_at=self.clock.now() + timedelta(seconds=TTL))
        self.tick(TTL / 2)
        assert self.acquire(action) == InFlight(TTL / 2)
        assert self.acquire(self.action("other")) == Contended(TTL / 2)

    def test_renew_can_shorten(self) -> None:
        """G13: the new expiry counts from now, also when the old one lay later."""
        self.tick(0)
        action = self.action()
        self.store.renew(action, self.granted(action), TTL / 2)
        assert self.acquire(action) == InFlight(TTL / 2)

    def test_renew_after_release(self) -> None:
        """G13, G15: after a release renewing extends the intent and leaves the resource free."""
        self.tick(0)
        action = self.action()
        lease = self.granted(action)
        self.store.release(action, lease)
        self.store.renew(action, lease, 2 * TTL)
        assert self.acquire(action) == InFlight(2 * TTL)
        self.resource_is("resource", held=False, newest=1)

    @pytest.mark.parametrize("name", BY_SCENE)
    def test_renew_many_agrees_with_renew(self, name: str) -> None:
        """G13: a lease in a batch is renewed exactly if it would be alone, and a lost one raises nothing."""
        scene = SCENES[name](self)
        renewable = BY_SCENE[name][list(CALLS).index("renew")] is None
        self.tick(1)
        assert self.store.renew_many([(scene.action, scene.lease)], TTL) == [
            Renewal.RENEWED if renewable else Renewal.LOST
        ]
        if renewable:
            assert self.record(scene.action).expires_at == self.clock.now() + timedelta(seconds=TTL)

    def test_renew_many_with_another_input(self) -> None:
        """G9, G13: a lease is not renewed for another input."""
        lease = self.granted(self.action(fingerprint="one"))
        assert self.store.renew_many([(self.action(fingerprint="two"), lease)], TTL) == [Renewal.LOST]

    def test_renew_many_keeps_the_order(self) -> None:
        """G13: the answers of a batch stand in the order asked, lost ones between the others."""
        actions = [self.action(f"key {n}", on=f"resource {n}") for n in (3, 1, 2)]
        pairs = [(action, self.granted(action)) for action in actions]
        self.store.abandon(*pairs[1])
        assert self.store.renew_many(pairs, TTL) == [Renewal.RENEWED, Renewal.LOST, Renewal.RENEWED]
        assert self.store.renew_many([], TTL) == []

    @pytest.mark.parametrize("forgery", FORGERIES)
    def test_renew_many_with_a_wrong_lease(self, forgery: str) -> None:
        """G11, G13: a wrong lease in a batch is lost and changes nothing."""
        action = self.action()
        lease = self.granted(action)
        with self.unchanged(action):
            assert self.store.renew_many([(action, FORGERIES[forgery](lease))], 2 * TTL) == [Renewal.LOST]

    def test_mark_is_recorded(self) -> None:
        """G14, G21: a mark keeps reason and time, and who said it."""
        action = self.action()
        lease = self.marked(action)
        now = self.clock.now()
        record = self.record(action)
        assert (record.state, record.reason, record.expired) == (State.UNCERTAIN, "timeout", False)
        [entry] = self.store.history(action.key)
        assert replace(entry, at=now) == HistoryEntry(now, "marked", lease.fence, "worker", "timeout")
        assert record.uncertain_at == entry.at

    def test_mark_keeps_the_resource_until_release(self) -> None:
        """G14: a marked key holds its resource until the release."""
        action = self.action()
        lease = self.marked(action)
        assert isinstance(self.acquire(self.action("other")), Contended)
        self.store.release(action, lease)
        self.resource_is("resource", held=False, newest=1)
        assert self.state(action) is State.UNCERTAIN

    def test_the_first_mark_stands(self) -> None:
        """G14, G26: a second mark by the same attempt succeeds and leaves the first reason."""
        action = self.action()
        lease = self.marked(action)
        with self.unchanged(action):
            self.store.mark_uncertain(action, lease, "another reason")

    def test_a_failed_mark_leaves_the_intent(self) -> None:
        """G14, G24: a reason that cannot be stored leaves the key in flight."""
        action = self.action()
        lease = self.granted(action)
        with self.refused(InvalidArgument, action):
            self.store.mark_uncertain(action, lease, "a\0b")
        assert isinstance(self.acquire(action), InFlight)

    def test_release_and_abandon_differ(self) -> None:
        """G15: a release leaves the key unacquirable, an abandon frees it."""
        released, abandoned = self.action("released", on="a"), self.action("abandoned", on="b")
        self.store.release(released, self.granted(released))
        self.store.abandon(abandoned, self.granted(abandoned))
        assert (self.state(released), self.state(abandoned)) == (State.IN_FLIGHT, State.FREE)
        assert isinstance(self.acquire(released), InFlight)
        assert isinstance(self.acquire(abandoned), Granted)

    @pytest.mark.parametrize("call", ["abandon", "mark_uncertain"])
    def test_intent_calls_leave_the_next_holder_alone(self, call: str) -> None:
        """G15: abandon and mark work after the resource has changed hands, and do not free it."""
        scene, other = SCENES["retaken"](self), self.action("other")
        with self.unchanged(other):
            CALLS[call](self.store, scene.action, scene.lease)
        self.resource_is("resource", held=True, newest=2)

    def test_abandoned_keys_become_due(self) -> None:
        """G15: an abandoned key with a payload is due after the given time, until it is granted again."""
        action = self.action(payload="p")
        self.store.abandon(action, self.granted(action), due_in_seconds=TTL)
        assert self.mine(self.store.claim_due(ALL, TTL)) == []
        self.tick()
        assert self.mine(self.store.claim_due(ALL, 2 * TTL)) == ["key"]
        self.tick()
        assert self.mine(self.store.claim_due(ALL, TTL)) == []
        self.tick()
        assert self.mine(self.store.claim_due(ALL, TTL)) == ["key"]
        self.granted(action)
        self.tick(TTL / 2)
        assert self.mine(self.store.claim_due(ALL, TTL)) == []

    @pytest.mark.parametrize(("payload", "due_in"), [(None, TTL), ("p", None), (None, None)])
    def test_what_never_becomes_due(self, payload: str | None, due_in: float | None) -> None:
        """G15: without a payload or a time an abandoned key is never due."""
        action = self.action(payload=payload)
        self.store.abandon(action, self.granted(action), due_in_seconds=due_in)
        self.tick(10 * TTL)
        assert self.mine(self.store.claim_due(ALL, TTL)) == []

    def test_due_keys_are_bounded(self) -> None:
        """G15: no more keys are handed out than asked for."""
        for name in "ab":
            action = self.action(name, on=name, payload="p")
            self.store.abandon(action, self.granted(action), due_in_seconds=TTL)
        self.tick()
        assert len(self.store.claim_due(1, TTL)) == 1


class _LateCompletion(EffectStoreHarness):
    """What a holder can still say after its lease has expired."""

    @pytest.mark.parametrize(("name", "events"), [("expired", []), ("flipped", ["expired", "completed_late"])])
    def test_late_completion_counts(self, name: str, events: list[str]) -> None:
        """G16, G21: an expired attempt that nobody superseded completes; out of uncertain this is in the history."""
        scene = SCENES[name](self)
        assert self.store.complete(scene.action, scene.lease, "late") == "late"
        record = self.record(scene.action)
        assert (record.state, record.reason, record.uncertain_at) == (State.DONE, None, None)
        assert self.events(scene.action) == events
        assert self.acquire(scene.action) == Done("late")

    def test_late_completion_after_release(self) -> None:
        """G16: an expired and released attempt completes while nobody else was granted the resource."""
        scene = SCENES["released"](self)
        self.tick()
        assert self.store.complete(scene.action, scene.lease, "late") == "late"

    def test_a_reconciler_does_not_forbid_it(self) -> None:
        """G16, G27: the claim of a reconciler is no grant; a late completion ends it."""
        scene = SCENES["reconciling"](self)
        assert self.store.complete(scene.action, scene.lease, "late") == "late"
        assert self.mine(self.store.backlog(ALL)) == []
        assert self.store.resolve_uncertain(scene.action, NOT_APPLIED) == Ruling(applied=True, result="late")

    @pytest.mark.parametrize("name", ["marked", "abandoned", "ruled not applied", "regranted", "retaken", "overtaken"])
    def test_refused_completion_is_evidence(self, name: str) -> None:
        """G17: a refused completion is kept with fence, holder, result and time; its repetition adds nothing."""
        scene, now = SCENES[name](self), self.clock.now()
        for result in ("late", "later"):
            with pytest.raises(FenceError):
                self.store.complete(scene.action, scene.lease, result)
        [kept] = self.store.evidence(scene.action.key)
        assert replace(kept, at=now) == Evidence(now, scene.lease.fence, scene.lease.holder, "late")

    def test_the_past_survives_the_next_grant(self) -> None:
        """G17, G21: history and evidence belong to the key and stay when it is granted again."""
        scene = SCENES["ruled not applied"](self)
        with pytest.raises(LeaseLost):
            self.store.complete(scene.action, scene.lease, "late")
        history, evidence = self.store.history(scene.action.key), self.store.evidence(scene.action.key)
        self.granted(scene.action)
        assert self.store.history(scene.action.key) == history
        assert self.store.evidence(scene.action.key) == evidence

    def test_evidence_per_attempt(self) -> None:
        """G17: each attempt, and each holder, has its own evidence, the oldest first."""
        action = self.action()
        first = self.granted(action)
        self.store.abandon(action, first)
        self.granted(action)
        for lease in (first, replace(first, holder=uuid4())):
            self.tick(1)
            with pytest.raises(FenceStale):
                self.store.complete(action, lease, "late")
        self.tick(1)
        with pytest.raises(FenceStale):
            self.store.complete(action, first, "late")
        kept = self.store.evidence(action.key)
        assert [entry.holder for entry in kept] == [first.holder, lease.holder]

    @pytest.mark.parametrize(("name", "error"), [("unknown", FenceStale), ("unknown, lease of another", NotHolder)])
    def test_no_evidence_for_an_unknown_key(self, name: str, error: type[FenceError]) -> None:
        """G17, G10: completing a key that was never granted leaves nothing."""
        scene = SCENES[name](self)
        with self.refused(error, scene.action):
            self.store.complete(scene.action, scene.lease, "late")


class _Reconciliation(EffectStoreHarness):
    """How an unknown outcome ends."""

    def test_one_reconciler_at_a_time(self) -> None:
        """G18: while a claim is live another reconciler is told how long it lasts."""
        action = self.action()
        self.marked(action)
        self.store.begin_reconcile(action, TTL)
        self.tick(TTL / 4)
        with self.refused(ReconcileTaken, action) as info:
            self.store.begin_reconcile(action, TTL)
        assert vars(info.value)["retry_after_seconds"] == TTL * 3 / 4

    def test_claim_describes_itself(self) -> None:
        """G18: the claim names key, resource, holder and expiry."""
        action, holder = self.action(), uuid4()
        self.flipped(action)
        claim = self.store.begin_reconcile(action, 2 * TTL, holder=holder)
        assert (claim.key, claim.resource, claim.holder) == (action.key, action.resource, holder)
        assert claim.expires_at == self.clock.now() + timedelta(seconds=2 * TTL)

    def test_same_reconciler_gets_the_same_claim(self) -> None:
        """G18, G26: the question repeated by its holder gets the same claim."""
        action, holder = self.action(), uuid4()
        self.marked(action)
        claim = self.store.begin_reconcile(action, TTL, holder=holder)
        assert self.store.begin_reconcile(action, TTL, holder=holder) == claim

    def test_expired_claim_can_be_taken(self) -> None:
        """G18, G23: a claim ends at its expiry and not before."""
        action = self.action()
        self.marked(action)
        first = self.store.begin_reconcile(action, TTL)
        self.tick(TTL - 1)
        with pytest.raises(ReconcileTaken):
            self.store.begin_reconcile(action, TTL)
        self.tick(1)
        assert self.store.begin_reconcile(action, TTL).fence > first.fence

    def test_expired_intent_is_flipped_first(self) -> None:
        """G18, G3: a reconciler can begin with an intent that nobody has found expired yet."""
        scene = SCENES["expired"](self)
        self.store.begin_reconcile(scene.action, TTL)
        assert self.state(scene.action) is State.UNCERTAIN
        assert self.events(scene.action) == ["expired"]

    @pytest.mark.parametrize(
        ("name", "state"),
        [
            ("unknown", None),
            ("abandoned", "free"),
            ("ruled not applied", "free"),
            ("live", "in_flight"),
            ("released", "in_flight"),
            ("done", "done"),
            ("ruled applied", "done"),
        ],
    )
    def test_nothing_to_reconcile(self, name: str, state: str | None) -> None:
        """G18, G10: a key that is not uncertain cannot be claimed; the refusal names its state."""
        scene = SCENES[name](self)
        with self.refused(NotUncertain, scene.action) as info:
            self.store.begin_reconcile(scene.action, TTL)
        assert vars(info.value)["state"] == state
        self.resource_is("resource", held=scene.held, newest=scene.newest)

    def test_claim_fence_lies_above_the_attempt(self) -> None:
        """G27: the fence to seal with is above the uncertain attempt's, and later grants are above it."""
        action = self.action()
        lease = self.marked(action)
        claim = self.store.begin_reconcile(action, TTL)
        assert claim.fence == lease.fence + 1
        self.store.release(action, lease)
        assert self.granted(self.action("other")).fence == claim.fence + 1

    @pytest.mark.parametrize("name", ["retaken", "overtaken"])
    def test_claim_does_not_disturb_a_live_holder(self, name: str) -> None:
        """G27: while another key holds the resource the claim has that holder's fence, and mints none."""
        scene, other = SCENES[name](self), self.action("other")
        lease = self.leases[other.key]
        if self.state(scene.action) is State.IN_FLIGHT:
            self.store.mark_uncertain(scene.action, scene.lease, "timeout")
        assert self.store.begin_reconcile(scene.action, TTL).fence == lease.fence
        self.store.complete(other, lease)
        self.resource_is("resource", held=False, newest=lease.fence)

    def test_claim_leaves_a_marked_holder_its_fence(self) -> None:
        """G27: a marked key still holds its resource, also against the higher fence of its own reconciler."""
        scene, holder = SCENES["overtaken"](self), self.action("other")
        lease = self.leases[holder.key]
        self.store.mark_uncertain(holder, lease, "timeout")
        assert self.store.begin_reconcile(holder, TTL).fence == lease.fence + 1
        assert self.store.begin_reconcile(scene.action, TTL).fence == lease.fence

    @pytest.mark.parametrize("name", ["marked", "flipped", "expired", "overtaken", "reconciling"])
    @pytest.mark.parametrize(
        ("resolution", "state"), [(APPLIED, State.DONE), (NOT_APPLIED, State.FREE)], ids=["applied", "not applied"]
    )
    def test_first_ruling_wins(self, name: str, resolution: Resolution, state: State) -> None:
        """G19, G20, G26: a ruling needs no claim; the first stands, and later ones return it unchanged."""
        scene = SCENES[name](self)
        ruling = Ruling(resolution.applied, resolution.result)
        assert self.store.resolve_uncertain(scene.action, resolution) == ruling
        assert self.state(scene.action) is state
        with self.unchanged(scene.action):
            for later in (resolution, APPLIED, NOT_APPLIED, FORCED):
                assert self.store.resolve_uncertain(scene.action, later) == ruling

    def test_completion_counts_as_a_ruling(self) -> None:
        """G19: ruling on a done key returns *applied* with its result."""
        scene = SCENES["done"](self)
        with self.unchanged(scene.action):
            assert self.store.resolve_uncertain(scene.action, NOT_APPLIED) == Ruling(applied=True, result="first")

    @pytest.mark.parametrize(
        ("name", "state"), [("unknown", None), ("abandoned", "free"), ("live", "in_flight"), ("released", "in_flight")]
    )
    def test_nothing_to_rule_on(self, name: str, state: str | None) -> None:
        """G19, G10: a live intent, or a key that was never in doubt, is not ruled on."""
        scene = SCENES[name](self)
        for resolution in (APPLIED, NOT_APPLIED, FORCED):
            with self.refused(NotUncertain, scene.action) as info:
                self.store.resolve_uncertain(scene.action, resolution)
            assert vars(info.value)["state"] == state

    def test_a_ruling_ends_with_the_next_grant(self) -> None:
        """G19: after a new grant the ruling on the attempt before is no longer the answer."""
        scene = SCENES["ruled not applied"](self)
        lease = self.granted(scene.action)
        with pytest.raises(NotUncertain):
            self.store.resolve_uncertain(scene.action, NOT_APPLIED)
        self.store.abandon(scene.action, lease)
        with pytest.raises(NotUncertain):
            self.store.resolve_uncertain(scene.action, NOT_APPLIED)

    def test_a_ruling_ends_the_claim(self) -> None:
        """G19: a ruling by anybody clears the claim, so that a later doubt can be claimed at once."""
        scene = SCENES["reconciling"](self)
        self.store.resolve_uncertain(scene.action, NOT_APPLIED)
        self.marked(scene.action)
        assert self.mine(self.store.unclaimed_backlog(ALL)) == ["key"]
        self.store.begin_reconcile(scene.action, TTL)

    def test_applied_is_done(self) -> None:
        """G20: *applied* ends in done with the ruling's result and time."""
        scene = SCENES["marked"](self)
        self.tick(1)
        self.store.resolve_uncertain(scene.action, APPLIED)
        record = self.record(scene.action)
        assert (record.result, record.completed_at, record.uncertain_at) == ("ruled", self.clock.now(), None)
        assert self.acquire(scene.action) == Done("ruled")

    def test_not_applied_is_free(self) -> None:
        """G20: *not applied* frees a SAFE key, and its resource with it."""
        scene = SCENES["marked"](self)
        self.store.resolve_uncertain(scene.action, NOT_APPLIED)
        record = self.record(scene.action)
        assert (record.reason, record.uncertain_at, record.completed_at) == (None, None, None)
        assert self.granted(scene.action).fence == scene.lease.fence + 1

    @pytest.mark.parametrize(("payload", "due"), [("p", ["key"]), (None, [])])
    def test_not_applied_is_due(self, payload: str | None, due: list[str]) -> None:
        """G20: *not applied* makes a key with a payload due at once."""
        action = self.action(payload=payload)
        self.marked(action)
        self.store.resolve_uncertain(action, NOT_APPLIED)
        assert self.mine(self.store.claim_due(ALL, TTL)) == due

    def test_unsafe_is_not_freed(self) -> None:
        """G20, G10: *not applied* on an UNSAFE action is refused, and the key stays uncertain."""
        action = self.action(safety=UNSAFE)
        self.marked(action)
        with self.refused(UnsafeNotRetryable, action):
            self.store.resolve_uncertain(action, NOT_APPLIED)
        assert self.state(action) is State.UNCERTAIN

    def test_unsafe_can_be_applied(self) -> None:
        """G20: *applied* needs no force."""
        action = self.action(safety=UNSAFE)
        self.marked(action)
        assert self.store.resolve_uncertain(action, APPLIED) == Ruling(applied=True, result="ruled")

    def test_force_frees_unsafe(self) -> None:
        """G20, G21: ``force_retryable`` frees an UNSAFE key, which is in the history with who and why."""
        action = self.action(safety=UNSAFE)
        self.marked(action)
        assert self.store.resolve_uncertain(action, FORCED) == Ruling(applied=False, result=None)
        _, ruled, forced = self.store.history(action.key)
        assert (ruled.event, forced.event) == ("ruled_not_applied", "forced")
        assert (forced.by, forced.why, forced.fence) == ("ann", "my word", 1)
        self.granted(action)

    def test_retry_safety_is_that_of_the_grant(self) -> None:
        """G20: the ruling goes by the retry safety recorded at the grant, not by the one named when ruling."""
        self.marked(self.action(safety=UNSAFE))
        with self.refused(UnsafeNotRetryable, self.action()):
            self.store.resolve_uncertain(self.action(safety=RetrySafety.SAFE), NOT_APPLIED)

    def test_refused_ruling_still_flips(self) -> None:
        """G3, G20: an intent found expired by a ruling that is refused stays uncertain."""
        action = self.action(safety=UNSAFE)
        self.granted(action)
        self.tick()
        with pytest.raises(UnsafeNotRetryable):
            self.store.resolve_uncertain(action, NOT_APPLIED)
        assert self.state(action) is State.UNCERTAIN
        assert self.events(action) == ["expired"]

    @pytest.mark.parametrize(
        ("name", "resolution", "events"),
        [
            ("marked", APPLIED, ["marked", "ruled_applied"]),
            ("marked", NOT_APPLIED, ["marked", "ruled_not_applied"]),
            ("marked", FORCED, ["marked", "ruled_not_applied"]),
            ("expired", APPLIED, ["expired", "ruled_applied"]),
            ("overtaken", NOT_APPLIED, ["expired", "ruled_not_applied"]),
        ],
    )
    def test_history(self, name: str, resolution: Resolution, events: list[str]) -> None:
        """G21: mark, expiry and ruling are in the history with fence, who, when and why."""
        scene = SCENES[name](self)
        self.tick(1)
        self.store.resolve_uncertain(scene.action, resolution)
        assert self.events(scene.action) == events
        ruled = HistoryEntry(self.clock.now(), events[-1], scene.lease.fence, resolution.by, resolution.why)
        assert self.store.history(scene.action.key)[-1] == ruled

    def test_backlog_is_oldest_first(self) -> None:
        """G18: the backlog lists uncertain keys, the oldest first, and no others."""
        for name in ("c", "a", "b"):
            self.marked(self.action(name, on=name))
            self.tick(1)
        self.granted(self.action("live", on="live"))
        assert self.mine(self.store.backlog(ALL)) == ["c", "a", "b"]
        assert len(self.store.backlog(2)) == len(self.store.unclaimed_backlog(2)) == len("ab")

    def test_backlog_shows_the_record(self) -> None:
        """G18: an entry of the backlog is the key's record."""
        action = self.action(payload="p", fingerprint="f")
        self.marked(action)
        assert self.record(action) in self.store.backlog(ALL)
        assert self.record(action) in self.store.unclaimed_backlog(ALL)

    def test_unclaimed_backlog(self) -> None:
        """G18: a claimed key is left out of the unclaimed backlog until the claim expires."""
        self.marked(self.action())
        self.store.begin_reconcile(self.action(), TTL)
        assert self.mine(self.store.backlog(ALL)) == ["key"]
        assert self.mine(self.store.unclaimed_backlog(ALL)) == []
        self.tick()
        assert self.mine(self.store.unclaimed_backlog(ALL)) == ["key"]


class _TimeAndLimits(EffectStoreHarness):
    """When a lease ends, and which arguments are refused."""

    def test_live_until_just_before_expiry(self) -> None:
        """G23: a lease is live while now < expiry."""
        action = self.action()
        self.granted(action)
        self.tick(TTL - 0.001)
        assert isinstance(self.acquire(action), InFlight)
        assert isinstance(self.acquire(self.action("other")), Contended)

    def test_expired_at_expiry(self) -> None:
        """G23: at the moment of expiry key and resource are no longer held."""
        action = self.action()
        self.granted(action)
        self.tick(TTL)
        assert isinstance(self.acquire(self.action("other")), Granted)
        assert isinstance(self.acquire(action), Uncertain)

    @pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf"), 1e12, True, "60", None])
    def test_ttl(self, ttl: Any) -> None:
        """G24, G10: a ttl out of its limits is refused by every call that takes one, and changes nothing."""
        action = self.action()
        lease = self.granted(action)
        calls: list[Callable[[], object]] = [
            lambda: self.store.acquire(self.action("other", on="other"), ttl),
            lambda: self.store.renew(action, lease, ttl),
            lambda: self.store.renew_many([(action, lease)], ttl),
            lambda: self.store.begin_reconcile(action, ttl),
            lambda: self.store.claim_due(1, ttl),
        ]
        for call in calls:
            with self.refused(InvalidArgument, action, self.action("other")):
                call()
        if ttl is not None:
            with self.refused(InvalidArgument, action):
                self.store.abandon(action, lease, due_in_seconds=ttl)

    @pytest.mark.parametrize("limit", [0, -1, 100_001, True, 1.0, None])
    def test_limits(self, limit: Any) -> None:
        """G24: a batch size out of its limits is refused."""
        calls: list[Callable[[], object]] = [
            lambda: self.store.expire_intents(limit),
            lambda: self.store.backlog(limit),
            lambda: self.store.unclaimed_backlog(limit),
            lambda: self.store.claim_due(limit, TTL),
        ]
        for call in calls:
            with pytest.raises(InvalidArgument):
                call()

    @pytest.mark.parametrize("key", ["", "x" * 513, "ä" * 257, "a\0b", "\ud800", 1, None])
    def test_keys(self, key: Any) -> None:
        """G24: a key or resource that cannot be stored is refused."""
        calls: list[Callable[[], object]] = [
            lambda: Action(key, "resource"),
            lambda: Action("key", key),
            lambda: self.store.lookup(key),
            lambda: self.store.history(key),
            lambda: self.store.evidence(key),
        ]
        for call in calls:
            with pytest.raises(InvalidArgument):
                call()

    @pytest.mark.parametrize("name", ["x" * 479, "ä" * 239, "'; --%s%%", "\n\t\\"])
    def test_odd_names(self, name: str) -> None:
        """G24: names up to 512 bytes are kept as they are, whatever they contain."""
        action = self.action(name, on=name)
        self.store.complete(action, self.granted(action), name)
        assert (self.record(action).key, self.record(action).resource) == (action.key, action.resource)

    @pytest.mark.parametrize("text", ["a\0b", "\ud800", 1, b"bytes"])
    def test_text_that_cannot_be_stored(self, text: Any) -> None:
        """G24: a result that cannot be stored is refused, and leaves the intent for a completion with a marker."""
        action = self.action()
        lease = self.granted(action)
        with self.refused(InvalidArgument, action):
            self.store.complete(action, lease, text)
        with self.refused(InvalidArgument, action):
            self.store.mark_uncertain(action, lease, text)
        with self.refused(InvalidArgument, action):
            self.store.mark_uncertain(action, lease, "reason", by=text)
        assert self.store.complete(action, lease, "marker") == "marker"

    def test_ruled_result_that_cannot_be_stored(self) -> None:
        """G24, G10: a ruling whose result cannot be stored is refused and leaves the key uncertain."""
        action = self.action()
        self.marked(action)
        with self.refused(InvalidArgument, action):
            self.store.resolve_uncertain(action, Resolution(applied=True, result="a\0b"))

    def test_unknown_key(self) -> None:
        """G10: looking at a key that was never granted finds nothing and leaves nothing."""
        key = self.named("never")
        assert self.store.history(key) == []
        assert self.store.evidence(key) == []
        assert self.store.lookup(key) is None


class EffectStoreConformance(
    _Acquire, _Fingerprint, _Credentials, _LateCompletion, _Reconciliation, _TimeAndLimits, EffectStoreRaces
):
    """Every guarantee of `EffectStore`. Subclass it as ``Test…`` and override `make_store`."""
