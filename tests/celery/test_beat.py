"""What beat's tasks do in a real worker, beside the tasks that they look after."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy.orm import Session

from pgref.contracts.effects import EffectRecord, State
from pgref.postgres import Stores
from tests.plugins.workers import ROOT, Worker

pytestmark = pytest.mark.usefixtures("worker")

Entries = Callable[[str], list[int]]
WAIT: dict[str, Any] = {"timeout": 60}


def record_of(gate: Stores, task: Any, key: str) -> EffectRecord | None:
    return gate.effects.lookup(f"{task.name}:{key}")


def inspected(worker: Worker) -> str:
    command = [sys.executable, "-m", "celery", "-A", "tests.celery.shop", "inspect", "fenced_leases"]
    return subprocess.run(command, env=worker.environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_a_body_that_holds_the_interpreter_keeps_its_lease(
    shop: ModuleType, key: str, gate: Stores, worker: Worker
) -> None:
    """For three lease lengths, in which its own process cannot renew anything."""
    pipe = shop.LEDGER / f"pipe {key}"
    os.mkfifo(pipe)
    result = shop.grip.delay(key)
    leases = shop.grip.definition.policy.lease_seconds
    while (record := record_of(gate, shop.grip, key)) is None:
        pass
    while (record.expires_at - record.granted_at).total_seconds() < 4 * leases:
        found = record_of(gate, shop.grip, key)
        assert found is not None
        assert (found.state, found.attempt) == (State.IN_FLIGHT, 1)
        record = found
    assert f"{shop.grip.name}:{key}" in inspected(worker)
    pipe.write_bytes(b"x")
    assert result.get(**WAIT) == {"attempt": 1}
    assert len(shop.outside(key)) == 1


def test_two_beats_do_no_harm(shop: ModuleType, key: str, gate: Stores, entries: Entries) -> None:
    """Whatever they send twice: what is wanted takes effect once."""
    keys = [f"{key}-{number}" for number in range(20)]
    with Session(gate.engine) as session, session.begin():
        for one in keys:
            shop.book.accept(session, one)
    for _ in range(5):
        for name in shop.app.conf.beat_schedule:
            shop.app.send_task(name)
    while any((record := record_of(gate, shop.book, one)) is None or record.state is not State.DONE for one in keys):
        pass
    assert [entries(one) for one in keys] == [[5]] * len(keys)
