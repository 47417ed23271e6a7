"""The commands in the README and in docs/how-to/on-call.md: each of them, in their order, as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from pgref.contracts.effects import Action, Granted, RetrySafety, State
from pgref.embedded import PostgresServer
from pgref.postgres import Stores

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "on-call.md"
NEED_A_WORKER = {"celery -A shop fenced metrics", "celery -A shop fenced health --live"}
"""Those are run in test_metrics.py and test_health.py."""
SHOP = """
from celery import Celery
from celery_integration import fenced_task, install, schedule

app = Celery("shop", broker="memory://")
install(app)
schedule(app)

@fenced_task(name="shop.pay", scope="pay", key="{order}", sink="external")
def pay(effect, order): ...
"""


def commands() -> list[str]:
    readme = re.findall(r"celery -A shop fenced \w[^`\n]*", (ROOT / "README.md").read_text())
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL)
    tour = [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    return [*(command for command in readme if command not in NEED_A_WORKER), *tour]


def test_each_command_does_what_it_says(postgres: PostgresServer, tmp_path: Path) -> None:
    tmp_path.joinpath("shop.py").write_text(SHOP)
    dsn = postgres.create_database("on_call")
    stores = Stores.open(dsn)
    stores.ensure_schema()
    for key in ("pay:7", "pay:8"):
        message = f'{{"task": "shop.pay", "args": ["{key[4:]}"], "kwargs": {{}}, "options": {{}}}}'
        action = Action(key, key, retry_safety=RetrySafety.UNSAFE, payload=message)
        granted = stores.effects.acquire(action, 60)
        assert isinstance(granted, Granted)
        stores.effects.mark_uncertain(action, granted.lease, "ConnectionError: timed out")
    environment = {**os.environ, "FENCED_DSN": dsn, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    typed = commands()
    assert len(typed) == 14
    for command in typed:
        program, *words = shlex.split(command)
        assert program == "celery"
        done = subprocess.run(
            [sys.executable, "-m", "celery", *words],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
    states = {key: record.state for key in ("pay:7", "pay:8") if (record := stores.effects.lookup(key))}
    stores.close()
    assert states == {"pay:7": State.DONE, "pay:8": State.FREE}
