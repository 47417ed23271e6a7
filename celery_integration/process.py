"""What a worker process keeps open: stores and the lease keeper, made after the fork."""

from __future__ import annotations

import os
import threading
import weakref

import sqlalchemy as sa
from celery import Celery

from celery_integration.effect import refuse_to_end
from celery_integration.leases import LeaseKeeper
from celery_integration.settings import Settings
from pgref.keys import show_keys
from pgref.postgres import Stores

__all__ = ["Gate", "gate_of"]


class Gate:
    """The opened stores of one app in one process."""

    def __init__(self, app: Celery) -> None:
        self.pid = os.getpid()
        self.settings = Settings.of(app)
        show_keys(hashed=self.settings.hash_keys)
        self.stores = Stores.open(self.settings.dsn, schema=self.settings.schema)
        self.effects = self.stores.effects
        for event in ("commit", "rollback"):
            sa.event.listen(self.stores.engine, event, refuse_to_end)
        self.keeper = LeaseKeeper(self.effects)


_gates: weakref.WeakKeyDictionary[Celery, Gate] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def gate_of(app: Celery) -> Gate:
    """Return the gate of ``app`` in this process, opened at first use and anew after a fork."""
    app = app._get_current_object() if hasattr(app, "_get_current_object") else app  # noqa: SLF001  a proxy has no stable hash
    gate = _gates.get(app)
    if gate is None or gate.pid != os.getpid():
        with _lock:
            gate = _gates.get(app)
            if gate is None or gate.pid != os.getpid():
                gate = _gates[app] = Gate(app)
    return gate


def _renew_lock() -> None:
    global _lock  # noqa: PLW0603  the parent's lock may be held by a thread that the child does not have
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
