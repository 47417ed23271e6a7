"""When a lease ends, and which arguments are refused (G23, G24)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pgref.conformance.harness import TTL, EffectStoreHarness
from pgref.contracts.effects import Action, Contended, Granted, InFlight, Resolution, Uncertain
from pgref.errors import InvalidArgument

__all__ = ["Limits"]


class Limits(EffectStoreHarness):
    """When a lease ends, and which arguments are refused."""

    def test_live_until_just_before_expiry(self) -> None:
        """G23: a lease is live while now < expiry."""
        action = self.action()
        self.granted(action)
        self.tick(TTL - 0.001)
        assert isinstance(self.acquire(action), InFlight)
        assert isinstance(self.acquire(self.action("other")), Contended)

    def test_expired_at_expiry(self) -> None:
        """G23: at the moment of expiry key and resource are no longer held."""
        action = self.action()
        self.granted(action)
        self.tick(TTL)
        assert isinstance(self.acquire(self.action("other")), Granted)
        assert isinstance(self.acquire(action), Uncertain)

    @pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf"), 1e12, True, "60", None])
    def test_ttl(self, ttl: Any) -> None:
        """G24, G10: a ttl out of its limits is refused by every call that takes one, and changes nothing."""
        action = self.action()
        lease = self.granted(action)
        calls: list[Callable[[], object]] = [
            lambda: self.store.acquire(self.action("other", on="other"), ttl),
            lambda: self.store.renew(action, lease, ttl),
            lambda: self.store.renew_many([(action, lease)], ttl),
            lambda: self.store.begin_reconcile(action, ttl),
            lambda: self.store.claim_backlog(1, ttl),
            lambda: self.store.renew_running([(action.key, lease.fence)], ttl),
            lambda: self.store.claim_due(1, ttl),
        ]
        for call in calls:
            with self.refused(InvalidArgument, action, self.action("other")):
                call()
        if ttl is not None:
            with self.refused(InvalidArgument, action):
                self.store.abandon(action, lease, due_in_seconds=ttl)

    @pytest.mark.parametrize("limit", [0, -1, 100_001, True, 1.0, None])
    def test_limits(self, limit: Any) -> None:
        """G24: a batch size out of its limits is refused."""
        calls: list[Callable[[], object]] = [
            lambda: self.store.expire_intents(limit),
            lambda: self.store.backlog(limit),
            lambda: self.store.claim_backlog(limit, TTL),
            lambda: self.store.claim_due(limit, TTL),
            lambda: self.store.retain(TTL, limit),
        ]
        for call in calls:
            with pytest.raises(InvalidArgument):
                call()

    @pytest.mark.parametrize("key", ["", "x" * 513, "ä" * 257, "a\0b", "\ud800", 1, None])
    def test_keys(self, key: Any) -> None:
        """G24: a key or resource that cannot be stored is refused."""
        calls: list[Callable[[], object]] = [
            lambda: Action(key, "resource"),
            lambda: Action("key", key),
            lambda: self.store.lookup(key),
            lambda: self.store.history(key),
            lambda: self.store.evidence(key),
        ]
        for call in calls:
            with pytest.raises(InvalidArgument):
                call()

    @pytest.mark.parametrize("name", ["x" * 479, "ä" * 239, "'; --%s%%", "\n\t\\"])
    def test_odd_names(self, name: str) -> None:
        """G24: names up to 512 bytes are kept as they are, whatever they contain."""
        action = self.action(name, on=name)
        self.store.complete(action, self.granted(action), name)
        assert (self.record(action).key, self.record(action).resource) == (action.key, action.resource)

    @pytest.mark.parametrize("text", ["a\0b", "\ud800", 1, b"bytes"])
    def test_text_that_cannot_be_stored(self, text: Any) -> None:
        """G24: a result that cannot be stored is refused, and leaves the intent for a completion with a marker."""
        action = self.action()
        lease = self.granted(action)
        with self.refused(InvalidArgument, action):
            self.store.complete(action, lease, text)
        with self.refused(InvalidArgument, action):
            self.store.mark_uncertain(action, lease, text)
        with self.refused(InvalidArgument, action):
            self.store.mark_uncertain(action, lease, "reason", by=text)
        assert self.store.complete(action, lease, "marker") == "marker"

    def test_ruled_result_that_cannot_be_stored(self) -> None:
        """G24, G10: a ruling whose result cannot be stored is refused and leaves the key uncertain."""
        action = self.action()
        self.marked(action)
        with self.refused(InvalidArgument, action):
            self.store.resolve_uncertain(action, Resolution(applied=True, result="a\0b"))

    def test_unknown_key(self) -> None:
        """G10: looking at a key that was never granted finds nothing and leaves nothing."""
        key = self.named("never")
        assert self.store.history(key) == []
        assert self.store.evidence(key) == []
        assert self.store.lookup(key) is None
