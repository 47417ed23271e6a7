"""How a doubt ends: by a late completion, or by a ruling."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest

from pgref.conformance.harness import ALL, APPLIED, NOT_APPLIED, SCENES, TTL, EffectStoreHarness
from pgref.contracts.effects import Done, Evidence, HistoryEntry, Resolution, RetrySafety, Ruling, State
from pgref.errors import FenceError, FenceStale, LeaseLost, NotHolder, NotUncertain, ReconcileTaken, UnsafeNotRetryable

__all__ = ["LateCompletions", "Reconciliation"]

UNSAFE = RetrySafety.UNSAFE
FORCED = Resolution(applied=False, by="ann", why="my word", force_retryable=True)


class LateCompletions(EffectStoreHarness):
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


class Reconciliation(EffectStoreHarness):
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
        self.store.begin_reconcile(scene.action, TTL)

    def test_applied_is_done(self) -> None:
        """G20: *applied* ends in done with the ruling's result and time."""
        scene = SCENES["marked"](self)
        self.tick(1)
        self.store.resolve_uncertain(scene.action, APPLIED)
        record = self.record(scene.action)
        assert (record.result, record.completed_at, record.uncertain_at) == ("ruled", self.clock.now(), None)
        assert self.acquire(scene.action) == Done("ruled")

    @pytest.mark.parametrize("resolution", [APPLIED, NOT_APPLIED], ids=["applied", "not applied"])
    def test_a_ruling_ends_what_expiry_began(self, resolution: Resolution) -> None:
        """G20: the record of a key that has left uncertain no longer says that it expired into it."""
        scene = SCENES["flipped"](self)
        self.store.resolve_uncertain(scene.action, resolution)
        assert not self.record(scene.action).expired

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

    def test_a_ruling_by_claim_holds_for_what_was_claimed(self) -> None:
        """G18, G19: a reconciler that looked too slowly does not free the attempt that came after its claim."""
        action = self.action()
        self.marked(action)
        slow = self.store.begin_reconcile(action, TTL)
        self.tick()
        quick = self.store.begin_reconcile(action, TTL)
        with pytest.raises(ReconcileTaken):
            self.store.resolve_uncertain(action, NOT_APPLIED, claim=slow)
        assert not self.store.resolve_uncertain(action, NOT_APPLIED, claim=quick).applied
        self.marked(action)
        for claim in (slow, quick):
            with pytest.raises(ReconcileTaken):
                self.store.resolve_uncertain(action, NOT_APPLIED, claim=claim)
        assert self.state(action) is State.UNCERTAIN
        assert self.store.resolve_uncertain(action, APPLIED).applied

    def test_a_claim_that_expired_untaken_still_rules(self) -> None:
        """G18: nobody else has looked since."""
        action = self.action()
        self.marked(action)
        claim = self.store.begin_reconcile(action, TTL)
        self.tick()
        assert not self.store.resolve_uncertain(action, NOT_APPLIED, claim=claim).applied
