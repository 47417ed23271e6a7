"""The backlog of uncertain keys: claimed in batches, put off, parked, listed and counted (G18, G21, G27)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from pgref.conformance.harness import ALL, APPLIED, NOT_APPLIED, SCENES, TTL, EffectStoreHarness
from pgref.contracts.effects import Action, HistoryEntry, Kind, ReconcileClaim, Renewal, State, Tally
from pgref.errors import InvalidArgument, NotUncertain, ReconcileDeferred, ReconcileTaken

__all__ = ["Backlog"]

alone = pytest.mark.usefixtures("empty_store")
UNCERTAIN = ("marked", "flipped", "reconciling")


class _Claiming(EffectStoreHarness):
    """`claim_backlog` hands out what `begin_reconcile` would, in batches."""

    def claimed(self, limit: int = ALL) -> list[str]:
        """Claim what can be claimed and return the keys in order of name."""
        return sorted(self.mine([record for record, _ in self.store.claim_backlog(limit, TTL)]))

    def in_doubt(self, *names: str) -> list[Action]:
        """Return actions that are uncertain, each on its own resource and a second older than the next."""
        actions = []
        for name in names:
            actions.append(self.action(name, on=name))
            self.marked(actions[-1])
            self.tick(1)
        return actions

    @alone
    @pytest.mark.parametrize("name", SCENES)
    def test_what_is_claimed(self, name: str) -> None:
        """G18: of all keys the uncertain ones that nobody looks into are claimed; an expired intent is not yet one."""
        scene = SCENES[name](self)
        expected = ["key"] if self.store.lookup(scene.action.key) in self.store.backlog(ALL) else []
        assert self.claimed() == (expected if name != "reconciling" else [])

    @alone
    def test_a_claim_from_the_backlog_is_a_claim(self) -> None:
        """G18, G19: it shuts out others, ends like any other, and rules."""
        [action] = self.in_doubt("key")
        holder = uuid4()
        [(record, claim)] = self.store.claim_backlog(1, TTL, holder=holder)
        assert record == self.record(action)
        assert (claim.key, claim.resource, claim.holder) == (action.key, action.resource, holder)
        assert claim.expires_at == self.clock.now() + timedelta(seconds=TTL)
        assert (record.looks, record.next_look_at) == (1, claim.expires_at)
        assert self.store.begin_reconcile(action, TTL, holder=holder) == claim
        with self.refused(ReconcileTaken, action):
            self.store.begin_reconcile(action, TTL)
        assert self.claimed() == []
        assert self.store.resolve_uncertain(action, NOT_APPLIED, claim=claim).applied is False

    @alone
    def test_an_expired_claim_is_claimed_again(self) -> None:
        """G18, G23: after its expiry, and not before."""
        self.in_doubt("key")
        [(_, first)] = self.store.claim_backlog(1, TTL)
        self.tick(TTL - 0.001)
        assert self.claimed() == []
        self.tick(0.001)
        [(record, second)] = self.store.claim_backlog(1, TTL)
        assert second.fence > first.fence
        assert record.looks == 2

    @alone
    def test_who_has_waited_longest_is_claimed_first(self) -> None:
        """G18: what was looked at comes after what nobody has looked at since, however old it is."""
        a, _, c = self.in_doubt("a", "b", "c")
        self.store.begin_reconcile(a, TTL)
        self.tick(1)
        self.store.begin_reconcile(c, TTL)
        self.tick()
        assert [self.claimed(1) for _ in range(4)] == [["b"], ["a"], ["c"], []]

    @alone
    def test_the_fence_of_a_claim_from_the_backlog(self) -> None:
        """G27: above the uncertain attempt and each other's, and later grants are above them."""
        first, second = self.action("first"), self.action("second")
        for action in (first, second):
            self.store.release(action, self.marked(action))
        fences = sorted(claim.fence for _, claim in self.store.claim_backlog(2, TTL))
        assert fences == [3, 4]
        assert self.granted(self.action("next")).fence == 5

    @alone
    def test_a_batch_does_not_disturb_a_live_holder(self) -> None:
        """G27: while another key holds the resource the claim has that holder's fence, and mints none."""
        [action] = self.in_doubt("key")
        self.store.release(action, self.leases[action.key])
        lease = self.granted(self.action("holder", on="key"))
        [(_, claim)] = self.store.claim_backlog(1, TTL)
        assert claim.fence == lease.fence
        self.store.complete(self.action("holder", on="key"), lease)
        assert self.granted(self.action("next", on="key")).fence == lease.fence + 1

    @alone
    def test_a_batch_with_the_holder_of_its_resource(self) -> None:
        """G27: a marked key still holds its resource, also against the claims of its batch."""
        first, second = self.action("first"), self.action("second")
        self.store.release(first, self.marked(first))
        lease = self.marked(second)
        claims = {record.key: claim for record, claim in self.store.claim_backlog(2, TTL)}
        assert claims[first.key].fence == lease.fence
        assert claims[second.key].fence == lease.fence + 1


