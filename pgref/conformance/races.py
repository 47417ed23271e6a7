"""Concurrency: calls that start together on a barrier, again and again on fresh keys. Nothing sleeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import TypeVar
from uuid import UUID, uuid4

from pgref.conformance.harness import ALL, APPLIED, NOT_APPLIED, TTL, EffectStoreHarness
from pgref.contracts.effects import Action, Contended, Done, Granted, InFlight, Lease, Outcome, Ruling, State, Uncertain
from pgref.errors import FenceStale, LeaseLost, ReconcileTaken, Refused

__all__ = ["EffectStoreRaces", "race"]

REPEATS = 20
CALLERS = 8
STUCK_SECONDS = 60.0

T = TypeVar("T")


def race(calls: Sequence[Callable[[], T]]) -> list[T | Refused]:
    """Start ``calls`` together, each in its thread. Return their answers or refusals; any other error is raised."""
    barrier = Barrier(len(calls), timeout=STUCK_SECONDS)

    def run(call: Callable[[], T]) -> T | Refused:
        barrier.wait()
        try:
            return call()
        except Refused as refusal:
            return refusal

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


class EffectStoreRaces(EffectStoreHarness):
    """Whatever the order, one of the answers that some order would give."""

    def rounds(self) -> Iterator[None]:
        """Repeat a race with fresh names."""
        for _ in range(REPEATS):
            self.token = uuid4().hex
            yield

    def asking(self, action: Action, holder: UUID | None = None) -> Callable[[], Outcome]:
        """Return the call that acquires ``action``."""
        return lambda: self.acquire(action, holder=holder)

    def completing(self, action: Action, lease: Lease) -> Callable[[], str | None]:
        """Return the call that completes ``action``."""
        return lambda: self.store.complete(action, lease, "late")

    def test_one_key_is_granted_once(self) -> None:
        """G7: of N concurrent acquires of one new key exactly one is granted, the others are told *in flight*."""
        for _ in self.rounds():
            outcomes = race([self.asking(self.action())] * CALLERS)
            assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Granted"] + ["InFlight"] * (CALLERS - 1)

    def test_one_known_key_is_granted_once(self) -> None:
        """G7, G22: the same for a key that was abandoned before."""
        for _ in self.rounds():
            action = self.action()
            self.store.abandon(action, self.granted(action))
            outcomes = race([self.asking(action)] * CALLERS)
            grants = [outcome for outcome in outcomes if isinstance(outcome, Granted)]
            assert [grant.attempt for grant in grants] == [2]
            assert all(isinstance(outcome, Granted | InFlight) for outcome in outcomes)

    def test_one_resource_is_granted_once(self) -> None:
        """G7: of N keys on one resource exactly one is granted, the others are contended and leave no trace."""
        for _ in self.rounds():
            actions = [self.action(f"key {n}") for n in range(CALLERS)]
            outcomes = race([self.asking(action) for action in actions])
            assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Contended"] * (CALLERS - 1) + ["Granted"]
            assert sum(self.store.lookup(action.key) is not None for action in actions) == 1

    def test_one_expired_resource_is_taken_over_once(self) -> None:
        """G6, G7: of N keys that find an expired lease exactly one takes the resource over."""
        for _ in self.rounds():
            expired = self.action("expired")
            self.granted(expired)
            self.tick()
            outcomes = race([self.asking(self.action(f"key {n}")) for n in range(CALLERS)])
            assert [o.lease.fence for o in outcomes if isinstance(o, Granted)] == [2]
            assert self.events(expired) == ["expired"]

    def test_two_keys_over_two_resources(self) -> None:
        """G7: two keys that want each other's resource end without a deadlock, each key and resource granted once."""
        for _ in self.rounds():
            self.store.abandon(self.action("a", on="x"), self.granted(self.action("a", on="x")))
            self.store.abandon(self.action("b", on="y"), self.granted(self.action("b", on="y")))
            wanted = [self.action(key, on=resource) for key in "ab" for resource in "xy"]
            outcomes = race([self.asking(action) for action in wanted * 2])
            grants = [o.lease for o in outcomes if isinstance(o, Granted)]
            assert 1 <= len(grants) == len({lease.resource for lease in grants}) <= len("ab")
            assert all(isinstance(outcome, Granted | InFlight | Contended) for outcome in outcomes)
            assert sum(self.state(self.action(key)) is State.IN_FLIGHT for key in "ab") == len(grants)

    def test_one_question_asked_often(self) -> None:
        """G4, G26: one holder that asks many times at once gets one grant, always the same."""
        for _ in self.rounds():
            outcomes = race([self.asking(self.action(), uuid4())] * CALLERS)
            assert isinstance(outcomes[0], Granted)
            assert set(outcomes) == {outcomes[0]}

    def test_fences_of_a_busy_resource(self) -> None:
        """G6, G8: keys that ask while the holder completes are granted once at most, with the next fence."""
        holder, lease = self.action("first"), self.granted(self.action("first"))
        for n in range(REPEATS):
            actions = [self.action(f"key {n} {m}") for m in range(CALLERS)]
            calls: list[Callable[[], object]] = [self.completing(holder, lease), *map(self.asking, actions)]
            completed, *outcomes = race(calls)
            assert completed == "late"
            winners = [action for action, o in zip(actions, outcomes, strict=True) if isinstance(o, Granted)]
            assert len(winners) <= 1
            fence = lease.fence
            holder = winners[0] if winners else self.action(f"key {n}")
            lease = self.lease_of(outcomes) or self.granted(holder)
            assert lease.fence == fence + 1

    def lease_of(self, outcomes: Sequence[object]) -> Lease | None:
        """Return the first lease that was granted."""
        return next((outcome.lease for outcome in outcomes if isinstance(outcome, Granted)), None)

    def test_completions_of_one_attempt(self) -> None:
        """G12: of N concurrent completions the first wins, and all are told its result."""
        for _ in self.rounds():
            action = self.action()
            lease = self.granted(action)
            calls = [partial(self.store.complete, action, lease, f"result {n}") for n in range(CALLERS)]
            assert set(race(calls)) == {self.record(action).result}

    def test_complete_against_takeover(self) -> None:
        """G16, G17: an expired holder completes before the resource is taken over, or is refused with evidence."""
        for _ in self.rounds():
            action = self.action()
            lease = self.granted(action)
            self.tick()
            calls: list[Callable[[], object]] = [self.completing(action, lease), self.asking(self.action("other"))]
            completed, taken = race(calls)
            assert isinstance(taken, Granted)
            if completed == "late":
                assert self.state(action) is State.DONE
            else:
                assert isinstance(completed, FenceStale)
                assert self.state(action) is State.UNCERTAIN
                assert [e.result for e in self.store.evidence(action.key)] == ["late"]

    def test_complete_against_expiry(self) -> None:
        """G3, G16: a late completion holds, whether or not somebody has found the intent expired meanwhile."""
        for _ in self.rounds():
            action = self.action()
            lease = self.granted(action)
            self.tick()
            sweeping = partial(self.store.expire_intents, ALL)
            calls: list[Callable[[], object]] = [self.completing(action, lease), self.asking(action), sweeping]
            completed, outcome, _count = race(calls)
            assert completed == "late"
            assert isinstance(outcome, Uncertain | Done)
            assert self.state(action) is State.DONE
            assert self.events(action) in ([], ["expired", "completed_late"])

    def test_complete_against_ruling(self) -> None:
        """G16, G19: a late completion and the ruling *not applied* never both hold."""
        for _ in self.rounds():
            action = self.action()
            lease = self.flipped(action)
            ruling_on = partial(self.store.resolve_uncertain, action, NOT_APPLIED)
            calls: list[Callable[[], object]] = [self.completing(action, lease), ruling_on]
            completed, ruling = race(calls)
            assert isinstance(ruling, Ruling)
            assert isinstance(completed, LeaseLost) is not ruling.applied
            assert self.state(action) is (State.DONE if ruling.applied else State.FREE)

    def test_rulings_of_one_key(self) -> None:
        """G19: of contradicting concurrent rulings the first wins, and all are told that one."""
        for _ in self.rounds():
            action = self.action()
            self.marked(action)
            resolutions = [APPLIED, NOT_APPLIED] * (CALLERS // 2)
            calls = [partial(self.store.resolve_uncertain, action, r) for r in resolutions]
            assert len(set(race(calls))) == 1
            assert len(self.events(action)) == len(["marked", "ruled"])

    def test_one_reconciler(self) -> None:
        """G18: of N concurrent reconcilers one gets the claim."""
        for _ in self.rounds():
            action = self.action()
            self.marked(action)
            answers = race([partial(self.store.begin_reconcile, action, TTL)] * CALLERS)
            assert sum(isinstance(answer, ReconcileTaken) for answer in answers) == CALLERS - 1

    def test_due_keys_go_to_one_caller(self) -> None:
        """G15: a key that is due is handed to one of many callers."""
        for _ in self.rounds():
            actions = [self.action(f"key {n}", on=f"resource {n}", payload="again") for n in range(4)]
            for action in actions:
                self.marked(action)
                self.store.resolve_uncertain(action, NOT_APPLIED)
            answers = race([partial(self.store.claim_due, ALL, TTL)] * 4)
            handed = [key for answer in answers if not isinstance(answer, Refused) for key in self.mine(answer)]
            assert sorted(handed) == [f"key {n}" for n in range(4)]
