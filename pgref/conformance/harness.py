"""What the suites of the effect store share: a store with a clock set by hand, short forms, and scenes.

A scene is a key brought into one state, and the lease with which a test then tries its luck.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, ClassVar
from uuid import UUID, uuid4

import pytest

from pgref.clock import Clock, ManualClock
from pgref.conformance.capabilities import Capabilities
from pgref.contracts.effects import (
    Action,
    Contended,
    EffectRecord,
    EffectStore,
    Evidence,
    Granted,
    HistoryEntry,
    Lease,
    Outcome,
    Resolution,
    RetrySafety,
    State,
    Uncertain,
)
from pgref.errors import PgrefError

__all__ = ["ALL", "APPLIED", "NOT_APPLIED", "SCENES", "TTL", "EffectStoreHarness", "Scene"]

TTL = 60.0
ALL = 100_000
APPLIED = Resolution(applied=True, result="ruled", by="ann", why="saw it")
NOT_APPLIED = Resolution(applied=False, by="ann", why="not there")

# In a database that serves many tests, the time of a later test must not lie before that of an earlier one.
_FIRST_DAY = datetime(2030, 1, 1, tzinfo=UTC)
_days = count()

Trace = list[tuple[EffectRecord | None, list[HistoryEntry], list[Evidence]]]


class EffectStoreHarness:
    """Prepares ``self.store``, ``self.clock`` and a fresh prefix for names before each test."""

    capabilities: ClassVar[Capabilities] = Capabilities()
    backend: Any
    clock: ManualClock
    store: EffectStore
    token: str
    fingerprint: str | None = None
    leases: dict[str, Lease]
    afterwards: ExitStack

    def make_store(self, clock: Clock) -> EffectStore:
        """Return a store on ``clock``. To be overridden; can use ``self.backend``."""
        raise NotImplementedError

    def make_empty_store(self, clock: Clock) -> EffectStore:
        """Return a store of its own data, for tests of what counts or changes the data as a whole.

        Override it if stores from `make_store` share theirs; ``self.afterwards`` takes what is to be undone.
        """
        return self.make_store(clock)

    @pytest.fixture
    def conformance_backend(self) -> Any:
        """Override to request fixtures of your own; the value becomes ``self.backend``."""
        return None

    @pytest.fixture(autouse=True)
    def _prepared(self, conformance_backend: Any) -> Iterator[None]:
        self.backend = conformance_backend
        self.clock = ManualClock(_FIRST_DAY + timedelta(days=next(_days)))
        self.token = uuid4().hex
        self.leases = {}
        with ExitStack() as self.afterwards:
            self.store = self.make_store(self.clock)
            yield

    @pytest.fixture
    def empty_store(self, _prepared: None) -> None:
        """Give the test a store of its own data."""
        self.store = self.make_empty_store(self.clock)

    def second_store(self) -> EffectStore:
        """Return another client of the same data."""
        if not self.capabilities.shared_between_processes:
            pytest.skip("shared_between_processes")
        return self.make_store(self.clock)

    def tick(self, seconds: float = TTL) -> None:
        """Let time pass in the store. With 0 it says that the test depends on the exact time."""
        if not self.capabilities.manual_clock:
            pytest.skip("manual_clock")
        self.clock.tick(seconds)

    # Names

    def named(self, name: str) -> str:
        """Return ``name`` as no other test says it."""
        return f"{self.token}/{name}"

    def action(
        self,
        name: str = "key",
        *,
        on: str = "resource",
        safety: RetrySafety = RetrySafety.SAFE,
        fingerprint: str | None = None,
        payload: str | None = None,
    ) -> Action:
        """Return an action of this test."""
        return Action(self.named(name), self.named(on), fingerprint or self.fingerprint, safety, payload)

    # Short forms

    def acquire(self, action: Action, *, ttl: float = TTL, holder: UUID | None = None) -> Outcome:
        """Ask as a new holder."""
        return self.store.acquire(action, ttl, holder=holder)

    def granted(self, action: Action, *, ttl: float = TTL) -> Lease:
        """Acquire what must be granted. The key's newest lease is kept in ``self.leases``."""
        outcome = self.acquire(action, ttl=ttl)
        assert isinstance(outcome, Granted)
        self.leases[action.key] = outcome.lease
        return outcome.lease

    def marked(self, action: Action, *, ttl: float = TTL) -> Lease:
        """Acquire and mark uncertain; the resource stays held."""
        lease = self.granted(action, ttl=ttl)
        self.store.mark_uncertain(action, lease, "timeout", by="worker")
        return lease

    def flipped(self, action: Action) -> Lease:
        """Acquire, and let the intent expire into uncertain."""
        lease = self.granted(action)
        self.tick()
        assert isinstance(self.acquire(action), Uncertain)
        return lease

    def record(self, action: Action) -> EffectRecord:
        """Look up what must be known."""
        record = self.store.lookup(action.key)
        assert record is not None
        return record

    def state(self, action: Action) -> State:
        """Return the state of a key that must be known."""
        return self.record(action).state

    def events(self, action: Action) -> list[str]:
        """Return the names in the history."""
        return [entry.event for entry in self.store.history(action.key)]

    def mine(self, records: list[EffectRecord]) -> list[str]:
        """Return the keys of this test among ``records``, without their prefix."""
        return [r.key.removeprefix(self.named("")) for r in records if r.key.startswith(self.named(""))]

    # Nothing changed

    def trace(self, *actions: Action) -> Trace:
        """Return all that can be seen of keys without touching them."""
        keys = [action.key for action in actions]
        return [(self.store.lookup(key), self.store.history(key), self.store.evidence(key)) for key in keys]

    @contextmanager
    def unchanged(self, *actions: Action) -> Iterator[None]:
        """Check that the body leaves no trace on ``actions``."""
        before = self.trace(*actions)
        yield
        assert self.trace(*actions) == before

    @contextmanager
    def refused(self, error: type[PgrefError], *actions: Action) -> Iterator[pytest.ExceptionInfo[PgrefError]]:
        """Check that the body raises exactly ``error`` and leaves no trace on ``actions`` (G10)."""
        with self.unchanged(*actions), pytest.raises(error) as info:
            yield info
        assert info.type is error

    def resource_is(self, resource: str, *, held: bool, newest: int) -> None:
        """Check a resource by asking for it with a new key, which takes it if it is free."""
        outcome = self.acquire(self.action(f"probe {uuid4().hex}", on=resource))
        if held:
            assert isinstance(outcome, Contended)
        else:
            assert isinstance(outcome, Granted)
            assert outcome.lease.fence == newest + 1


