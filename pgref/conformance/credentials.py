"""What a lease entitles to: the five calls that need one, over every state of the key and every forgery."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from pgref.conformance.harness import ALL, SCENES, TTL, EffectStoreHarness
from pgref.contracts.effects import Action, Contended, EffectStore, Granted, HistoryEntry, InFlight, Lease, State
from pgref.errors import FenceError, FenceStale, InvalidArgument, LeaseLost, NotHolder, ResourceMismatch

__all__ = ["BY_FORGERY", "BY_SCENE", "CALLS", "FORGERIES", "Credentials"]

CALLS: dict[str, Callable[[EffectStore, Action, Lease], object]] = {
    "complete": lambda store, action, lease: store.complete(action, lease, "late"),
    "renew": lambda store, action, lease: store.renew(action, lease, TTL),
    "mark_uncertain": lambda store, action, lease: store.mark_uncertain(action, lease, "timeout"),
    "release": lambda store, action, lease: store.release(action, lease),
    "abandon": lambda store, action, lease: store.abandon(action, lease),
}
OK, LOST, STALE, OTHER, WRONG = None, LeaseLost, FenceStale, NotHolder, ResourceMismatch
Answers = tuple[type[FenceError] | None, ...]

# fmt: off
BY_SCENE: dict[str, Answers] = {
    #                              complete renew  mark   release abandon
    "live":                       (OK,      OK,    OK,    OK,     OK),
    "released":                   (OK,      OK,    OK,    OK,     OK),
    "expired":                    (OK,      LOST,  OK,    OK,     LOST),
    "flipped":                    (OK,      LOST,  OK,    OK,     LOST),
    "reconciling":                (OK,      LOST,  OK,    OK,     LOST),
    "marked":                     (LOST,    LOST,  OK,    OK,     LOST),
    "done":                       (OK,      LOST,  LOST,  OK,     LOST),
    "ruled applied":              (OK,      LOST,  LOST,  OK,     LOST),
    "abandoned":                  (LOST,    LOST,  LOST,  OK,     OK),
    "ruled not applied":          (LOST,    LOST,  LOST,  OK,     OK),
    "regranted":                  (STALE,   STALE, STALE, STALE,  STALE),
    "retaken":                    (STALE,   STALE, OK,    STALE,  OK),
    "overtaken":                  (STALE,   STALE, OK,    STALE,  LOST),
    "unknown":                    (STALE,   STALE, OTHER, STALE,  OTHER),
    "unknown, lease of another":  (OTHER,   OTHER, OTHER, OTHER,  OTHER),
    "released, lease of another": (OTHER,   OTHER, OTHER, OTHER,  OTHER),
}
BY_FORGERY: dict[str, Answers] = {
    #                              complete renew  mark   release abandon
    "resource":                   (WRONG,   WRONG, WRONG, WRONG,  WRONG),
    "resource, fence, holder":    (WRONG,   WRONG, WRONG, WRONG,  WRONG),
    "lower fence":                (STALE,   STALE, STALE, STALE,  STALE),
    "lower fence, holder":        (STALE,   STALE, STALE, STALE,  STALE),
    "higher fence":               (STALE,   STALE, OTHER, STALE,  OTHER),
    "holder":                     (OTHER,   OTHER, OTHER, OTHER,  OTHER),
}
# fmt: on
FORGERIES: dict[str, Callable[[Lease], Lease]] = {
    "resource": lambda lease: replace(lease, resource=lease.resource + "'"),
    "resource, fence, holder": lambda lease: replace(lease, resource="elsewhere", fence=1, holder=uuid4()),
    "lower fence": lambda lease: replace(lease, fence=lease.fence - 1),
    "lower fence, holder": lambda lease: replace(lease, fence=lease.fence - 1, holder=uuid4()),
    "higher fence": lambda lease: replace(lease, fence=lease.fence + 1),
    "holder": lambda lease: replace(lease, holder=uuid4()),
}


def cases(table: dict[str, Answers], *, accepted: bool | None = None) -> list[Any]:
    """Return (row, call, error) of ``table``, all or only the accepted or the refused ones."""
    cells = [(row, call, error) for row, errors in table.items() for call, error in zip(CALLS, errors, strict=True)]
    chosen = [cell for cell in cells if accepted in {None, cell[2] is None}]
    return [pytest.param(*cell, id=f"{cell[0]}-{cell[1]}") for cell in chosen]


class Credentials(EffectStoreHarness):
    """The five calls that need a lease."""

    @pytest.mark.parametrize(("name", "call", "error"), cases(BY_SCENE, accepted=False))
    def test_refused_in_state(self, name: str, call: str, error: type[FenceError]) -> None:
        """G10, G11, G13, G15, G16: a call that the state of the key forbids is refused and changes nothing."""
        scene = SCENES[name](self)
        before = self.trace(scene.action, self.action("other"))
        with pytest.raises(error) as info:
            CALLS[call](self.store, scene.action, scene.lease)
        assert info.type is error
        assert info.value.key == scene.action.key
        after = self.trace(scene.action, self.action("other"))
        assert [row[:2] for row in after] == [row[:2] for row in before]
        assert after == before or call == "complete"
        self.resource_is("resource", held=scene.held, newest=scene.newest)

    @pytest.mark.parametrize(("name", "call", "error"), cases(BY_SCENE, accepted=True))
    def test_accepted_in_state(self, name: str, call: str, error: None) -> None:
        """G12, G13, G14, G15, G16, G26: what is accepted can be repeated, answers the same and changes nothing."""
        scene = SCENES[name](self)
        answer = CALLS[call](self.store, scene.action, scene.lease)
        if not self.capabilities.manual_clock and call == "renew":
            return
        with self.unchanged(scene.action, self.action("other")):
            assert CALLS[call](self.store, scene.action, scene.lease) == answer
        assert error is None

    @pytest.mark.parametrize(("name", "call", "error"), cases(BY_FORGERY))
    def test_wrong_lease(self, name: str, call: str, error: type[FenceError]) -> None:
        """G10, G11: resource, fence and holder are checked in this order, and a refusal changes nothing."""
        action = self.action()
        self.store.abandon(action, self.granted(action))
        lease = self.granted(action)
        before = self.trace(action)
        with pytest.raises(error) as info:
            CALLS[call](self.store, action, FORGERIES[name](lease))
        assert info.type is error
        assert [row[:2] for row in self.trace(action)] == [row[:2] for row in before]
        self.resource_is("resource", held=True, newest=lease.fence)
        self.store.complete(action, lease)

    @pytest.mark.parametrize("call", CALLS)
    def test_lease_moved_to_a_resource_with_the_same_fence(self, call: str) -> None:
        """G11: action and lease that agree on another resource are still not the intent of this key."""
        lease = self.granted(self.action())
        self.granted(self.action("other", on="elsewhere"))
        moved = self.action(on="elsewhere")
        with pytest.raises(NotHolder):
            CALLS[call](self.store, moved, replace(lease, resource=moved.resource))
        assert self.state(moved) is State.IN_FLIGHT

    def test_stale_tells_the_fences(self) -> None:
        """G11: the refusal of an old fence names it and the newest."""
        action = self.action()
        old = self.granted(action)
        self.store.abandon(action, old)
        self.granted(action)
        with pytest.raises(FenceStale) as info:
            self.store.release(action, old)
        assert (info.value.fence, info.value.seen) == (1, 2)

    def test_stale_on_a_resource_that_was_never_granted(self) -> None:
        """G11: there the newest fence is 0."""
        scene = SCENES["unknown"](self)
        with pytest.raises(FenceStale) as info:
            self.store.release(scene.action, scene.lease)
        assert (info.value.fence, info.value.seen) == (1, 0)

    def test_complete_records(self) -> None:
        """G12: completing records result and time, and frees the resource."""
        action = self.action()
        lease = self.granted(action)
        self.tick(1)
        assert self.store.complete(action, lease, "result") == "result"
        record = self.record(action)
        assert (record.state, record.result, record.completed_at) == (State.DONE, "result", self.clock.now())
        assert self.events(action) == []
        self.resource_is("resource", held=False, newest=1)

    @pytest.mark.parametrize("forgery", FORGERIES)
    def test_done_key_returns_the_first_result_to_any_lease(self, forgery: str) -> None:
        """G12, G17: completing a done key returns the first result whatever the lease, and is no evidence."""
        action = self.action()
        lease = self.granted(action)
        self.store.complete(action, lease, "first")
        with self.unchanged(action):
            assert self.store.complete(action, FORGERIES[forgery](lease), "second") == "first"

    def test_release_after_complete(self) -> None:
        """G12: a release after the completion, by the same lease, changes nothing."""
        action = self.action()
        lease = self.granted(action)
        self.store.complete(action, lease, "result")
        with self.unchanged(action):
            self.store.release(action, lease)
        self.resource_is("resource", held=False, newest=1)

    def test_renew_extends_intent_and_resource(self) -> None:
        """G13: the new expiry is now + ttl for intent and resource; fence and holder stay."""
        action = self.action()
        lease = self.granted(action)
        self.tick(TTL / 2)
        renewed = self.store.renew(action, lease, TTL)
        assert renewed == replace(lease, expires_at=self.clock.now() + timedelta(seconds=TTL))
        self.tick(TTL / 2)
        assert self.acquire(action) == InFlight(TTL / 2)
        assert self.acquire(self.action("other")) == Contended(TTL / 2)

    def test_renew_can_shorten(self) -> None:
        """G13: the new expiry counts from now, also when the old one lay later."""
        self.tick(0)
        action = self.action()
        self.store.renew(action, self.granted(action), TTL / 2)
        assert self.acquire(action) == InFlight(TTL / 2)

    def test_renew_after_release(self) -> None:
        """G13, G15: after a release renewing extends the intent and leaves the resource free."""
        self.tick(0)
        action = self.action()
        lease = self.granted(action)
        self.store.release(action, lease)
        self.store.renew(action, lease, 2 * TTL)
        assert self.acquire(action) == InFlight(2 * TTL)
        self.resource_is("resource", held=False, newest=1)

    def test_mark_is_recorded(self) -> None:
        """G14, G21: a mark keeps reason and time, and who said it."""
        action = self.action()
        lease = self.marked(action)
        now = self.clock.now()
        record = self.record(action)
        assert (record.state, record.reason, record.expired) == (State.UNCERTAIN, "timeout", False)
        [entry] = self.store.history(action.key)
        assert replace(entry, at=now) == HistoryEntry(now, "marked", lease.fence, "worker", "timeout")
        assert record.uncertain_at == entry.at

    def test_mark_keeps_the_resource_until_release(self) -> None:
        """G14: a marked key holds its resource until the release."""
        action = self.action()
        lease = self.marked(action)
        assert isinstance(self.acquire(self.action("other")), Contended)
        self.store.release(action, lease)
        self.resource_is("resource", held=False, newest=1)
        assert self.state(action) is State.UNCERTAIN

    def test_the_first_mark_stands(self) -> None:
        """G14, G26: a second mark by the same attempt succeeds and leaves the first reason."""
        action = self.action()
        lease = self.marked(action)
        with self.unchanged(action):
            self.store.mark_uncertain(action, lease, "another reason")

    def test_a_failed_mark_leaves_the_intent(self) -> None:
        """G14, G24: a reason that cannot be stored leaves the key in flight."""
        action = self.action()
        lease = self.granted(action)
        with self.refused(InvalidArgument, action):
            self.store.mark_uncertain(action, lease, "a\0b")
        assert isinstance(self.acquire(action), InFlight)

    def test_release_and_abandon_differ(self) -> None:
        """G15: a release leaves the key unacquirable, an abandon frees it."""
        released, abandoned = self.action("released", on="a"), self.action("abandoned", on="b")
        self.store.release(released, self.granted(released))
        self.store.abandon(abandoned, self.granted(abandoned))
        assert (self.state(released), self.state(abandoned)) == (State.IN_FLIGHT, State.FREE)
        assert isinstance(self.acquire(released), InFlight)
        assert isinstance(self.acquire(abandoned), Granted)

    @pytest.mark.parametrize("call", ["abandon", "mark_uncertain"])
    def test_intent_calls_leave_the_next_holder_alone(self, call: str) -> None:
        """G15: abandon and mark work after the resource has changed hands, and do not free it."""
        scene, other = SCENES["retaken"](self), self.action("other")
        with self.unchanged(other):
            CALLS[call](self.store, scene.action, scene.lease)
        self.resource_is("resource", held=True, newest=2)

    def test_abandoned_keys_become_due(self) -> None:
        """G15: an abandoned key with a payload is due after the given time, until it is granted again."""
        action = self.action(payload="p")
        self.store.abandon(action, self.granted(action), due_in_seconds=TTL)
        assert self.mine(self.store.claim_due(ALL, TTL)) == []
        self.tick()
        assert self.mine(self.store.claim_due(ALL, 2 * TTL)) == ["key"]
        self.tick()
        assert self.mine(self.store.claim_due(ALL, TTL)) == []
        self.tick()
        assert self.mine(self.store.claim_due(ALL, TTL)) == ["key"]
        self.granted(action)
        self.tick(TTL / 2)
        assert self.mine(self.store.claim_due(ALL, TTL)) == []

    @pytest.mark.parametrize(("payload", "due_in"), [(None, TTL), ("p", None), (None, None)])
    def test_what_never_becomes_due(self, payload: str | None, due_in: float | None) -> None:
        """G15: without a payload or a time an abandoned key is never due."""
        action = self.action(payload=payload)
        self.store.abandon(action, self.granted(action), due_in_seconds=due_in)
        self.tick(10 * TTL)
        assert self.mine(self.store.claim_due(ALL, TTL)) == []

    def test_due_keys_are_bounded(self) -> None:
        """G15: no more keys are handed out than asked for."""
        for name in "ab":
            action = self.action(name, on=name, payload="p")
            self.store.abandon(action, self.granted(action), due_in_seconds=TTL)
        self.tick()
        assert len(self.store.claim_due(1, TTL)) == 1
