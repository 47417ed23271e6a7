"""`celery_setup` over local processes, in each pool."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery
from pytest_celery import CeleryTestSetup

from celery_integration.testing import POOLS, LocalWorker
from celery_integration.testing.fixtures import (  # noqa: F401
    celery_backend,
    celery_broker,
    celery_setup_app,
    celery_worker,
    local_valkey,
    valkey_backend,
    valkey_broker,
)
from pgref.contracts.effects import State
from pgref.embedded import PostgresServer
from pgref.postgres import Stores
from tests.smoke import tasks

DEADLINE_SECONDS = 25.0


def until(condition: Callable[[], Any]) -> None:
    """Poll until it holds. Raises `TimeoutError`."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.02)


@pytest.fixture(scope="session")
def smoke_dsn(postgres: PostgresServer) -> str:
    dsn = postgres.create_database("smoke")
    stores = Stores.open(dsn)
    stores.ensure_schema()
    with stores.engine.begin() as connection:
        tasks.metadata.create_all(connection)
    stores.close()
    return dsn


@pytest.fixture(scope="session")
def local_worker_app() -> str:
    return "tests.smoke.tasks"


@pytest.fixture(scope="session", params=POOLS)
def local_worker_pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def local_worker_environment(smoke_dsn: str) -> dict[str, str]:
    return {"SMOKE_DSN": smoke_dsn}


@pytest.fixture
def celery_setup_cls(smoke_dsn: str) -> type[CeleryTestSetup]:
    class Setup(CeleryTestSetup):  # type: ignore[misc]
        @classmethod
        def update_app_config(cls, app: Celery) -> None:
            tasks.configure(app, smoke_dsn)

    return Setup


@pytest.fixture
def worker(celery_setup: CeleryTestSetup) -> Iterator[LocalWorker]:
    """The worker of the setup; if a test has ended it, it runs again for the next one."""
    worker = celery_setup.worker
    assert isinstance(worker, LocalWorker)
    logged = len(worker.logs())
    yield worker
    sys.stdout.write(worker.logs()[logged:])  # shown if the test has failed
    if worker.container.status != "running":
        worker.restart()


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A key that no other test uses."""
    return str(request.node.name)


@dataclass
class Ledger:
    """What took place."""

    stores: Stores

    def _notes(self, table: sa.Table, key: str) -> list[str]:
        with self.stores.engine.connect() as connection:
            return list(connection.execute(sa.select(table.c.note).where(table.c.key == key)).scalars())

    def booked(self, key: str) -> list[str]:
        return self._notes(tasks.booked, key)

    def outside(self, key: str) -> list[str]:
        return self._notes(tasks.outside, key)

    def noted(self, key: str) -> list[str]:
        return self._notes(tasks.noted, key)

    def entered(self, key: str) -> list[str]:
        return self._notes(tasks.entered, key)

    def wait_for_the_body(self, key: str) -> None:
        until(lambda: self.entered(key))

    def release(self, key: str) -> None:
        with self.stores.engine.begin() as connection:
            connection.execute(sa.insert(tasks.released).values(key=key))

    def state(self, task: Any, key: str) -> State | None:
        record = self.stores.effects.lookup(f"{task.name}:{key}")
        return None if record is None else record.state


@pytest.fixture(scope="session")
def ledger(smoke_dsn: str) -> Iterator[Ledger]:
    stores = Stores.open(smoke_dsn)
    yield Ledger(stores)
    stores.close()
