"""What is done to the store as a whole: old keys are removed (G25), and all fences raised after a failover (G28)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pgref.conformance.harness import APPLIED, NOT_APPLIED, SCENES, TTL, EffectStoreHarness
from pgref.contracts.effects import Action, Contended, Evidence, Granted, HistoryEntry, Uncertain
from pgref.errors import FenceError, InvalidArgument, LeaseLost, NotUncertain

__all__ = ["Upkeep"]

DAY = 24 * 3600.0
FLOOR = 1000
IN_FLIGHT = ("live", "released", "expired", "regranted")
OF_ANOTHER = ("retaken", "overtaken", "unknown, lease of another", "released, lease of another")
DONE = ("done", "ruled applied")
alone = pytest.mark.usefixtures("empty_store")


class _Retention(EffectStoreHarness):
    """`retain` removes keys that have been done for long."""

    def done(self, name: str = "key", *, on: str = "resource") -> Action:
        """Return an action that is done."""
        action = self.action(name, on=on)
        self.store.complete(action, self.granted(action), "result")
        return action

    @alone
    @pytest.mark.parametrize("name", DONE)
    def test_old_done_keys_go(self, name: str) -> None:
        """G25: a key that has been done for longer than asked is removed with all that is known of it."""
        scene = SCENES[name](self)
        self.tick(DAY)
        assert self.store.retain(TTL, 10) == 1
        assert self.trace(scene.action) == [(None, [], [])]
        assert self.store.retain(TTL, 10) == 0

    @alone
    def test_history_and_evidence_go_with_the_key(self) -> None:
        """G25, G17, G21: nothing of a removed key comes back when it is granted again; that of others stays."""
        gone, kept = self.action("gone", on="a"), self.action("kept", on="b")
        for action in (gone, kept):
            lease = self.marked(action)
            with pytest.raises(LeaseLost):
                self.store.complete(action, lease, "late")
        self.store.resolve_uncertain(gone, APPLIED)
        self.tick(DAY)
        with self.unchanged(kept):
            assert self.store.retain(TTL, 10) == 1
        self.granted(gone)
        assert (self.store.history(gone.key), self.store.evidence(gone.key)) == ([], [])

    @alone
    @pytest.mark.parametrize("name", [name for name in SCENES if name not in DONE])
    def test_what_is_not_done_stays(self, name: str) -> None:
        """G25: keys in flight, uncertain or free are never removed, however old."""
        scene = SCENES[name](self)
        self.tick(DAY)
        with self.unchanged(scene.action, self.action("other")):
            assert self.store.retain(TTL, 10) == 0

    @alone
    @pytest.mark.parametrize("until_completed", [0, 1, -1])
    def test_the_horizon(self, until_completed: float) -> None:
        """G25, G23: a key granted or done exactly so long ago stays, one a moment longer goes."""
        action = self.action()
        lease = self.granted(action)
        self.tick(until_completed)
        self.store.complete(action, lease)
        self.tick(TTL + max(0, -until_completed))
        with self.unchanged(action):
            assert self.store.retain(TTL, 10) == 0
        self.tick(0.001)
        assert self.store.retain(TTL, 10) == 1

    @alone
    @pytest.mark.parametrize(("until_completed", "until_now"), [(DAY, TTL / 2), (-DAY, DAY + TTL / 2)])
    def test_the_later_of_grant_and_completion_counts(self, until_completed: float, until_now: float) -> None:
        """G25: the horizon is that of grant and completion, whichever the clock put later."""
        action = self.action()
        lease = self.granted(action, ttl=2 * DAY)
        self.tick(until_completed)
        self.store.complete(action, lease)
        self.tick(until_now)
        with self.unchanged(action):
            assert self.store.retain(TTL, 10) == 0

    @alone
    def test_retention_is_bounded(self) -> None:
        """G25: no more keys go than asked for, the oldest first, and how many went is told."""
        actions = []
        for name in ("c", "a", "b"):
            actions.append(self.done(name, on=name))
            self.tick(1)
        self.tick(DAY)
        assert self.store.retain(TTL, 2) == 2
        assert [self.store.lookup(action.key) is None for action in actions] == [True, True, False]
        assert self.store.retain(TTL, 2) == 1

    @alone
    def test_a_removed_key_is_new(self) -> None:
        """G25, G22: a removed key is granted as if it had never been, to any input, with attempt 1."""
        action = self.action(fingerprint="one")
        self.store.complete(action, self.granted(action), "first")
        self.tick(DAY)
        self.store.retain(TTL, 10)
        with pytest.raises(NotUncertain) as info:
            self.store.resolve_uncertain(action, NOT_APPLIED)
        assert info.value.state is None
        outcome = self.acquire(self.action(fingerprint="two"))
        assert isinstance(outcome, Granted)
        assert outcome.attempt == 1
        assert self.record(action).created_at == self.clock.now()

    @alone
    def test_fences_go_on_rising(self) -> None:
        """G8, G25: the fence of a resource outlives the keys that it was granted to."""
        first = self.granted(self.action())
        self.store.complete(self.action(), first)
        self.done("other")
        self.tick(DAY)
        assert self.store.retain(TTL, 10) == 2
        assert self.granted(self.action()).fence == 3

    @alone
    def test_the_lease_of_a_removed_key(self) -> None:
        """G10, G11, G25: the lease of a removed key entitles to nothing, neither before nor after its next grant."""
        action = self.action()
        old = self.granted(action)
        self.store.complete(action, old, "first")
        self.tick(DAY)
        self.store.retain(TTL, 10)
        for regranted in (False, True):
            if regranted:
                self.granted(action)
            before = self.trace(action)[0][:2]
            with pytest.raises(FenceError):
                self.store.complete(action, old, "late")
            assert self.trace(action)[0][:2] == before

    @alone
    def test_retention_leaves_the_holder_alone(self) -> None:
        """G25: removing an earlier key does not free the resource for which another holds a lease."""
        self.done()
        self.tick(DAY)
        lease = self.granted(self.action("holder"))
        assert self.store.retain(TTL, 10) == 1
        assert isinstance(self.acquire(self.action()), Contended)
        self.store.complete(self.action("holder"), lease)

    @alone
    @pytest.mark.parametrize("older_than", [0, -1, float("nan"), True, None])
    def test_retention_with_a_wrong_age(self, older_than: Any) -> None:
        """G24, G25: an age out of its limits is refused and removes nothing."""
        action = self.done()
        self.tick(DAY)
        with self.refused(InvalidArgument, action):
            self.store.retain(older_than, 10)


class _RaisedFences(EffectStoreHarness):
    """`raise_fences`, after commits may have been lost."""

    def raised(self, floor: int = FLOOR) -> int:
        """Raise all fences as the operator would."""
        return self.store.raise_fences(floor, by="ann", why="failover")

    @alone
    @pytest.mark.parametrize("name", IN_FLIGHT)
    def test_intents_become_uncertain(self, name: str) -> None:
        """G28, G21: an intent in flight, even one found expired just now, becomes uncertain, with who and why."""
        scene = SCENES[name](self)
        self.tick(1)
        assert self.raised() == 1
        assert self.acquire(scene.action) == Uncertain("fences raised", self.clock.now())
        assert not self.record(scene.action).expired
        fence = self.record(scene.action).fence
        assert self.store.history(scene.action.key) == [
            HistoryEntry(self.clock.now(), "fences_raised", fence, "ann", "failover")
        ]

    @alone
    @pytest.mark.parametrize("name", ["live", "expired"])
    def test_a_completion_comes_too_late(self, name: str) -> None:
        """G28, G16, G17: what was in flight can no longer complete by itself; its result is kept as evidence."""
        scene = SCENES[name](self)
        self.raised()
        with pytest.raises(LeaseLost):
            self.store.complete(scene.action, scene.lease, "late")
        kept = Evidence(self.clock.now(), scene.lease.fence, scene.lease.holder, "late")
        assert [replace(entry, at=kept.at) for entry in self.store.evidence(scene.action.key)] == [kept]
        with pytest.raises(LeaseLost):
            self.store.renew(scene.action, scene.lease, TTL)
        with pytest.raises(LeaseLost):
            self.store.abandon(scene.action, scene.lease)

    @alone
    @pytest.mark.parametrize("name", [name for name in SCENES if name not in {*IN_FLIGHT, *OF_ANOTHER}])
    def test_what_is_not_in_flight_stays(self, name: str) -> None:
        """G28: keys that are done, uncertain, free or unknown are left as they are."""
        scene = SCENES[name](self)
        with self.unchanged(scene.action):
            assert self.raised() == 0

    @alone
    def test_later_grants_are_above_the_floor(self) -> None:
        """G28, G8: on resources known and never seen, one by one or many at once, grants start above the floor."""
        known = self.action("known", on="known")
        self.store.complete(known, self.granted(known))
        self.raised()
        assert self.granted(self.action("a", on="known")).fence == FLOOR + 1
        assert self.granted(self.action("b", on="new")).fence == FLOOR + 1
        self.raised(2 * FLOOR)
        many = [self.action("c", on="other"), self.action("d", on="third")]
        grants = [outcome for outcome in self.store.acquire_many(many, TTL) if isinstance(outcome, Granted)]
        assert [grant.lease.fence for grant in grants] == [2 * FLOOR + 1] * 2

    @alone
    def test_a_fence_above_the_floor_goes_on(self) -> None:
        """G28, G8: the next fence of a resource that is above the floor already is the next."""
        for n in range(3):
            action = self.action(f"key {n}")
            self.store.complete(action, self.granted(action))
        self.raised(2)
        assert self.granted(self.action("known")).fence == 4
        assert self.granted(self.action("new", on="new")).fence == 3

    @alone
    @pytest.mark.parametrize("floor", [1, FLOOR - 1, FLOOR])
    def test_a_lower_floor_changes_nothing(self, floor: int) -> None:
        """G28, G26: the highest floor stands, and raising to it once more changes nothing."""
        action = self.action()
        self.granted(action)
        self.raised()
        with self.unchanged(action):
            assert self.raised(floor) == 0
        assert self.granted(self.action("new", on="new")).fence == FLOOR + 1

    @alone
    def test_every_intent_is_counted(self) -> None:
        """G28: how many intents were turned is told; a fresh store has none."""
        assert self.raised() == 0
        for name in "abc":
            self.granted(self.action(name, on=name))
        self.marked(self.action("marked", on="marked"))
        assert self.raised(2 * FLOOR) == 3
        assert sorted(self.mine(self.store.backlog(10))) == ["a", "b", "c", "marked"]

    @alone
    def test_the_resource_stays_held(self) -> None:
        """G28, G14: a turned intent holds its resource until it is released, and the next grant is above the floor."""
        action = self.action()
        lease = self.granted(action)
        self.raised()
        assert isinstance(self.acquire(self.action("other")), Contended)
        self.store.release(action, lease)
        assert self.granted(self.action("other")).fence == FLOOR + 1

    @alone
    @pytest.mark.parametrize("name", ["live", "marked", "flipped", "expired"])
    def test_claims_are_above_the_floor(self, name: str) -> None:
        """G27, G28: a reconciler that begins afterwards gets a fence above the floor, and later grants are above it."""
        scene = SCENES[name](self)
        self.raised()
        claim = self.store.begin_reconcile(scene.action, TTL)
        assert claim.fence == FLOOR + 1
        self.store.resolve_uncertain(scene.action, NOT_APPLIED)
        assert self.granted(scene.action).fence == FLOOR + 2

    @alone
    @pytest.mark.parametrize("name", ["retaken", "overtaken"])
    def test_claims_do_not_spare_a_holder_from_before(self, name: str) -> None:
        """G27, G28: the fence of a holder from before is not handed out any more, since it can have been lost."""
        scene = SCENES[name](self)
        self.raised()
        assert isinstance(self.acquire(self.action("third")), Contended)
        assert self.store.begin_reconcile(scene.action, TTL).fence == FLOOR + 1

    @alone
    def test_claims_spare_a_holder_from_after(self) -> None:
        """G27, G28: a holder that was granted above the floor is not disturbed."""
        scene = SCENES["released"](self)
        self.raised()
        lease = self.granted(self.action("other"))
        assert self.store.begin_reconcile(scene.action, TTL).fence == lease.fence

    @alone
    def test_grants_from_after_are_trusted(self) -> None:
        """G28: what is granted afterwards completes and expires as ever."""
        self.raised()
        action, late = self.action("a", on="a"), self.action("b", on="b")
        self.store.complete(action, self.granted(action), "result")
        lease = self.granted(late)
        self.tick()
        assert isinstance(self.acquire(late), Uncertain)
        assert self.store.complete(late, lease, "late") == "late"

    @alone
    @pytest.mark.parametrize("floor", [0, -1, 2**63, True, 1.0, "1", None])
    def test_a_floor_that_is_none(self, floor: Any) -> None:
        """G24, G28: a floor that cannot be a fence is refused, and turns nothing."""
        action = self.action()
        self.granted(action)
        with self.refused(InvalidArgument, action):
            self.store.raise_fences(floor)

    @alone
    @pytest.mark.parametrize("text", ["a\0b", "\ud800", None])
    def test_raised_for_a_reason_that_cannot_be_stored(self, text: Any) -> None:
        """G24, G28: who and why must be texts that can be kept."""
        action = self.action()
        self.granted(action)
        for said in ({"by": text}, {"why": text}):
            with self.refused(InvalidArgument, action):
                self.store.raise_fences(FLOOR, **said)


class Upkeep(_Retention, _RaisedFences):
    """`retain` and `raise_fences`."""
