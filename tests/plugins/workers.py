"""A real prefork worker in a process of its own, with its database and broker."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import redis
import sqlalchemy as sa

from pgref.embedded import PostgresServer, ValkeyServer
from pgref.postgres import Stores

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 60.0


class Worker:
    """A worker process group that can be killed and started again."""

    def __init__(self, log: Path, environment: dict[str, str]) -> None:
        self.log = log
        self.environment = environment
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        beat = ["--beat", "--schedule", str(self.log.with_name("beat"))]
        options = ["--pool", "prefork", "-c", "2", "-l", "INFO", "--without-gossip", "--without-mingle", *beat]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "tests.celery.shop", "worker", *options],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def kill(self) -> None:
        """End the worker and its children as a power loss does."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="session")
def shop_environment(
    postgres: PostgresServer, valkey: ValkeyServer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    ledger = tmp_path_factory.mktemp("ledger")
    settings = {
        "FENCED_DSN": postgres.create_database("shop"),
        "BROKER_URL": valkey.url,
        "SHOP_LEDGER": str(ledger),
        "PYTHONPATH": str(ROOT),
    }
    os.environ.update(settings)
    return {**os.environ, **settings}


@pytest.fixture(scope="session")
def shop(shop_environment: dict[str, str]) -> ModuleType:
    """The tasks, as a caller sees them, with their tables made."""
    from tests.celery import shop

    stores = Stores.open(shop_environment["FENCED_DSN"])
    stores.ensure_schema()
    with stores.engine.begin() as connection:
        shop.metadata.create_all(connection)
    stores.close()
    shop.app.set_default()
    shop.app.finalize()
    if tuple(map(int, redis.__version__.split(".")[:2])) < (6, 4):
        # Those wait for themselves when an AsyncResult is collected while they subscribe to another.
        gc.disable()
    return shop


@pytest.fixture(scope="session")
def worker(
    shop: ModuleType, shop_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worker]:
    metrics = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path_factory.mktemp("metrics"))}
    worker = Worker(tmp_path_factory.mktemp("worker") / "worker.log", {**shop_environment, **metrics})
    worker.start()
    shop.ping.delay().get(timeout=DEADLINE_SECONDS)
    yield worker
    worker.kill()


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A key that no other test uses."""
    return f"{request.node.name}-{os.urandom(4).hex()}"


@pytest.fixture
def gate(shop: ModuleType) -> Stores:
    from celery_integration.process import gate_of

    return gate_of(shop.app).stores


@pytest.fixture
def entries(shop: ModuleType, gate: Stores) -> Callable[[str], list[int]]:
    """The committed entries of a key, in a table that would show duplicates."""

    def entries(key: str) -> list[int]:
        with gate.engine.connect() as connection:
            return list(connection.execute(sa.select(shop.entry.c.cents).where(shop.entry.c.key == key)).scalars())

    return entries
