"""A small world for exhaustive search: workers, calls in the air and a sink around the real `MemoryEffectStore`.

The transition rules of the gate are its own code; this module only says what workers, networks and sinks can do, one
step at a time. A `World` is canonical: time is counted from now, fences are ranks, holders are numbered, and what
nothing judges by (history, evidence, attempt numbers, past times) is left out. So two worlds that behave alike are
equal, and the number of worlds is finite although time, fences and attempts grow without end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum, auto
from itertools import count
from typing import Any, TypeVar
from uuid import UUID

from pgref.clock import ManualClock
from pgref.contracts.effects import Action, Granted, Lease, ReconcileClaim, Resolution, RetrySafety, State
from pgref.errors import FenceStale, PgrefError
from pgref.memory import MemoryEffectStore

__all__ = ["Call", "Move", "Rules", "Scene", "Sink", "Worker", "World", "first_world", "moves"]

RESOURCE = "r"
NOW = ManualClock().now()
HOLDERS = [UUID(int=number) for number in range(1, 100)]

T = TypeVar("T")


class Sink(Enum):
    """What stands behind the gate and takes the effect."""

    BY_KEY = auto()
    """De-duplicates by the idempotency key."""
    FENCES = auto()
    """Compares fences and can be sealed."""
    NOTHING = auto()
    """Takes every call."""
    DATABASE = auto()
    """The effect commits together with its completion."""


@dataclass(frozen=True)
class Rules:
    """Who plays, and the policy (design/celery.md). The defaults are the policy; other values break it."""

    sink: Sink
    safety: RetrySafety
    keys: tuple[str, ...] = ("a",)
    workers: int = 2
    ttl: float = 1.0
    calls_max: int = 2
    """Most calls that are in the air at once."""
    asks_probe: bool = True
    seals: bool = True
    forces: bool = False
    checks_claim: bool = True
    """A ruling names the claim under which it was found, so that it does not free a later attempt."""
    store: type[MemoryEffectStore] = MemoryEffectStore

    def action(self, key: str) -> Action:
        return Action(key, RESOURCE, retry_safety=self.safety)


@dataclass(frozen=True, slots=True)
class Call:
    """A call to the sink that is still in the air."""

    key: str
    fence: int
    holder: UUID


@dataclass(frozen=True, slots=True)
class Worker:
    """A process and what it remembers. ``lease`` and ``claim`` are gone when it crashes."""

    doing: str = "idle"
    key: str = ""
    lease: Lease | None = None
    claim: ReconcileClaim | None = None


@dataclass(frozen=True, slots=True)
class World:
    """Everything that decides what can happen next."""

    entries: tuple[Any, ...]
    resource: Any
    workers: tuple[Worker, ...]
    air: tuple[Call, ...]
    applied: tuple[int, ...]
    """How often each key's effect has happened."""
    seen: int
    """The sink's fence."""

    def state(self, key: str) -> State:
        return next((entry.state for entry in self.entries if entry.key == key), State.FREE)


Move = tuple[str, Callable[["Scene"], None]]


class Scene:
    """A world in motion: for one move, then it is canonical again."""

    def __init__(self, rules: Rules, world: World) -> None:
        self.rules = rules
        self.clock = ManualClock(NOW)
        self.store = rules.store(self.clock)
        self.store._entries = {entry.key: entry for entry in world.entries}
        self.store._resources = {} if world.resource is None else {RESOURCE: world.resource}
        self.workers = list(world.workers)
        self.air = list(world.air)
        self.applied = dict(zip(rules.keys, world.applied, strict=True))
        self.seen = world.seen
        self._holders = count(1_000)

    def holder(self) -> UUID:
        return UUID(int=next(self._holders))

    def world(self) -> World:
        names = _Names(self)
        entries = sorted(self.store._entries.values(), key=lambda entry: entry.key)
        resource = self.store._resources.get(RESOURCE)
        return World(
            tuple(names.entry(entry) for entry in entries),
            resource and names.resource(resource),
            tuple(names.worker(worker) for worker in sorted(self.workers, key=_order)),
            tuple(names.call(call) for call in sorted(self.air, key=lambda call: (call.fence, call.key))),
            tuple(self.applied.values()),
            names.fences[self.seen],
        )


def _with(value: T, **changes: Any) -> T:
    """Return ``value`` with ``changes``: mostly there are none, and a search makes millions of values."""
    if all(getattr(value, name) == change for name, change in changes.items()):
        return value
    return replace(value, **changes)  # type: ignore[type-var]


def _order(worker: Worker) -> tuple[str, str, int, int]:
    lease, claim = worker.lease, worker.claim
    return worker.doing, worker.key, lease.fence if lease else 0, claim.fence if claim else 0


