"""Many at once: each answer is the one that the call for one would give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from pgref.conformance.credentials import BY_FORGERY, BY_SCENE, CALLS, FORGERIES
from pgref.conformance.harness import ALL, SCENES, TTL, EffectStoreHarness, Scene
from pgref.contracts.effects import (
    Action,
    Contended,
    Done,
    Granted,
    InFlight,
    Lease,
    Renewal,
    RetrySafety,
    State,
    Uncertain,
)
from pgref.errors import FenceStale, FingerprintMismatch, InvalidArgument, LeaseLost, Refused
from pgref.keys import BATCH_MAX

__all__ = ["Batches"]

COMPLETE = list(CALLS).index("complete")


class _Twins(EffectStoreHarness):
    """Runs a scene twice, under fresh names, to compare what the call for many and the call for one do to it."""

    def told(self, value: object) -> object:
        """Return an answer or a record without what differs between two runs: names, holders and the time of day."""
        match value:
            case str():
                return value.removeprefix(self.named(""))
            case datetime():
                return value - self.clock.now()
            case Refused():
                return type(value), self.told(value.key)
            case Granted(lease, attempt):
                return "granted", self.told(lease.resource), lease.fence, self.told(lease.expires_at), attempt
            case tuple() | list():
                return [self.told(part) for part in value]
        return value

    def run(self, name: str, ask: Callable[[Scene], tuple[Sequence[Action], Sequence[object]]]) -> object:
        """Return what ``ask`` answers to a scene, and what is then known of the actions that it asked for."""
        self.token = uuid4().hex
        actions, answers = ask(SCENES[name](self))
        flat = [self.told(answer if isinstance(answer, Granted | Refused) else _flat(answer)) for answer in answers]
        records = [record and self.told(astuple(record)) for record, _, _ in self.trace(*actions)]
        pasts = [self.told([astuple(entry) for entry in past]) for _, past, _ in self.trace(*actions)]
        kept = [[(e.fence, e.result) for e in evidence] for _, _, evidence in self.trace(*actions)]
        return flat, records, pasts, kept


def _flat(answer: object) -> object:
    plain = isinstance(answer, Done | Uncertain | InFlight | Contended)
    return (type(answer), *astuple(answer)) if plain else answer  # type: ignore[call-overload]


class _AcquireMany(_Twins):
    """The answers of `acquire_many` are those of `acquire`, asked one after another."""

    @pytest.mark.parametrize("name", SCENES)
    @pytest.mark.parametrize("known", [True, False], ids=["same holder", "new holder"])
    @pytest.mark.parametrize("step", [1, -1], ids=["forwards", "backwards"])
    def test_acquire_many_agrees_with_acquire(self, name: str, *, known: bool, step: int) -> None:
        """G1, G2, G3, G4, G5, G6, G22: a batch is answered, and leaves, what single questions in its order would."""
        self.tick(0)

        def questions(scene: Scene) -> tuple[list[Action], list[UUID]]:
            names = {"other": "resource", "third": "resource", "far": "elsewhere"}
            actions = [self.action("new"), scene.action, *[self.action(n, on=on) for n, on in names.items()]]
            holders = [scene.lease.holder if known and a is scene.action else uuid4() for a in actions]
            return actions[::step], holders[::step]

        def one_by_one(scene: Scene) -> tuple[list[Action], list[object]]:
            actions, holders = questions(scene)
            return actions, [self.acquire(a, holder=h) for a, h in zip(actions, holders, strict=True)]

        def at_once(scene: Scene) -> tuple[list[Action], list[object]]:
            actions, holders = questions(scene)
            return actions, [*self.store.acquire_many(actions, TTL, holders=holders)]

        assert self.run(name, at_once) == self.run(name, one_by_one)

    def test_acquire_many_keeps_the_order(self) -> None:
        """G6: answers stand in the order asked, whatever the order of keys, and each has its own lease."""
        actions = [self.action(name, on=f"resource {name}") for name in "zam"]
        self.store.complete(actions[1], self.granted(actions[1]), "first")
        z, a, m = self.store.acquire_many(actions, TTL)
        assert a == Done("first")
        assert isinstance(z, Granted)
        assert isinstance(m, Granted)
        assert [z.lease.resource, m.lease.resource] == [actions[0].resource, actions[2].resource]
        assert z.lease.holder != m.lease.holder
        assert self.store.complete(actions[0], z.lease, "z") == "z"

    def test_acquire_many_records_each_input(self) -> None:
        """G6: each grant is recorded with its own input, also where a part of it is None."""
        first = self.action("a", on="a", fingerprint="f", safety=RetrySafety.UNSAFE)
        second = self.action("b", on="b", payload="p")
        self.store.acquire_many([first, second], TTL)
        assert [self.record(first).action, self.record(second).action] == [first, second]

    def test_acquire_many_grants_a_freed_key_anew(self) -> None:
        """G6, G15, G22: a freed key is granted with its new input and next attempt, and is no longer due."""
        freed = self.action(fingerprint="f", payload="p")
        self.store.abandon(freed, self.granted(freed), due_in_seconds=TTL / 2)
        again = self.action(on="elsewhere", safety=RetrySafety.UNSAFE)
        [outcome] = self.store.acquire_many([again], 2 * TTL)
        assert isinstance(outcome, Granted)
        assert (outcome.attempt, self.record(again).action) == (2, again)
        self.tick()
        assert self.mine(self.store.claim_due(ALL, TTL)) == []

    def test_the_first_asked_gets_the_resource(self) -> None:
        """G5, G7: of the keys of a batch on one resource the first is granted; the others leave no trace."""
        self.tick(0)
        first, *others = [self.action(name) for name in "zam"]
        with self.unchanged(*others):
            outcome, *contended = self.store.acquire_many([first, *others], TTL)
        assert isinstance(outcome, Granted)
        assert contended == [Contended(TTL)] * 2

    def test_acquire_many_flips(self) -> None:
        """G3, G21: expired intents among the keys, or in the way of one, become uncertain, with their history."""
        expired, rival = self.action("expired", on="a"), self.action("rival", on="b")
        self.granted(expired)
        self.granted(rival)
        self.tick()
        uncertain, granted = self.store.acquire_many([expired, self.action("new", on="b")], TTL)
        assert uncertain == Uncertain("lease expired", self.clock.now())
        assert isinstance(granted, Granted)
        assert granted.lease.fence == 2
        assert self.events(expired) == self.events(rival) == ["expired"]
        assert self.state(rival) is State.UNCERTAIN

    def test_acquire_many_leaves_an_unconcerned_rival(self) -> None:
        """G3, G10: an expired intent is not touched by a question for its resource that is refused for its own key."""
        rival, expired = self.action("rival"), self.action("expired", on="elsewhere")
        self.granted(rival)
        self.granted(expired)
        self.tick()
        with self.unchanged(rival):
            [outcome] = self.store.acquire_many([self.action("expired")], TTL)
        assert isinstance(outcome, Uncertain)

    def test_acquire_many_asked_again(self) -> None:
        """G4, G26: the same holders get the same grants."""
        actions = [self.action(name, on=name) for name in "ab"]
        holders = [uuid4(), uuid4()]
        first = self.store.acquire_many(actions, TTL, holders=holders)
        with self.unchanged(*actions):
            assert self.store.acquire_many(actions, TTL, holders=holders) == first
        assert [type(outcome) for outcome in self.store.acquire_many(actions, TTL)] == [InFlight, InFlight]

    def test_acquire_many_answers_a_mismatch(self) -> None:
        """G9: another input is an answer for its key, which shows nothing, and does not keep the others from theirs."""
        known = self.action("known", fingerprint="one")
        self.store.complete(known, self.granted(known), "secret")
        actions = [self.action("known", fingerprint="two"), self.action("new")]
        with self.unchanged(known):
            mismatch, granted = self.store.acquire_many(actions, TTL)
        assert isinstance(mismatch, FingerprintMismatch)
        assert mismatch.key == known.key
        assert "secret" not in str(mismatch) + repr(vars(mismatch))
        assert isinstance(granted, Granted)

    def test_nothing_asked(self) -> None:
        """G24: no questions, no answers."""
        assert self.store.acquire_many([], TTL) == []
        assert self.store.acquire_many([], TTL, holders=[]) == []
        assert self.store.complete_many([]) == []

    def test_the_largest_batch(self) -> None:
        """G24, G12: the largest batch is granted and completed as a whole."""
        actions = [self.action(f"key {n}", on=f"resource {n}") for n in range(BATCH_MAX)]
        outcomes = self.store.acquire_many(actions, TTL)
        leases = [outcome.lease for outcome in outcomes if isinstance(outcome, Granted)]
        assert [lease.fence for lease in leases] == [1] * BATCH_MAX
        completions = [(a, lease, a.key) for a, lease in zip(actions, leases, strict=True)]
        assert self.store.complete_many(completions) == [action.key for action in actions]

    @pytest.mark.parametrize("ttl", [0, float("nan"), True, None])
    def test_acquire_many_with_a_wrong_ttl(self, ttl: Any) -> None:
        """G24, G10: a ttl out of its limits is refused for the whole batch, also an empty one."""
        with self.refused(InvalidArgument, self.action()):
            self.store.acquire_many([self.action()], ttl)
        with pytest.raises(InvalidArgument):
            self.store.acquire_many([], ttl)

    def test_batches_that_are_refused(self) -> None:
        """G24, G10: keys or holders that repeat, too many, or not as many holders as keys: nothing is granted."""
        a, b, holder = self.action("a", on="a"), self.action("b", on="b"), uuid4()
        many = [self.action(f"key {n}", on=f"resource {n}") for n in range(BATCH_MAX + 1)]
        calls: list[Callable[[], object]] = [
            lambda: self.store.acquire_many([a, b, self.action("a", on="c")], TTL),
            lambda: self.store.acquire_many([a, b], TTL, holders=[holder, holder]),
            lambda: self.store.acquire_many([a, b], TTL, holders=[holder]),
            lambda: self.store.acquire_many([a], TTL, holders=[]),
            lambda: self.store.acquire_many([a], TTL, holders=[holder, uuid4()]),
            lambda: self.store.acquire_many(many, TTL),
        ]
        for call in calls:
            with self.refused(InvalidArgument, a, b, many[0]):
                call()


class _CompleteMany(_Twins):
    """The answers of `complete_many` are those of `complete`, with refusals among them."""

    @pytest.mark.parametrize("name", BY_SCENE)
    @pytest.mark.parametrize("step", [1, -1], ids=["forwards", "backwards"])
    def test_complete_many_agrees_with_complete(self, name: str, step: int) -> None:
        """G11, G12, G16, G17: a batch is answered, and leaves, what single completions in its order would."""
        self.tick(0)

        def completions(scene: Scene) -> list[tuple[Action, Lease, str | None]]:
            far = self.action("far", on="elsewhere")
            return [(scene.action, scene.lease, "late"), (far, self.granted(far), None)][::step]

        def one_by_one(scene: Scene) -> tuple[list[Action], list[object]]:
            asked = completions(scene)
            return [action for action, _, _ in asked], [self.completed(*completion) for completion in asked]

        def at_once(scene: Scene) -> tuple[list[Action], list[object]]:
            asked = completions(scene)
            return [action for action, _, _ in asked], [*self.store.complete_many(asked)]

        assert self.run(name, at_once) == self.run(name, one_by_one)

    def completed(self, action: Action, lease: Lease, result: str | None) -> object:
        """Complete alone; a refusal is the answer."""
        try:
            return self.store.complete(action, lease, result)
        except Refused as refused:
            return refused

    def test_complete_many_records_each_result(self) -> None:
        """G12: each key is done with its own result, in the order asked, and its resource is free."""
        actions = [self.action(name, on=name) for name in "zam"]
        completions = [(a, self.granted(a), r) for a, r in zip(actions, ["z", None, ""], strict=True)]
        self.tick(1)
        assert self.store.complete_many(completions) == ["z", None, ""]
        assert [self.record(action).result for action in actions] == ["z", None, ""]
        assert {self.record(action).completed_at for action in actions} == {self.clock.now()}
        for name in "zam":
            self.resource_is(name, held=False, newest=1)

    def test_complete_many_returns_the_first_results(self) -> None:
        """G12, G26: done keys keep their first results, and a batch can be repeated."""
        actions = [self.action(name, on=name) for name in "ab"]
        leases = [self.granted(action) for action in actions]
        self.store.complete(actions[0], leases[0], "first")
        batch = [(a, lease, "second") for a, lease in zip(actions, leases, strict=True)]
        assert self.store.complete_many(batch) == ["first", "second"]
        with self.unchanged(*actions):
            assert self.store.complete_many([(a, lease, "third") for a, lease, _ in batch]) == ["first", "second"]

    def test_complete_many_keeps_evidence(self) -> None:
        """G10, G17: a refusal stands among the answers, is kept as evidence, and does not touch the others."""
        lost, stale, live = (self.action(name, on=name) for name in ("lost", "stale", "live"))
        leases = [self.marked(lost), self.granted(stale), self.granted(live)]
        self.store.abandon(stale, leases[1])
        newer = self.granted(stale)
        batch = [(a, lease, a.key) for a, lease in zip([lost, stale, live], leases, strict=True)]
        first, second, third = self.store.complete_many(batch)
        assert isinstance(first, LeaseLost)
        assert isinstance(second, FenceStale)
        assert (first.key, second.key, second.fence, second.seen) == (lost.key, stale.key, 1, newer.fence)
        assert third == live.key
        assert [entry.result for a in (lost, stale, live) for entry in self.store.evidence(a.key)] == [
            lost.key,
            stale.key,
        ]

    @pytest.mark.parametrize("forgery", FORGERIES)
    def test_complete_many_with_a_wrong_lease(self, forgery: str) -> None:
        """G10, G11: a wrong lease in a batch is answered as it would be alone, and the key stays in flight."""
        action = self.action()
        self.store.abandon(action, self.granted(action))
        lease = self.granted(action)
        [refused] = self.store.complete_many([(action, FORGERIES[forgery](lease), "forged")])
        assert type(refused) is BY_FORGERY[forgery][COMPLETE]
        assert self.state(action) is State.IN_FLIGHT
        assert self.store.complete_many([(action, lease, "own")]) == ["own"]

    def test_complete_many_for_another_input(self) -> None:
        """G9: another input is refused without the stored result, done or not."""
        done, live = self.action("done", on="a", fingerprint="one"), self.action("live", on="b", fingerprint="one")
        leases = [self.granted(done), self.granted(live)]
        self.store.complete(done, leases[0], "secret")
        others = [replace(action, fingerprint="two") for action in (done, live)]
        with self.unchanged(done, live):
            answers = self.store.complete_many([(a, lease, "x") for a, lease in zip(others, leases, strict=True)])
        assert [type(answer) for answer in answers] == [FingerprintMismatch] * 2
        assert "secret" not in repr([vars(answer) for answer in answers])

    def test_completions_that_are_refused(self) -> None:
        """G24, G10: keys that repeat, too many of them, or a result that cannot be stored: nothing is completed."""
        a, b = self.action("a", on="a"), self.action("b", on="b")
        first, second = self.granted(a), self.granted(b)
        wrong: list[Any] = [
            [(a, first, "1"), (b, second, "2"), (a, first, "3")],
            [(a, first, "1"), (b, second, "a\0b")],
            [(a, first, "1"), (b, second, 2)],
            [(a, first, "1"), *[(self.action(f"key {n}"), second, None) for n in range(BATCH_MAX)]],
        ]
        for completions in wrong:
            with self.refused(InvalidArgument, a, b):
                self.store.complete_many(completions)


class _RenewMany(EffectStoreHarness):
    """The answers of `renew_many` are those of `renew`, none of them raised."""

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

    def test_renew_many_with_one_key_twice(self) -> None:
        """G11, G13: the right lease renews, and the same fence and holder on another resource do not get its answer."""
        action, elsewhere = self.action(), self.action(on="elsewhere")
        lease = self.granted(action)
        moved = replace(lease, resource=elsewhere.resource)
        pairs = [(elsewhere, moved), (action, lease)]
        assert self.store.renew_many(pairs, TTL) == [Renewal.LOST, Renewal.RENEWED]

    @pytest.mark.parametrize("forgery", FORGERIES)
    def test_renew_many_with_a_wrong_lease(self, forgery: str) -> None:
        """G11, G13: a wrong lease in a batch is lost and changes nothing."""
        action = self.action()
        lease = self.granted(action)
        with self.unchanged(action):
            assert self.store.renew_many([(action, FORGERIES[forgery](lease))], 2 * TTL) == [Renewal.LOST]


class Batches(_AcquireMany, _CompleteMany, _RenewMany):
    """`acquire_many`, `complete_many` and `renew_many`."""