@dataclass(frozen=True, slots=True)
class Scene:
    """``lease`` is the credential to try on ``action``; ``held`` and ``newest`` describe the resource."""

    action: Action
    lease: Lease
    held: bool
    newest: int = 1


def _live(suite: EffectStoreHarness) -> Scene:
    action = suite.action()
    return Scene(action, suite.granted(action), held=True)


def _released(suite: EffectStoreHarness) -> Scene:
    scene = _live(suite)
    suite.store.release(scene.action, scene.lease)
    return Scene(scene.action, scene.lease, held=False)


def _expired(suite: EffectStoreHarness) -> Scene:
    scene = _live(suite)
    suite.tick()
    return Scene(scene.action, scene.lease, held=False)


def _flipped(suite: EffectStoreHarness) -> Scene:
    action = suite.action()
    return Scene(action, suite.flipped(action), held=False)


def _marked(suite: EffectStoreHarness) -> Scene:
    action = suite.action()
    return Scene(action, suite.marked(action), held=True)


def _done(suite: EffectStoreHarness) -> Scene:
    scene = _live(suite)
    suite.store.complete(scene.action, scene.lease, "first")
    return Scene(scene.action, scene.lease, held=False)


def _abandoned(suite: EffectStoreHarness) -> Scene:
    scene = _live(suite)
    suite.store.abandon(scene.action, scene.lease)
    return Scene(scene.action, scene.lease, held=False)


def _ruled(suite: EffectStoreHarness, resolution: Resolution) -> Scene:
    scene = _marked(suite)
    suite.store.resolve_uncertain(scene.action, resolution)
    return Scene(scene.action, scene.lease, held=False)


def _regranted(suite: EffectStoreHarness) -> Scene:
    scene = _abandoned(suite)
    suite.granted(scene.action)
    return Scene(scene.action, scene.lease, held=True, newest=2)


def _retaken(suite: EffectStoreHarness) -> Scene:
    scene = _released(suite)
    suite.granted(suite.action("other"))
    return Scene(scene.action, scene.lease, held=True, newest=2)


def _overtaken(suite: EffectStoreHarness) -> Scene:
    scene = _expired(suite)
    suite.granted(suite.action("other"))
    return Scene(scene.action, scene.lease, held=True, newest=2)


def _reconciling(suite: EffectStoreHarness) -> Scene:
    scene = _flipped(suite)
    suite.store.begin_reconcile(scene.action, TTL)
    return Scene(scene.action, scene.lease, held=False, newest=2)


def _unknown(suite: EffectStoreHarness) -> Scene:
    action = suite.action()
    return Scene(action, Lease(action.resource, 1, uuid4(), suite.clock.now()), held=False, newest=0)


def _unknown_with_lease_of_another(suite: EffectStoreHarness) -> Scene:
    return Scene(suite.action(), suite.granted(suite.action("other")), held=True)


def _released_with_lease_of_another(suite: EffectStoreHarness) -> Scene:
    scene = _released(suite)
    return Scene(scene.action, suite.granted(suite.action("other")), held=True, newest=2)


SCENES: dict[str, Callable[[EffectStoreHarness], Scene]] = {
    "live": _live,
    "released": _released,
    "expired": _expired,
    "flipped": _flipped,
    "marked": _marked,
    "done": _done,
    "abandoned": _abandoned,
    "ruled applied": lambda suite: _ruled(suite, APPLIED),
    "ruled not applied": lambda suite: _ruled(suite, NOT_APPLIED),
    "regranted": _regranted,
    "retaken": _retaken,
    "overtaken": _overtaken,
    "reconciling": _reconciling,
    "unknown": _unknown,
    "unknown, lease of another": _unknown_with_lease_of_another,
    "released, lease of another": _released_with_lease_of_another,
}