class _Names:
    """Fences become ranks, holders numbers in order of appearance, and times what is left of them."""

    def __init__(self, scene: Scene) -> None:
        self._now = scene.clock.now()
        self._holders: dict[UUID, UUID] = {}
        self.fences = {fence: rank for rank, fence in enumerate(sorted(_fences(scene)))}

    def _holder(self, holder: UUID) -> UUID:
        return self._holders.setdefault(holder, HOLDERS[len(self._holders)])

    def _time(self, time: datetime) -> datetime:
        return NOW + max(time - self._now, timedelta())

    def resource(self, resource: Any) -> Any:
        return _with(resource, fence=self.fences[resource.fence], granted_fence=self.fences[resource.granted_fence])

    def entry(self, entry: Any) -> Any:
        return _with(
            entry,
            fence=self.fences[entry.fence],
            holder=self._holder(entry.holder),
            expires_at=self._time(entry.expires_at),
            claim=entry.claim and self._claim(entry.claim),
            next_look_at=entry.next_look_at and self._time(entry.next_look_at),
            looks=0,
            created_at=NOW,
            granted_at=NOW,
            uncertain_at=entry.uncertain_at and NOW,
            completed_at=entry.completed_at and NOW,
            attempt=1,
            history=(),
            evidence=(),
        )

    def _claim(self, claim: ReconcileClaim) -> ReconcileClaim:
        fence, holder, expires_at = self.fences[claim.fence], self._holder(claim.holder), self._time(claim.expires_at)
        return _with(claim, fence=fence, holder=holder, expires_at=expires_at)

    def worker(self, worker: Worker) -> Worker:
        lease, claim = worker.lease, worker.claim
        if lease is not None:
            lease = _with(lease, fence=self.fences[lease.fence], holder=self._holder(lease.holder), expires_at=NOW)
        return _with(worker, lease=lease, claim=claim and self._claim(claim))

    def call(self, call: Call) -> Call:
        return _with(call, fence=self.fences[call.fence], holder=self._holder(call.holder))


def _fences(scene: Scene) -> set[int]:
    found = {0, scene.seen, *(call.fence for call in scene.air)}
    for resource in scene.store._resources.values():
        found |= {resource.fence, resource.granted_fence}
    for entry in scene.store._entries.values():
        found |= {entry.fence, entry.claim.fence if entry.claim else 0}
    for worker in scene.workers:
        found |= {worker.lease.fence if worker.lease else 0, worker.claim.fence if worker.claim else 0}
    return found


def first_world(rules: Rules) -> World:
    """Return the world in which nothing has happened yet."""
    return World((), None, (Worker(),) * rules.workers, (), (0,) * len(rules.keys), 0)


def moves(rules: Rules, world: World) -> Iterator[Move]:
    """Yield everything that can happen next."""
    yield "tick", _tick
    for index, call in enumerate(world.air):
        yield f"lose {call.key}{call.fence}", _bound(_lose, index)
        yield f"land {call.key}{call.fence}", _bound(_land, index, answered=True)
        if any(_waits_for(worker, call) for worker in world.workers):
            yield f"land {call.key}{call.fence}, answer lost", _bound(_land, index, answered=False)
    for index, worker in enumerate(world.workers):
        if worker in world.workers[:index]:
            continue
        for name, step in _steps(rules, world, worker):
            yield f"worker {index}: {name}", _bound(_act, index, step=step)


def _bound(function: Callable[..., None], *arguments: Any, **options: Any) -> Callable[[Scene], None]:
    return lambda scene: function(scene, *arguments, **options)


def _tick(scene: Scene) -> None:
    scene.clock.tick(1.0)


# The network and the sink


def _lose(scene: Scene, index: int) -> None:
    del scene.air[index]


def _land(scene: Scene, index: int, *, answered: bool) -> None:
    call = scene.air.pop(index)
    taken = _LANDINGS[scene.rules.sink](scene, call)
    for number, worker in enumerate(scene.workers):
        if answered and _waits_for(worker, call):
            scene.workers[number] = replace(worker, doing="answered" if taken else "refused")


def _waits_for(worker: Worker, call: Call) -> bool:
    return worker.doing == "sent" and worker.lease is not None and worker.lease.holder == call.holder


def _by_key(scene: Scene, call: Call) -> bool:
    scene.applied[call.key] = 1
    return True


def _by_fence(scene: Scene, call: Call) -> bool:
    if call.fence < scene.seen:
        return False
    scene.seen = call.fence
    return _always(scene, call)


def _always(scene: Scene, call: Call) -> bool:
    scene.applied[call.key] += 1
    return True


def _with_completion(scene: Scene, call: Call) -> bool:
    """Commit what `complete_within` is asked to carry: anything but a completion by this call rolls back."""
    known = scene.store.lookup(call.key)
    lease = Lease(RESOURCE, call.fence, call.holder, NOW)
    if known is None or known.state is State.DONE:
        return False
    try:
        scene.store.complete(scene.rules.action(call.key), lease, "1")
    except PgrefError:
        return False
    return _always(scene, call)