class _PuttingOff(_Claiming):
    """`defer_reconcile` gives a claim back, and says when to look again."""

    def put_off(self, seconds: float | None = TTL, *, note: str = "slow") -> tuple[Action, ReconcileClaim]:
        """Return a key that was looked at once, and put off."""
        [action] = self.in_doubt("key")
        [(_, claim)] = self.store.claim_backlog(1, 10 * TTL)
        self.store.defer_reconcile(claim, seconds, note=note, by="ann")
        return action, claim

    @alone
    def test_nobody_looks_before_the_time(self) -> None:
        """G18: a key that was put off is not claimed before its time, and then by anybody."""
        action, _ = self.put_off()
        self.tick(TTL / 4)
        assert self.claimed() == []
        with self.refused(ReconcileDeferred, action) as info:
            self.store.begin_reconcile(action, TTL)
        assert vars(info.value)["retry_after_seconds"] == TTL * 3 / 4
        self.tick(TTL * 3 / 4)
        assert self.claimed() == ["key"]

    @alone
    def test_the_time_counts_from_the_claims_end_or_from_now(self) -> None:
        """G18, G23: putting off counts from when it is said, whatever the claim's time was."""
        action, _ = self.put_off()
        assert self.record(action).next_look_at == self.clock.now() + timedelta(seconds=TTL)
        self.tick()
        self.store.begin_reconcile(action, TTL)

    @alone
    @pytest.mark.parametrize("seconds", [TTL, None])
    def test_early_looks(self, seconds: float | None) -> None:
        """G18: whoever asks early is given what was put off or parked, and shuts out others until the claim ends."""
        action, first = self.put_off(seconds)
        claim = self.store.begin_reconcile(action, TTL, early=True)
        assert claim.fence > first.fence
        with self.refused(ReconcileTaken, action):
            self.store.begin_reconcile(action, TTL, early=True)
        self.tick()
        assert self.claimed() == ["key"]

    @alone
    def test_parked_keys_wait_for_a_person(self) -> None:
        """G18, G21: nobody is given a parked key, however late; that and why is in the record and the history."""
        action, claim = self.put_off(None, note="ask the bank")
        record = self.record(action)
        assert (record.parked, record.note, record.next_look_at) == (True, "ask the bank", None)
        parked = HistoryEntry(self.clock.now(), "parked", record.fence, "ann", "ask the bank")
        assert self.store.history(action.key)[-1] == parked
        self.tick(1000 * TTL)
        assert self.claimed() == []
        with self.refused(ReconcileDeferred, action) as info:
            self.store.begin_reconcile(action, TTL)
        assert vars(info.value)["retry_after_seconds"] is None
        with self.unchanged(action):
            self.store.defer_reconcile(claim, None, note="again")

    @alone
    def test_putting_off_is_noted_and_counted(self) -> None:
        """G18: the record says what the last look came to, and how many there were; the history only knows rulings."""
        action, _ = self.put_off(note="timed out")
        self.tick()
        [(_, claim)] = self.store.claim_backlog(1, TTL)
        assert (self.record(action).note, self.record(action).looks) == ("timed out", 2)
        self.store.defer_reconcile(claim, TTL, note="no answer")
        assert (self.record(action).note, self.record(action).looks) == ("no answer", 2)
        assert self.events(action) == ["marked"]

    @alone
    @pytest.mark.parametrize("seconds", [TTL, None])
    def test_putting_off_twice(self, seconds: float | None) -> None:
        """G26: the same claim puts off once; asked again, nothing changes."""
        action, claim = self.put_off(seconds)
        self.tick(1)
        with self.unchanged(action):
            self.store.defer_reconcile(claim, 2 * TTL, note="other")

    @alone
    def test_a_claim_that_ended(self) -> None:
        """G18, G10: after another has claimed it, or after a ruling, a claim puts nothing off."""
        [action] = self.in_doubt("key")
        slow = self.store.begin_reconcile(action, TTL)
        self.tick()
        quick = self.store.begin_reconcile(action, TTL)
        with self.refused(ReconcileTaken, action):
            self.store.defer_reconcile(slow, TTL)
        self.store.resolve_uncertain(action, NOT_APPLIED)
        with self.refused(NotUncertain, action) as info:
            self.store.defer_reconcile(quick, TTL)
        assert vars(info.value)["state"] == "free"
        self.marked(action)
        with self.refused(ReconcileTaken, action):
            self.store.defer_reconcile(quick, TTL)

    @alone
    def test_a_claim_that_expired_untaken_still_puts_off(self) -> None:
        """G18: nobody else has looked since."""
        [action] = self.in_doubt("key")
        claim = self.store.begin_reconcile(action, TTL)
        self.tick()
        self.store.defer_reconcile(claim, TTL)
        assert self.claimed() == []

    @alone
    @pytest.mark.parametrize("seconds", [TTL, None])
    @pytest.mark.parametrize("resolution", [APPLIED, NOT_APPLIED], ids=["applied", "not applied"])
    def test_a_ruling_ends_it(self, seconds: float | None, resolution: Any) -> None:
        """G19: anybody can rule on what was put off or parked; a later doubt begins anew."""
        action, _ = self.put_off(seconds)
        self.store.resolve_uncertain(action, resolution)
        record = self.record(action)
        assert (record.parked, record.note, record.next_look_at, record.looks) == (False, None, None, 0)
        if resolution is NOT_APPLIED:
            self.marked(action)
            assert self.claimed() == ["key"]

    @alone
    @pytest.mark.parametrize("seconds", [TTL, None])
    def test_a_late_completion_ends_it(self, seconds: float | None) -> None:
        """G16: the attempt that expired into doubt completes, also when its key was put off or parked."""
        scene = SCENES["flipped"](self)
        [(_, claim)] = self.store.claim_backlog(1, TTL)
        self.store.defer_reconcile(claim, seconds)
        self.store.complete(scene.action, scene.lease, "late")
        assert self.record(scene.action).state is State.DONE
        assert not self.record(scene.action).parked

    @alone
    @pytest.mark.parametrize("seconds", [0, -1, float("nan"), True, "1"])
    def test_put_off_for_a_time_that_is_none(self, seconds: Any) -> None:
        """G24: seconds out of their limits are refused, and put nothing off."""
        [action] = self.in_doubt("key")
        claim = self.store.begin_reconcile(action, TTL)
        with self.refused(InvalidArgument, action):
            self.store.defer_reconcile(claim, seconds)

    @alone
    @pytest.mark.parametrize("text", ["a\0b", "\ud800", None, 1])
    def test_put_off_with_a_note_that_cannot_be_stored(self, text: Any) -> None:
        """G24: who and why must be texts that can be kept."""
        [action] = self.in_doubt("key")
        claim = self.store.begin_reconcile(action, TTL)
        for said in ({"note": text}, {"by": text}):
            with self.refused(InvalidArgument, action):
                self.store.defer_reconcile(claim, TTL, **said)


