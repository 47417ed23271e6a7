"""The lease keeper's thread."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from celery_integration.leases import LeaseKeeper
from celery_integration.signals import lease_lost
from pgref.contracts.effects import Action, Granted
from pgref.errors import Unavailable
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


@pytest.mark.parametrize("away", [False, True], ids=["taken from it", "no answer for a whole lease"])
def test_a_lost_lease_is_told(monkeypatch: pytest.MonkeyPatch, away: bool) -> None:
    """Once, by the keeper, whatever the body does."""
    effects = MemoryEffectStore()
    action = Action("k", "r")
    granted = effects.acquire(action, 60)
    assert isinstance(granted, Granted)
    told: list[str] = []
    heard = threading.Event()

    def hear(key: str, **_: object) -> None:
        told.append(key)
        heard.set()

    def no_answer(*_: object) -> None:
        raise Unavailable("away")

    if away:
        monkeypatch.setattr(effects, "renew_many", no_answer)
    else:
        effects.mark_uncertain(action, granted.lease, "test")
    lease_lost.connect(hear, weak=False, dispatch_uid="test")
    try:
        with LeaseKeeper(effects).keep(action, granted.lease, 60, -1000.0) as held:
            assert heard.wait(10)
            assert held.lost.is_set()
    finally:
        lease_lost.disconnect(dispatch_uid="test")
    assert told == ["k"]