_LANDINGS: dict[Sink, Callable[[Scene, Call], bool]] = {
    Sink.BY_KEY: _by_key,
    Sink.FENCES: _by_fence,
    Sink.NOTHING: _always,
    Sink.DATABASE: _with_completion,
}


# A worker. A step returns what the worker is and knows afterwards; a refusal sends it back to idle.

Step = Callable[[Scene, Worker], Worker]
IDLE = Worker()


def _act(scene: Scene, index: int, *, step: Step) -> None:
    try:
        scene.workers[index] = step(scene, scene.workers[index])
    except PgrefError:
        scene.workers[index] = IDLE


def _steps(rules: Rules, world: World, worker: Worker) -> Iterator[tuple[str, Step]]:
    if worker.doing == "idle":
        for key in rules.keys:
            yield f"ask for {key}", _asking(key)
            if world.state(key) is not State.FREE:
                yield f"reconcile {key}", _reconciling(key)
        return
    yield "crash", lambda *_: IDLE
    if worker.doing != "granted" or len(world.air) < rules.calls_max:
        yield from _STEPS[worker.doing]
    if worker.doing in {"granted", "sent"}:
        yield "renew", _renew


def _asking(key: str) -> Step:
    def ask(scene: Scene, _: Worker) -> Worker:
        outcome = scene.store.acquire(scene.rules.action(key), scene.rules.ttl, holder=scene.holder())
        return Worker("granted", key, outcome.lease) if isinstance(outcome, Granted) else IDLE

    return ask


def _reconciling(key: str) -> Step:
    def reconcile(scene: Scene, _: Worker) -> Worker:
        if not scene.rules.asks_probe:
            scene.store.resolve_uncertain(scene.rules.action(key), Resolution(applied=False))
            return IDLE
        claim = scene.store.begin_reconcile(scene.rules.action(key), scene.rules.ttl, holder=scene.holder())
        return Worker("claimed", key, claim=claim)

    return reconcile


def _renew(scene: Scene, worker: Worker) -> Worker:
    assert worker.lease is not None
    lease = scene.store.renew(scene.rules.action(worker.key), worker.lease, scene.rules.ttl)
    return replace(worker, lease=lease)


def _send(scene: Scene, worker: Worker) -> Worker:
    assert worker.lease is not None
    scene.air.append(Call(worker.key, worker.lease.fence, worker.lease.holder))
    return replace(worker, doing="sent")


def _abandon(scene: Scene, worker: Worker) -> Worker:
    assert worker.lease is not None
    scene.store.abandon(scene.rules.action(worker.key), worker.lease)
    return IDLE


def _complete(scene: Scene, worker: Worker) -> Worker:
    assert worker.lease is not None
    if scene.rules.sink is not Sink.DATABASE:
        scene.store.complete(scene.rules.action(worker.key), worker.lease, "1")
    return IDLE


def _mark(scene: Scene, worker: Worker) -> Worker:
    assert worker.lease is not None
    scene.store.mark_uncertain(scene.rules.action(worker.key), worker.lease, "no answer")
    return replace(worker, doing="marked")


def _release(scene: Scene, worker: Worker) -> Worker:
    assert worker.lease is not None
    scene.store.release(scene.rules.action(worker.key), worker.lease)
    return IDLE


def _seal_or_look(scene: Scene, worker: Worker) -> Worker:
    assert worker.claim is not None
    if scene.rules.sink is not Sink.FENCES or not scene.rules.seals:
        return _look(scene, worker)
    if worker.claim.fence < scene.seen:
        raise FenceStale("the sink has seen a higher fence")
    scene.seen = worker.claim.fence
    return replace(worker, doing="sealed")


def _look(scene: Scene, worker: Worker) -> Worker:
    return replace(worker, doing="saw it" if scene.applied[worker.key] else "saw nothing")


def _rule(scene: Scene, worker: Worker) -> Worker:
    assert worker.claim is not None
    applied = worker.doing == "saw it"
    resolution = Resolution(applied, "1" if applied else None, force_retryable=scene.rules.forces and not applied)
    claim = worker.claim if scene.rules.checks_claim else None
    scene.store.resolve_uncertain(scene.rules.action(worker.key), resolution, claim=claim)
    return IDLE


_STEPS: dict[str, list[tuple[str, Step]]] = {
    "granted": [("send", _send), ("abandon", _abandon)],
    "sent": [("give up", _mark)],
    "answered": [("complete", _complete)],
    "refused": [("mark", _mark)],
    "marked": [("release", _release)],
    "claimed": [("seal or look", _seal_or_look)],
    "sealed": [("look", _look)],
    "saw it": [("rule applied", _rule)],
    "saw nothing": [("rule not applied", _rule)],
}