class _Listing(_Claiming):
    """`backlog` and `tallies` show what is in doubt."""

    def listed(self, **asked: Any) -> list[str]:
        """Return the keys of this test in the backlog."""
        return self.mine(self.store.backlog(ALL, **asked))

    def test_backlog_is_oldest_first(self) -> None:
        """G18: the backlog lists uncertain keys, the oldest first, and no others."""
        self.in_doubt("c", "a", "b")
        self.granted(self.action("live", on="live"))
        assert self.listed() == ["c", "a", "b"]
        assert len(self.store.backlog(2)) == 2

    def test_backlog_shows_the_record(self) -> None:
        """G18: an entry of the backlog is the key's record."""
        action = self.action(payload="p", fingerprint="f")
        self.marked(action)
        assert self.record(action) in self.store.backlog(ALL)

    @pytest.mark.parametrize("name", SCENES)
    def test_what_is_listed(self, name: str) -> None:
        """G18: a key is listed exactly while it is uncertain."""
        scene = SCENES[name](self)
        record = self.store.lookup(scene.action.key)
        uncertain = record is not None and record.state is State.UNCERTAIN
        assert self.listed() == (["key"] if uncertain else [])

    def test_pages(self) -> None:
        """G18: pages follow one another without a gap, also where keys became uncertain at one moment."""
        names = ["a", "b", "c", "d", "e"]
        for name in names:
            self.marked(self.action(name, on=name))
        pages, after = [], None
        while page := self.store.backlog(2, prefix=self.named(""), after=after):
            pages.append(self.mine(page))
            after = page[-1]
        assert pages == [["a", "b"], ["c", "d"], ["e"]]

    def test_filters(self) -> None:
        """G18: by the beginning of the key, a part of the reason, age, and whether it is parked; together all hold."""
        old, new = self.in_doubt("old:1", "new:1")
        other = self.action("new:%", on="other")
        self.store.mark_uncertain(other, self.granted(other), "Connection_lost: 50%")
        self.store.defer_reconcile(self.store.begin_reconcile(new, TTL), None)
        mine = self.named("")
        assert self.listed(prefix=f"{mine}new:") == ["new:1", "new:%"]
        assert self.listed(prefix=f"{mine}new:%") == ["new:%"]
        assert self.listed(prefix=f"{mine}_") == []
        assert self.listed(reason="lost: 50%") == ["new:%"]
        assert self.listed(reason="_") == ["new:%"]
        assert self.listed(parked=True) == ["new:1"]
        assert self.listed(parked=False) == ["old:1", "new:%"]
        assert self.listed(older_than_seconds=1) == ["old:1"]
        assert self.listed(older_than_seconds=0.999) == ["old:1", "new:1"]
        assert self.listed(older_than_seconds=1, parked=True) == []
        assert self.listed(after=self.record(old), reason="timeout") == ["new:1"]

    @pytest.mark.parametrize(
        "asked",
        [{"prefix": 1}, {"prefix": "\0"}, {"reason": None}, {"older_than_seconds": 0}, {"parked": 1}, {"after": "key"}],
        ids=str,
    )
    def test_filters_that_are_none(self, asked: dict[str, Any]) -> None:
        """G24: a filter of another type, or out of its limits, is refused."""
        with pytest.raises(InvalidArgument):
            self.store.backlog(1, **asked)

    def test_a_page_after_a_key_that_is_not_uncertain(self) -> None:
        """G24: a page follows the record of an uncertain key."""
        action = self.action()
        self.granted(action)
        with pytest.raises(InvalidArgument):
            self.store.backlog(1, after=self.record(action))

    @alone
    def test_tallies(self) -> None:
        """G18: how many keys of a scope wait for what, and the oldest's time."""
        start = self.clock.now()
        for name in ("a:1", "a:2", "b", "c:1"):
            self.marked(Action(name, name, payload="p"))
            self.tick(1)
        self.store.defer_reconcile(self.store.begin_reconcile(Action("a:1", "a:1"), TTL), None)
        for name in ("c:2", "done"):
            self.granted(Action(name, name, payload="p"))
        self.store.abandon(Action("c:2", "c:2"), self.leases["c:2"], due_in_seconds=TTL)
        self.store.complete(Action("done", "done"), self.leases["done"])
        self.granted(Action("d:1", "d:1"))
        first, second, third, fourth, fifth = (start + timedelta(seconds=n) for n in range(5))
        due = fifth + timedelta(seconds=TTL)
        assert Counter(self.store.tallies()) == Counter(
            [
                Tally(Kind.PARKED, "a", "timeout", 1, first, None),
                Tally(Kind.UNCERTAIN, "a", "timeout", 1, second, second),
                Tally(Kind.UNCERTAIN, "b", "timeout", 1, third, third),
                Tally(Kind.UNCERTAIN, "c", "timeout", 1, fourth, fourth),
                Tally(Kind.DUE, "c", None, 1, due, due),
                Tally(Kind.IN_FLIGHT, "d", None, 1, fifth, None),
            ]
        )

    @alone
    def test_what_waits_for_a_sweep_is_tallied(self) -> None:
        """G18, G3: since when a sweep could have taken it up: the end of a lease, of a claim, of a time put off."""
        self.granted(self.action("a", on="a"))
        self.tick(1)
        self.granted(self.action("b", on="b"))
        ended = self.clock.now() + timedelta(seconds=TTL - 1)
        self.tick(TTL - 1)
        kinds = {tally.kind: tally for tally in self.store.tallies()}
        assert kinds.keys() == {Kind.EXPIRED, Kind.IN_FLIGHT}
        assert (kinds[Kind.EXPIRED].count, kinds[Kind.EXPIRED].next_at) == (1, ended)
        self.store.expire_intents(ALL)
        [tally] = [tally for tally in self.store.tallies() if tally.kind is Kind.UNCERTAIN]
        assert (tally.count, tally.next_at) == (1, self.clock.now())
        self.store.claim_backlog(ALL, 2 * TTL)
        [tally] = [tally for tally in self.store.tallies() if tally.kind is Kind.UNCERTAIN]
        assert tally.next_at == self.clock.now() + timedelta(seconds=2 * TTL)

    def test_the_stores_time(self) -> None:
        """G23: the time by which all is judged."""
        assert self.store.now() == self.clock.now()
        self.tick(1)
        assert self.store.now() == self.clock.now()

    @alone
    def test_tallies_of_an_empty_store(self) -> None:
        """G18: nothing is counted where nothing waits."""
        action = self.action()
        self.store.complete(action, self.granted(action))
        assert self.store.tallies() == []


