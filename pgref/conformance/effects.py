"""The suite of the effect store: semantics.md, section 1, one claim a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest

from pgref.conformance.backlog import Backlog
from pgref.conformance.batches import Batches
from pgref.conformance.credentials import CALLS, Credentials
from pgref.conformance.harness import ALL, APPLIED, NOT_APPLIED, SCENES, TTL, EffectStoreHarness
from pgref.conformance.limits import Limits
from pgref.conformance.races import EffectStoreRaces
from pgref.conformance.reconciliation import LateCompletions, Reconciliation
from pgref.conformance.upkeep import Upkeep
from pgref.contracts.effects import Contended, Done, Granted, HistoryEntry, InFlight, RetrySafety, State, Uncertain
from pgref.errors import FingerprintMismatch

__all__ = ["EffectStoreConformance"]

UNSAFE = RetrySafety.UNSAFE


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


class EffectStoreConformance(
    _Acquire,
    _Fingerprint,
    Credentials,
    LateCompletions,
    Reconciliation,
    Backlog,
    Limits,
    Batches,
    Upkeep,
    EffectStoreRaces,
):
    """Every guarantee of `EffectStore`. Subclass it as ``Test…`` and override `make_store`."""
