"""What the README shows works: its commands, its example, its snippets."""

from __future__ import annotations

import re
import subprocess
import types
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from pgref.contracts.effects import Granted, State
from pgref.embedded import PostgresServer, ValkeyServer
from pgref.postgres import Stores

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLE, SCHEMA, SETTLE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"^(make \w+)", README, re.MULTILINE)


class Gateway:
    """A provider that de-duplicates by idempotency key and loses its first answer."""

    def __init__(self) -> None:
        self.charges: dict[str, types.SimpleNamespace] = {}
        self.calls = 0

    def charge(self, cents: int, *, idempotency_key: str) -> str:
        self.calls += 1
        charge = self.charges.setdefault(idempotency_key, types.SimpleNamespace(id=f"ch_{len(self.charges)}"))
        if self.calls == 1:
            raise ConnectionError("no answer")
        return str(charge.id)

    def find(self, idempotency_key: str) -> types.SimpleNamespace | None:
        return self.charges.get(idempotency_key)


@pytest.fixture(scope="module")
def dsn(postgres: PostgresServer) -> str:
    return postgres.create_database("readme")


@pytest.fixture(scope="module")
def example(dsn: str, valkey: ValkeyServer) -> dict[str, Any]:
    """The example, run on the test's own servers."""
    run(SCHEMA, dsn, {})
    names: dict[str, Any] = {"gateway": Gateway(), "__name__": "readme"}
    run(EXAMPLE.replace("redis://localhost:6379/0", valkey.url), dsn, names)
    names["app"].finalize()
    with sa.create_engine(dsn).begin() as connection:
        connection.exec_driver_sql('CREATE TABLE entry ("order" int, cents int)')
    return names


def run(code: str, dsn: str, names: dict[str, Any]) -> None:
    exec(code.replace("postgresql+psycopg://shop@localhost/shop", dsn), names)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_exists(command: str) -> None:
    """That they succeed is seen by running them: `make demo` in test_demo.py, `make test` by whoever reads this."""
    subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


def test_the_example_books_once(example: dict[str, Any], dsn: str) -> None:
    assert example["book"](7, "alice", 1200) is None
    assert example["book"](7, "alice", 1200) is None
    with sa.create_engine(dsn).connect() as connection:
        assert connection.exec_driver_sql("SELECT * FROM entry").all() == [(7, 1200)]


def test_the_example_charges_once(example: dict[str, Any]) -> None:
    """The first answer is lost, the second call asks the probe and gets the charge that was made."""
    with pytest.raises(ConnectionError):
        example["charge"](8, 500)
    assert example["charge"](8, 500) == "ch_0"
    assert (example["gateway"].calls, len(example["gateway"].charges)) == (1, 1)


def test_the_backlog_can_be_settled_as_shown(
    example: dict[str, Any], dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    effects = Stores.open(dsn).effects
    action = example["charge"].definition.action("readme.charge", {"order_id": 9, "cents": 1}, "id")
    granted = effects.acquire(action, 60)
    assert isinstance(granted, Granted)
    effects.mark_uncertain(action, granted.lease, "no answer")
    run(SETTLE, dsn, {})
    assert capsys.readouterr().out.startswith("readme.charge:order:9 ")
    record = effects.lookup(action.key)
    assert record is not None
    assert (record.state, record.result) == (State.DONE, '"ch_17"')