class _Running(EffectStoreHarness):
    """`renew_running` renews by what is seen to run."""

    @pytest.mark.parametrize("name", SCENES)
    def test_only_what_is_live_is_renewed(self, name: str) -> None:
        """G13, G10: the live attempt of that key and fence, and that holds its resource or has released it unharmed."""
        scene = SCENES[name](self)
        self.tick(1)
        record = self.store.lookup(scene.action.key)
        renewable = (
            record is not None
            and record.state is State.IN_FLIGHT
            and name not in {"expired", "overtaken", "retaken", "released, lease of another"}
        )
        fence = 1 if record is None else record.fence
        [answer] = self.store.renew_running([(scene.action.key, fence)], 2 * TTL)
        assert answer is (Renewal.RENEWED if renewable else Renewal.LOST)
        after = self.store.lookup(scene.action.key)
        if renewable:
            assert record is not None
            assert after == replace(record, expires_at=self.clock.now() + timedelta(seconds=2 * TTL))
        else:
            assert after == record

    def test_another_attempt_is_not_renewed(self) -> None:
        """G13: an attempt that ended since it was seen gives its successor nothing."""
        scene = SCENES["regranted"](self)
        with self.unchanged(scene.action):
            assert self.store.renew_running([(scene.action.key, scene.lease.fence)], 2 * TTL) == [Renewal.LOST]

    def test_many_at_once(self) -> None:
        """G13: the answers stand in the order asked; nothing asked is nothing done."""
        a, b, gone = self.action("a", on="a"), self.action("b", on="b"), self.action("gone")
        attempts = [(a.key, self.granted(a).fence), (gone.key, 1), (b.key, self.granted(b).fence)]
        assert self.store.renew_running(attempts, TTL) == [Renewal.RENEWED, Renewal.LOST, Renewal.RENEWED]
        assert self.store.renew_running([], TTL) == []

    @pytest.mark.parametrize(
        "attempts", [None, "ab", ["a"], [("a",)], [("", 1)], [("a", 0)], [("a", True)], [("a", 1), ("a", 2)]]
    )
    def test_attempts_that_are_none(self, attempts: Any) -> None:
        """G24: keys and fences must be such, each key once."""
        with pytest.raises(InvalidArgument):
            self.store.renew_running(attempts, TTL)


class Backlog(_PuttingOff, _Listing, _Running):
    """`claim_backlog`, `defer_reconcile`, `backlog`, `tallies` and `renew_running`."""
