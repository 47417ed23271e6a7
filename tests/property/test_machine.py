"""PostgreSQL answers every sequence of calls as the executable specification does (G1-G28)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pgref.clock import ManualClock
from pgref.contracts.effects import Action, Granted, Lease, Outcome, ReconcileClaim, Resolution, RetrySafety
from pgref.memory import MemoryEffectStore
from pgref.postgres import Stores
from pgref.postgres.schema import quoted
from tests.property.pair import Pair

KEYS = ("a", "b", "c")
RESOURCES = ("r", "s")
WORKERS = ("ann", "bob", "cid")
GHOST = "ghost"
"""Where the leases of crashed workers live on: in messages that are still on their way."""
LIMITS = st.sampled_from([1000, 1, 2])
TTLS = st.sampled_from([60.0, 10.0, 30.5, 0.001])
RESULTS = st.sampled_from([None, "", "1", "2"])

Held = tuple[Action, Lease]
Lie = Callable[[Held, "EffectStoreMachine"], Held]


def _forged(**changes: Callable[[Lease], Any]) -> Lie:
    def forge(held: Held, _: EffectStoreMachine) -> Held:
        action, lease = held
        return action, replace(lease, **{name: change(lease) for name, change in changes.items()})

    return forge


def _elsewhere(held: Held, _: EffectStoreMachine) -> Held:
    action, lease = held
    other = _other(RESOURCES, lease.resource)
    return replace(action, resource=other), replace(lease, resource=other)


def _other(names: tuple[str, ...], name: str) -> str:
    return names[(names.index(name) + 1) % len(names)] if name in names else names[0]


LIES: dict[str, Lie] = {
    "none": lambda held, _: held,
    "other key": lambda held, _: (replace(held[0], key=_other(KEYS, held[0].key)), held[1]),
    "other input": lambda held, _: (replace(held[0], fingerprint="forged"), held[1]),
    "no input": lambda held, _: (replace(held[0], fingerprint=None), held[1]),
    "other action's resource": lambda held, _: (
        replace(held[0], resource=_other(RESOURCES, held[0].resource)),
        held[1],
    ),
    "other resource": _elsewhere,
    "unknown resource": lambda held, _: (replace(held[0], resource="x"), replace(held[1], resource="x")),
    "lease's resource": _forged(resource=lambda lease: _other(RESOURCES, lease.resource)),
    "lower fence": _forged(fence=lambda lease: max(1, lease.fence - 1)),
    "higher fence": _forged(fence=lambda lease: lease.fence + 1),
    "holder": _forged(holder=lambda lease: UUID(int=lease.holder.int + 2**64)),
    "fence of another": lambda held, machine: (
        held[0],
        replace(held[1], fence=machine.newest.get(held[0].resource, 1)),
    ),
}
honest = st.just("none")
lies = st.one_of(honest, honest, honest, st.sampled_from(sorted(LIES)))
credentials = st.tuples(st.sampled_from([*WORKERS, GHOST]), st.integers(0, 5), lies)
actions = st.builds(
    Action,
    key=st.sampled_from(KEYS),
    resource=st.sampled_from(RESOURCES),
    fingerprint=st.sampled_from([None, None, None, None, "f", "g"]),
    retry_safety=st.sampled_from(RetrySafety),
    payload=st.sampled_from(["p", "p", None]),
)
batches = st.lists(actions, max_size=3, unique_by=lambda action: action.key)
resolutions = st.one_of(
    st.builds(Resolution, applied=st.just(True), result=RESULTS, by=st.just("ann")),
    st.builds(Resolution, applied=st.just(False), force_retryable=st.booleans(), why=st.sampled_from(["", "looked"])),
)


class EffectStoreMachine(RuleBasedStateMachine):
    """Three workers, three keys, two resources. What a worker was granted stays in its hand, also when it is stale."""

    @staticmethod
    def subject(clock: ManualClock) -> Any:
        """Return an empty store to compare with the model."""
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.pair = Pair(MemoryEffectStore(self.clock), type(self).subject(self.clock))
        self.hands: dict[str, list[Held]] = {worker: [] for worker in (*WORKERS, GHOST)}
        self.claims: list[ReconcileClaim] = []
        self.edges: list[datetime] = []
        self.newest: dict[str, int] = {}
        self.minted = 0

    # Names

    def _holder(self) -> UUID:
        self.minted += 1
        return UUID(int=self.minted)

    def _asker(self, worker: str, key: str, *, again: bool) -> UUID:
        """Return a new holder, or the one with which ``worker`` was granted ``key`` last."""
        known = [lease.holder for action, lease in self.hands[worker] if action.key == key]
        return known[-1] if again and known else self._holder()

    def _credential(self, chosen: tuple[str, int, str]) -> Held:
        worker, index, lie = chosen
        hand = self.hands[worker] or [held for hand in self.hands.values() for held in hand]
        nobody = (Action("a", "r"), Lease("r", 1, UUID(int=0), self.clock.now()))
        held = hand[-1 - index % len(hand)] if hand else nobody
        return LIES[lie](held, self)

    def _to_reconcile(self, index: int, action: Action) -> Action:
        """Return an action that is uncertain, if there is one and ``index`` is not 0."""
        uncertain = self.pair.model.backlog(1000)
        return uncertain[index % len(uncertain)].action if index and uncertain else action

    def _took(self, worker: str, action: Action, outcome: Outcome) -> None:
        if not isinstance(outcome, Granted):
            return
        lease = outcome.lease
        repeated = any(lease.holder == known.holder for hand in self.hands.values() for _, known in hand)
        assert repeated or lease.fence > self.newest.get(action.resource, 0), "fences grow (G8)"
        self.newest[action.resource] = max(self.newest.get(action.resource, 0), lease.fence)
        self.hands[worker].append((action, lease))
        self.edges.append(lease.expires_at)

    # Asking

    @initialize(asked=batches)
    def begin_with_some_grants(self, asked: list[Action]) -> None:
        for worker, action in zip(WORKERS, asked, strict=False):
            self.acquire(worker, action, 60.0)

    @rule(worker=st.sampled_from(WORKERS), action=actions, ttl=TTLS)
    def acquire(self, worker: str, action: Action, ttl: float) -> None:
        self._took(worker, action, self.pair.ask("acquire", action, ttl, holder=self._holder()))

    @rule(worker=st.sampled_from(WORKERS), action=actions, ttl=TTLS)
    def acquire_again(self, worker: str, action: Action, ttl: float) -> None:
        holder = self._asker(worker, action.key, again=True)
        self._took(worker, action, self.pair.ask("acquire", action, ttl, holder=holder))

    @rule(worker=st.sampled_from(WORKERS), asked=batches, ttl=TTLS, again=st.booleans())
    def acquire_many(self, worker: str, asked: list[Action], ttl: float, again: bool) -> None:
        holders = [self._asker(worker, action.key, again=again) for action in asked]
        outcomes = self.pair.ask("acquire_many", asked, ttl, holders=holders)
        if isinstance(outcomes, list):
            for action, outcome in zip(asked, outcomes, strict=True):
                self._took(worker, action, outcome)

    # Calls that need a lease

    @rule(chosen=credentials, result=RESULTS)
    def complete(self, chosen: tuple[str, int, str], result: str | None) -> None:
        self.pair.ask("complete", *self._credential(chosen), result)

    @rule(chosen=st.lists(credentials, max_size=4, unique=True), result=RESULTS)
    def complete_many(self, chosen: list[tuple[str, int, str]], result: str | None) -> None:
        held = [self._credential(one) for one in chosen]
        completions = {action.key: (action, lease, result) for action, lease in held}
        self.pair.ask("complete_many", list(completions.values()))

    @rule(chosen=credentials, ttl=TTLS)
    def renew(self, chosen: tuple[str, int, str], ttl: float) -> None:
        renewed = self.pair.ask("renew", *self._credential(chosen), ttl)
        if isinstance(renewed, Lease):
            self.edges.append(renewed.expires_at)

    @rule(chosen=st.lists(credentials, max_size=4), ttl=TTLS)
    def renew_many(self, chosen: list[tuple[str, int, str]], ttl: float) -> None:
        self.pair.ask("renew_many", [self._credential(one) for one in chosen], ttl)
        self.edges.append(self.clock.now() + timedelta(seconds=ttl))

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=3, unique=True), off=st.sampled_from([0, 0, -1, 1]), ttl=TTLS)
    def renew_running(self, keys: list[str], off: int, ttl: float) -> None:
        known = {key: self.pair.model.lookup(key) for key in keys}
        attempts = [(key, max(1, (record.fence if record else 1) + off)) for key, record in known.items()]
        self.pair.ask("renew_running", attempts, ttl)
        self.edges.append(self.clock.now() + timedelta(seconds=ttl))

    @rule(chosen=credentials, reason=st.sampled_from(["timeout", ""]), by=st.sampled_from(["", "ann"]))
    def mark_uncertain(self, chosen: tuple[str, int, str], reason: str, by: str) -> None:
        self.pair.ask("mark_uncertain", *self._credential(chosen), reason, by=by)

    @rule(chosen=credentials)
    def release(self, chosen: tuple[str, int, str]) -> None:
        self.pair.ask("release", *self._credential(chosen))

    @rule(chosen=credentials, due_in=st.sampled_from([5.0, None, 60.0]))
    def abandon(self, chosen: tuple[str, int, str], due_in: float | None) -> None:
        self.pair.ask("abandon", *self._credential(chosen), due_in_seconds=due_in)
        self.edges.append(self.clock.now() + timedelta(seconds=due_in or 0))

    # Reconciliation

    @rule(chosen=st.tuples(st.integers(0, 3), actions), ttl=TTLS, again=st.booleans(), early=st.booleans())
    def begin_reconcile(self, chosen: tuple[int, Action], ttl: float, again: bool, early: bool) -> None:
        holder = self.claims[-1].holder if again and self.claims else self._holder()
        claim = self.pair.ask("begin_reconcile", self._to_reconcile(*chosen), ttl, holder=holder, early=early)
        if isinstance(claim, ReconcileClaim):
            self._claimed(claim)

    @rule(limit=LIMITS, ttl=TTLS)
    def claim_backlog(self, limit: int, ttl: float) -> None:
        for _, claim in self.pair.ask("claim_backlog", limit, ttl, holder=self._holder()):
            self._claimed(claim)

    def _claimed(self, claim: ReconcileClaim) -> None:
        self.claims.append(claim)
        self.edges.append(claim.expires_at)

    @precondition(lambda self: self.claims)
    @rule(named=st.integers(0, 3), seconds=st.sampled_from([60.0, 5.0, None]), note=st.sampled_from(["", "slow"]))
    def defer_reconcile(self, named: int, seconds: float | None, note: str) -> None:
        self.pair.ask("defer_reconcile", self.claims[-1 - named % len(self.claims)], seconds, note=note, by="ann")
        self.edges.append(self.clock.now() + timedelta(seconds=seconds or 0))

    @rule(chosen=st.tuples(st.integers(0, 3), actions), resolution=resolutions, named=st.integers(0, 3))
    def resolve_uncertain(self, chosen: tuple[int, Action], resolution: Resolution, named: int) -> None:
        claim = self.claims[-1 - named % len(self.claims)] if named and self.claims else None
        self.pair.ask("resolve_uncertain", self._to_reconcile(*chosen), resolution, claim=claim)

    # Sweeping

    @rule(limit=LIMITS)
    def expire_intents(self, limit: int) -> None:
        self.pair.ask("expire_intents", limit)

    @rule(limit=LIMITS, again_after=st.sampled_from([5.0, 60.0]))
    def claim_due(self, limit: int, again_after: float) -> None:
        self.pair.ask("claim_due", limit, again_after)

    @rule(limit=LIMITS)
    def sweep(self, limit: int) -> None:
        self.expire_intents(limit)
        self.claim_backlog(limit, 10.0)
        self.claim_due(limit, 5.0)

    @rule(
        limit=LIMITS,
        prefix=st.sampled_from(["", "", "a"]),
        reason=st.sampled_from(["", "", "expired"]),
        age=st.sampled_from([None, None, 9.75]),
        parked=st.sampled_from([None, None, True, False]),
        follow=st.booleans(),
    )
    def backlog(
        self, limit: int, prefix: str, reason: str, age: float | None, parked: bool | None, follow: bool
    ) -> None:
        uncertain = self.pair.model.backlog(1)
        after = uncertain[0] if follow and uncertain else None
        asked = {"prefix": prefix, "reason": reason, "older_than_seconds": age, "parked": parked, "after": after}
        self.pair.ask("backlog", limit, **asked)

    @rule(older_than=st.sampled_from([0.001, 60.0]), limit=LIMITS)
    def retain(self, older_than: float, limit: int) -> None:
        self.pair.ask("retain", older_than, limit)

    # After a failover

    @precondition(lambda self: self.minted % 5 == 0)
    @rule(above=st.sampled_from([0, 1, -1, 5]), why=st.sampled_from(["", "restored"]))
    def raise_fences(self, above: int, why: str) -> None:
        floor = max([1, *self.newest.values()]) + above
        self.pair.ask("raise_fences", max(1, floor), by="ann", why=why)

    # Time and crashes

    @rule(seconds=st.sampled_from([0.000001, 1.0, 9.75, 100.0]))
    def tick(self, seconds: float) -> None:
        self.clock.tick(seconds)

    @rule(index=st.integers(0, 5), microseconds=st.sampled_from([0, -1, 1, 1_000_000]))
    def tick_to_an_edge(self, index: int, microseconds: int) -> None:
        ahead = sorted({edge for edge in self.edges if edge > self.clock.now()})
        if ahead:
            edge = ahead[index % len(ahead)] + timedelta(microseconds=microseconds)
            self.clock.tick(max(0.0, (edge - self.clock.now()).total_seconds()))

    @rule(
        chosen=credentials, microseconds=st.sampled_from([0, -1]), call=st.sampled_from(["renew", "abandon", "acquire"])
    )
    def act_at_the_edge(self, chosen: tuple[str, int, str], microseconds: int, call: str) -> None:
        """Call when the lease has just expired, and when it is about to."""
        action, lease = self._credential(chosen)
        known = self.pair.model.lookup(action.key)
        if known is not None and known.expires_at > self.clock.now():
            edge = known.expires_at + timedelta(microseconds=microseconds)
            self.clock.tick((edge - self.clock.now()).total_seconds())
        match call:
            case "acquire":
                self.pair.ask("acquire", action, 60.0, holder=lease.holder)
            case "renew":
                self.pair.ask("renew", action, lease, 60.0)
            case _:
                self.pair.ask("abandon", action, lease, due_in_seconds=5.0)

    @rule(worker=st.sampled_from(WORKERS))
    def crash(self, worker: str) -> None:
        self.hands[GHOST] += self.hands[worker]
        self.hands[worker] = []

    @invariant()
    def nothing_tells_them_apart(self) -> None:
        self.pair.compare(KEYS)


def test_no_sequence_of_calls_tells_memory_and_postgres_apart(stores: Stores) -> None:
    """G1-G28: the same answers and the same visible state after every call, whatever the sequence."""

    class Machine(EffectStoreMachine):
        @staticmethod
        def subject(clock: ManualClock) -> Any:
            _empty(stores)
            return Stores.open(stores.engine, schema=stores.schema, clock=clock).effects

    run_state_machine_as_test(Machine)


def _empty(stores: Stores) -> None:
    """Begin anew: the watermark of expiry and the floor of fences do not go back by themselves."""
    schema = quoted(stores.schema)
    tables = ", ".join(f"{schema}.effect_{name}" for name in ("action", "resource", "history", "evidence", "store"))
    with stores.engine.begin() as connection:
        connection.exec_driver_sql(f"TRUNCATE {tables} RESTART IDENTITY")
        connection.exec_driver_sql(
            f"INSERT INTO {schema}.effect_store (granted_before, fence_floor) VALUES ('-infinity', 0)"
        )
