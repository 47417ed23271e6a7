"""Concurrency: calls that start together on a barrier, again and again on fresh keys. Nothing sleeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any, TypeVar
from uuid import UUID, uuid4

import pytest

from pgref.conformance.harness import ALL, APPLIED, NOT_APPLIED, TTL, EffectStoreHarness
from pgref.contracts.effects import Action, Contended, Done, Granted, InFlight, Lease, Outcome, Ruling, State, Uncertain
from pgref.errors import FenceStale, LeaseLost, ReconcileTaken, Refused

__all__ = ["EffectStoreRaces", "race"]

REPEATS = 20
CALLERS = 8
STUCK_SECONDS = 60.0

T = TypeVar("T")


def race(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Start ``calls`` together, each in its thread. Return their answers or refusals; any other error is raised."""
    barrier = Barrier(len(calls), timeout=STUCK_SECONDS)

    def run(call: Callable[[], Any]) -> Any:
        barrier.wait()
        try:
            return call()
        except Refused as refusal:
            return refusal

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def answered(answers: Sequence[T | Refused]) -> list[T]:
    """Return ``answers``, none of which may be a refusal."""
    assert not any(isinstance(answer, Refused) for answer in answers)
    return [answer for answer in answers if not isinstance(answer, Refused)]


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

    # Many at once

    def wanted(self, *, on: str = "resource") -> list[Action]:
        """Return actions over as many resources."""
        return [self.action(f"key {n}", on=f"{on} {n}") for n in range(CALLERS)]

    def test_batches_in_opposite_orders(self) -> None:
        """G7: batches of the same keys in opposite orders end without a deadlock, each key granted once."""
        for _ in self.rounds():
            actions = self.wanted()
            batches = [actions, actions[::-1]] * 2
            answers = answered(race([partial(self.store.acquire_many, batch, TTL) for batch in batches]))
            told = [
                one for batch, answer in zip(batches, answers, strict=True) for one in zip(batch, answer, strict=True)
            ]
            assert sorted(a.key for a, o in told if isinstance(o, Granted)) == sorted(a.key for a in actions)
            assert all(isinstance(outcome, Granted | InFlight) for _, outcome in told)

    @pytest.mark.usefixtures("empty_store")
    @pytest.mark.parametrize(
        ("known", "retained"), [(0, False), (1, False), (1, True)], ids=["new", "known", "retained"]
    )
    def test_batches_over_each_others_resources(self, known: int, *, retained: bool) -> None:
        """G7, G8: batches that want each other's resources grant each resource and each key once.

        New resources, known ones, and ones whose last key was removed, so that nothing but the resource is left.
        """
        for _ in self.rounds():
            for m in range(CALLERS * known):
                first = self.action(f"first {m}", on=f"resource {m}")
                self.store.complete(first, self.granted(first))
            if retained:
                self.tick(2 * TTL)
                self.store.retain(TTL, ALL)
            there = self.wanted()
            back = [self.action(f"back {m}", on=f"resource {m}") for m in reversed(range(CALLERS))]
            crossed = [self.action(f"key {m}", on=f"resource {CALLERS - 1 - m}") for m in range(CALLERS)]
            answers = answered(race([partial(self.store.acquire_many, b, TTL) for b in (there, back, crossed)]))
            leases = [o.lease for answer in answers for o in answer if isinstance(o, Granted)]
            assert len({lease.resource for lease in leases}) == len(leases)
            assert {lease.fence for lease in leases} == {1 + known}
            keys = [self.store.lookup(a.key) for a in [*there, *back]]
            assert sum(record is not None for record in keys) == len(leases)

    def test_batches_against_single_questions(self) -> None:
        """G4, G7: keys asked for in a batch and alone at once are granted once, new ones and known ones."""
        for n in range(REPEATS):
            self.token = uuid4().hex
            actions = self.wanted()
            for action in actions[: n % CALLERS]:
                self.store.abandon(action, self.granted(action))
            calls: list[Callable[[], object]] = [partial(self.store.acquire_many, actions, TTL)]
            batch, *alone = race([*calls, *map(self.asking, actions)])
            assert isinstance(batch, list)
            for together, single in zip(batch, alone, strict=True):
                assert sorted(type(outcome).__name__ for outcome in (together, single)) == ["Granted", "InFlight"]

    def test_batches_against_completions(self) -> None:
        """G1, G7: a batch that meets keys as they complete, or as they are abandoned, has an answer for each."""
        for _ in self.rounds():
            actions = self.wanted()
            leases = [self.granted(action) for action in actions]
            ends: list[Callable[[], object]] = [
                partial(self.store.abandon if n % 2 else self.store.complete, action, lease)
                for n, (action, lease) in enumerate(zip(actions, leases, strict=True))
            ]
            [batch, *_rest] = race([partial(self.store.acquire_many, actions, TTL), *ends])
            assert isinstance(batch, list)
            assert all(isinstance(outcome, InFlight | Done) for outcome in batch[::2])
            assert all(isinstance(outcome, InFlight | Granted) for outcome in batch[1::2])

    def test_batches_of_expired_keys(self) -> None:
        """G3, G7: batches, single questions and the sweep flip an expired intent once."""
        for _ in self.rounds():
            actions = self.wanted()
            for action in actions:
                self.granted(action)
            self.tick()
            rivals = [self.action(f"rival {n}", on=f"resource {n}") for n in reversed(range(CALLERS))]
            batches = [actions, rivals, actions[::-1]]
            calls = [partial(self.store.acquire_many, batch, TTL) for batch in batches]
            asked, taken, again, _count = race([*calls, partial(self.store.expire_intents, ALL)])
            assert isinstance(taken, list)
            assert [outcome.lease.fence for outcome in taken] == [2] * CALLERS
            assert asked == (again[::-1] if isinstance(again, list) else again)
            assert [self.events(action) for action in actions] == [["expired"]] * CALLERS

    def test_completions_in_batches_and_alone(self) -> None:
        """G12: of completions in batches and alone the first of each key wins, and all are told its result."""
        for _ in self.rounds():
            pairs = [(action, self.granted(action)) for action in self.wanted()]
            there = [(action, lease, "there") for action, lease in pairs]
            back = [(action, lease, "back") for action, lease in reversed(pairs)]
            calls: list[Callable[[], object]] = [
                partial(self.store.complete_many, there),
                partial(self.store.complete_many, back),
                *[self.completing(action, lease) for action, lease in pairs],
            ]
            first, second, *alone = race(calls)
            stands = [self.record(action).result for action, _ in pairs]
            assert isinstance(second, list)
            assert first == second[::-1] == alone == stands

    # The store as a whole

    @pytest.mark.usefixtures("empty_store")
    def test_raised_fences_against_grants(self) -> None:
        """G28: whatever is granted meanwhile is either above the floor, or uncertain by the time that it is raised."""
        for n in range(1, REPEATS + 1):
            self.token, floor = uuid4().hex, 1000 * n
            known = [self.action(f"known {m}", on=f"known {m}") for m in range(2)]
            for action in known:
                self.store.complete(action, self.granted(action))
            again = [self.action(f"again {m}", on=f"known {m}") for m in range(2)]
            new = [self.action(f"new {m}", on=f"new {m}") for m in range(4)]
            calls: list[Callable[[], object]] = [
                *map(self.asking, again + new[:2]),
                partial(self.store.acquire_many, [*new[2:], self.action("third", on="known 0")], TTL),
                partial(self.store.raise_fences, floor),
            ]
            raised = race(calls)[-1]
            records = [r for r in (self.store.lookup(a.key) for a in again + new) if r is not None]
            third = self.store.lookup(self.named("third"))
            records += [third] if third else []
            below = [record for record in records if record.fence <= floor]
            assert {record.state for record in below} <= {State.UNCERTAIN}
            assert {record.state for record in records if record not in below} <= {State.IN_FLIGHT}
            assert raised == len(below)
            self.store.raise_fences(floor)

    @pytest.mark.usefixtures("empty_store")
    def test_raised_fences_against_completions(self) -> None:
        """G28, G12: an attempt completes before the fences are raised, or not at all."""
        for _ in self.rounds():
            pairs = [(action, self.granted(action)) for action in self.wanted()]
            calls: list[Callable[[], object]] = [self.completing(action, lease) for action, lease in pairs[2:]]
            together = partial(self.store.complete_many, [(a, lease, "late") for a, lease in pairs[:2]])
            raised, both, *alone = race([partial(self.store.raise_fences, 1), together, *calls])
            assert isinstance(both, list)
            for (action, _), answer in zip(pairs, [*both, *alone], strict=True):
                done = self.state(action) is State.DONE
                assert answer == "late" if done else isinstance(answer, LeaseLost)
            assert raised == sum(self.state(action) is State.UNCERTAIN for action, _ in pairs)

    @pytest.mark.usefixtures("empty_store")
    def test_retention_against_grants(self) -> None:
        """G8, G25: a key asked for while it is removed is done still, or granted anew with the next fence."""
        for _ in self.rounds():
            actions = self.wanted()
            for action in actions:
                self.store.complete(action, self.granted(action), "first")
            self.tick(2 * TTL)
            calls: list[Callable[[], object]] = [
                *map(self.asking, actions[:4]),
                partial(self.store.acquire_many, actions[4:], TTL),
                partial(self.store.retain, TTL, ALL),
                partial(self.store.retain, TTL, ALL),
            ]
            *alone, batch, one, two = race(calls)
            assert isinstance(one, int)
            assert isinstance(two, int)
            assert one + two == CALLERS
            assert isinstance(batch, list)
            for action, outcome in zip(actions, [*alone, *batch], strict=True):
                record = self.store.lookup(action.key)
                assert (outcome == Done("first")) is (record is None)
                assert record is None or (record.attempt, record.fence, record.state) == (1, 2, State.IN_FLIGHT)
