"""One thread per process that renews all its leases at a third of their time, and says when one is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby

from celery_integration.signals import lease_lost
from pgref import signals
from pgref.contracts.effects import Action, EffectStore, Lease, Renewal
from pgref.errors import LeaseLost, PgrefError
from pgref.keys import shown

__all__ = ["HeldLease", "LeaseKeeper"]

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class HeldLease:
    """A lease that the keeper renews. Times are this process's monotonic clock and only decide when to ask."""

    effects: EffectStore
    action: Action
    lease: Lease
    ttl_seconds: float
    renewed_at: float
    due_at: float = 0.0
    lost: threading.Event = field(default_factory=threading.Event)

    def ensure(self, margin_seconds: float) -> None:
        """Renew now, on the store's clock. Raises `LeaseLost`, also when a whole lease is less than the margin."""
        asked_at = time.monotonic()
        if self.lost.is_set() or margin_seconds >= self.ttl_seconds:
            raise LeaseLost(f"the lease of {shown(self.action.key)} is lost or too short", key=self.action.key)
        self.lease = self.effects.renew(self.action, self.lease, self.ttl_seconds)
        self.renewed(asked_at)

    def renewed(self, at: float) -> None:
        self.renewed_at = at
        self.due_at = at + self.ttl_seconds / 3

    def missed(self, at: float) -> None:
        """Ask again soon; after a whole lease without an answer it must be taken as lost."""
        self.due_at = at + self.ttl_seconds / 12
        if at - self.renewed_at >= self.ttl_seconds:
            self.gone()

    def gone(self) -> None:
        self.due_at = float("inf")
        self.lost.set()
        lease_lost.send(sender=LeaseKeeper, key=self.action.key)


class LeaseKeeper:
    """Renews leases while their bodies run."""

    def __init__(self, effects: EffectStore) -> None:
        self._effects = effects
        self._held: set[HeldLease] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._next_due_at = float("inf")

    @contextmanager
    def keep(self, action: Action, lease: Lease, ttl_seconds: float, granted_at: float) -> Iterator[HeldLease]:
        """Renew ``lease`` until the block ends. ``granted_at`` is the monotonic time before the lease was asked for."""
        held = HeldLease(self._effects, action, lease, ttl_seconds, granted_at)
        held.renewed(granted_at)
        with self._changed:
            self._held.add(held)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fenced-lease-keeper", daemon=True)
                with signals.held():
                    self._thread.start()
            elif held.due_at < self._next_due_at:
                self._changed.notify()
        try:
            yield held
        finally:
            with self._changed:
                self._held.discard(held)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._next_due_at = min((held.due_at for held in self._held), default=float("inf"))
                left = self._next_due_at - time.monotonic()
                if left > 0:
                    self._changed.wait(None if left == float("inf") else left)
                    continue
                due = [held for held in self._held if held.due_at <= time.monotonic()]
            self._renew(due)

    def _renew(self, due: list[HeldLease]) -> None:
        due.sort(key=lambda held: held.ttl_seconds)
        for ttl_seconds, group in groupby(due, key=lambda held: held.ttl_seconds):
            self._renew_group(list(group), ttl_seconds)

    def _renew_group(self, group: list[HeldLease], ttl_seconds: float) -> None:
        asked_at = time.monotonic()
        try:
            answers = self._effects.renew_many([(held.action, held.lease) for held in group], ttl_seconds)
        except PgrefError as error:
            logger.warning("cannot renew %d leases: %s", len(group), error)
            answers = [Renewal.BUSY] * len(group)
        except Exception:
            logger.exception("cannot renew %d leases", len(group))
            answers = [Renewal.BUSY] * len(group)
        for held, answer in zip(group, answers, strict=True):
            match answer:
                case Renewal.RENEWED:
                    held.renewed(asked_at)
                case Renewal.BUSY:
                    held.missed(asked_at)
                case Renewal.LOST:
                    held.gone()
