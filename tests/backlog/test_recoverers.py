"""FC-40: eight processes settle one backlog, and half of them are killed in the middle of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from pgref.contracts.effects import Action, Granted, State
from pgref.embedded import PostgresServer
from pgref.postgres import Stores

ROOT = Path(__file__).parents[2]
KEYS = [f"asked:{number}" for number in range(100)]
SURVIVORS = 4
HANG_AT = (1, 2, 3, 4)
"""The probe in which each of the others hangs until it is killed."""


def test_each_key_is_ruled_once(postgres: PostgresServer, tmp_path: Path) -> None:
    """G18, G19: asked once per claim; what the killed ones had claimed is taken up by others."""
    dsn = postgres.create_database("recoverers")
    stores = Stores.open(dsn)
    stores.ensure_schema()
    for key in KEYS:
        message = f'{{"task": "sweeper.asked", "args": ["{key[6:]}"], "kwargs": {{}}, "options": {{}}}}'
        action = Action(key, key, payload=message)
        granted = stores.effects.acquire(action, 60)
        assert isinstance(granted, Granted)
        stores.effects.mark_uncertain(action, granted.lease, "test")
    ledger = tmp_path / "ledger"

    def started(hangs_at: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(ROOT / "tests/backlog/sweeper.py"), dsn, str(ledger), str(hangs_at)]
        return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})

    hung = []
    victims = [started(hangs_at) for hangs_at in HANG_AT]
    for victim in victims:
        hanging = ledger.with_suffix(f".{victim.pid}")
        while not hanging.exists() or not hanging.read_text():
            assert victim.poll() is None
        hung.append(hanging.read_text())
    survivors = [started(0) for _ in range(SURVIVORS)]
    for victim in victims:
        victim.kill()
        victim.wait()
    assert [survivor.wait() for survivor in survivors] == [0] * SURVIVORS

    asked = Counter(ledger.read_text().split())
    assert asked == Counter(key[6:] for key in KEYS) + Counter(hung)
    for key in KEYS:
        record = stores.effects.lookup(key)
        assert record is not None
        assert record.state is State.DONE
        assert [entry.event for entry in stores.effects.history(key)] == ["marked", "ruled_applied"]
    stores.close()
