"""The lease keeper's thread."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

from celery_integration.leases import LeaseKeeper
from pgref.contracts.effects import Action, Granted
from pgref.memory import MemoryEffectStore

INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1)


def test_the_keeper_takes_no_signal_from_the_main_thread() -> None:
    """Python would run the handler in the main thread although that one holds it off."""
    effects = MemoryEffectStore()
    action = Action("k", "r")
    granted = effects.acquire(action, 60)
    assert isinstance(granted, Granted)
    before = set(threading.enumerate())
    with LeaseKeeper(effects).keep(action, granted.lease, 60, 0.0):
        (keeper,) = set(threading.enumerate()) - before
        status = Path(f"/proc/self/task/{keeper.native_id}/status").read_text()
    blocked = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:")), 16)
    assert [number for number in INTERRUPTIONS if not blocked >> (number - 1) & 1] == []
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(INTERRUPTIONS)
