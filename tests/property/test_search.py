"""Every order of steps in a small world, played through on the gate's own code: no effect happens twice."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import pytest

from pgref.contracts.effects import RetrySafety, State
from pgref.errors import ReconcileTaken
from pgref.memory import MemoryEffectStore
from tests.property.world import Rules, Scene, Sink, World, first_world, moves

SAFE, UNSAFE = RetrySafety.SAFE, RetrySafety.UNSAFE
WORLDS_MAX = 100_000


@dataclass(frozen=True)
class Search:
    """What a breadth-first search has found."""

    rules: Rules
    worlds: list[World]
    followers: list[set[int]]
    """For each world that was left, the numbers of those that can come next."""
    duplicate: list[str] | None
    """The shortest way to an effect that happens twice; the search ends there."""
    untrue: list[str] | None
    """The shortest way to a key that is done although nothing happened."""

    def dead(self) -> list[World]:
        """Return the worlds from which no terminal one can be reached."""
        before: list[list[int]] = [[] for _ in self.worlds]
        for number, followers in enumerate(self.followers):
            for follower in followers:
                before[follower].append(number)
        alive = {number for number, world in enumerate(self.worlds) if _is_terminal(self.rules, world)}
        queue = deque(alive)
        while queue:
            new = set(before[queue.popleft()]) - alive
            alive |= new
            queue.extend(new)
        return [world for number, world in enumerate(self.worlds) if number not in alive]


def search(rules: Rules, worlds_max: int | None = None) -> Search:
    """Play every order of steps until nothing new comes up, or until an effect has happened twice.

    With ``worlds_max`` it ends there, having played all the shorter ones.
    """
    worlds = [first_world(rules)]
    numbers = {worlds[0]: 0}
    came_from: list[tuple[int, str]] = [(0, "")]
    followers: list[set[int]] = []
    untrue = None
    while len(followers) < len(worlds):
        if worlds_max is not None and len(worlds) >= worlds_max:
            break
        number = len(followers)
        followers.append(set())
        for name, move in moves(rules, worlds[number]):
            scene = Scene(rules, worlds[number])
            move(scene)
            world = scene.world()
            follower = numbers.setdefault(world, len(worlds))
            followers[number].add(follower)
            if follower < len(worlds):
                continue
            worlds.append(world)
            came_from.append((number, name))
            if max(world.applied) > 1:
                return Search(rules, worlds, followers, _way(came_from, follower), untrue)
            if untrue is None and _is_untrue(rules, world):
                untrue = _way(came_from, follower)
        assert len(worlds) <= WORLDS_MAX, "the search does not end"
    return Search(rules, worlds, followers, None, untrue)


def _way(came_from: list[tuple[int, str]], number: int) -> list[str]:
    way = []
    while number:
        number, name = came_from[number]
        way.append(name)
    return way[::-1]


def _is_untrue(rules: Rules, world: World) -> bool:
    return any(
        world.state(key) is State.DONE and not applied for key, applied in zip(rules.keys, world.applied, strict=True)
    )


def _is_terminal(rules: Rules, world: World) -> bool:
    """Done; an UNSAFE key may also wait for a person."""
    ends = {State.DONE, State.UNCERTAIN} if rules.safety is UNSAFE else {State.DONE}
    return all(world.state(key) in ends for key in rules.keys)


BY_THE_RULES = {
    "de-duplicating sink": (Rules(Sink.BY_KEY, SAFE), 5_000),
    "sink that compares fences": (Rules(Sink.FENCES, SAFE), 8_000),
    "sink that takes every call": (Rules(Sink.NOTHING, UNSAFE), 400),
    "sink that takes every call, three workers": (Rules(Sink.NOTHING, UNSAFE, workers=3), 1_000),
    "sink that takes every call, two keys": (
        Rules(Sink.NOTHING, UNSAFE, keys=("a", "b"), workers=1, calls_max=1),
        10_000,
    ),
    "effect that commits with its completion": (Rules(Sink.DATABASE, SAFE), 3_000),
}


@pytest.mark.parametrize(("rules", "worlds_min"), BY_THE_RULES.values(), ids=BY_THE_RULES)
def test_no_effect_happens_twice_and_every_way_goes_on(rules: Rules, worlds_min: int) -> None:
    """G1-G6, G11-G20, G27: whoever crashes and whatever is late, at most one effect, and no state without a way out."""
    found = search(rules)
    assert len(found.worlds) >= worlds_min, "a search of less than this has lost some of its moves"
    assert found.duplicate is None
    assert found.untrue is None
    assert not found.dead()


def test_the_first_steps_of_two_keys_on_one_resource() -> None:
    """G5, G6, G27: a rival that holds the resource opens no way to a duplicate, as far as the search goes here."""
    rules = Rules(Sink.FENCES, SAFE, keys=("a", "b"))
    found = search(rules, worlds_max=10_000)
    assert len(found.worlds) >= 10_000
    assert found.duplicate is None
    assert found.untrue is None
    assert search(replace(rules, seals=False), worlds_max=10_000).duplicate, "the search goes far enough to find one"


class GrantsExpiredAgain(MemoryEffectStore):
    """Breaks G3."""

    def _flip_if_expired(self, entry: Any, now: datetime) -> Any:
        flipped = super()._flip_if_expired(entry, now)
        if flipped is not None and flipped is not entry:
            flipped = replace(flipped, state=State.FREE, uncertain_at=None, expired=False)
            self._put(flipped)
        return flipped


class FreesWithRelease(MemoryEffectStore):
    """Breaks G15: the intent goes with the resource."""

    def release(self, action: Any, lease: Any) -> None:
        super().release(action, lease)
        self._put(replace(self._entries[action.key], state=State.FREE, uncertain_at=None))


class MintsNoSeal(MemoryEffectStore):
    """Breaks G27: the reconciler's fence is the uncertain attempt's own."""

    def _mint_seal(self, entry: Any, now: datetime) -> int:
        return int(entry.fence)


class LetsNoClaimExpire(MemoryEffectStore):
    """Breaks G18."""

    def begin_reconcile(self, action: Any, *arguments: Any, **options: Any) -> Any:
        entry = self._entries[action.key]
        if entry.claim is not None:
            raise ReconcileTaken
        return super().begin_reconcile(action, *arguments, **options)


BROKEN = {
    "an unsafe key is freed by a probe that saw nothing (G20)": Rules(Sink.NOTHING, UNSAFE, forces=True),
    "an unsafe effect is called safe (G20)": Rules(Sink.NOTHING, SAFE),
    "the sink is looked at without the seal (G27)": Rules(Sink.FENCES, SAFE, seals=False),
    "the seal is not above the attempt (G27)": Rules(Sink.FENCES, SAFE, store=MintsNoSeal),
    "a ruling does not name its claim (G18, G19)": Rules(Sink.FENCES, SAFE, checks_claim=False),
    "nobody looks before a key is freed (G20)": Rules(Sink.FENCES, SAFE, asks_probe=False),
    "an expired intent is granted again (G3)": Rules(Sink.NOTHING, UNSAFE, store=GrantsExpiredAgain),
    "release frees the key (G15)": Rules(Sink.NOTHING, UNSAFE, store=FreesWithRelease),
}


@pytest.mark.parametrize("rules", BROKEN.values(), ids=BROKEN)
def test_a_broken_rule_shows_as_an_effect_that_happens_twice(rules: Rules) -> None:
    """The search can fail: each of these rules is needed."""
    way = search(rules).duplicate
    assert way is not None
    assert len(way) > 4


def test_a_claim_that_never_expires_shows_as_a_state_without_a_way_out() -> None:
    """The search can fail here too: a reconciler that crashes with its claim would leave the key for ever (G18)."""
    found = search(Rules(Sink.DATABASE, SAFE, calls_max=1, store=LetsNoClaimExpire))
    assert found.duplicate is None
    assert found.dead()
