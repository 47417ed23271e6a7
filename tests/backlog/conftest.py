"""An app in this process, with no worker, over PostgreSQL with a clock of the test's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import Celery

from celery_integration import install
from celery_integration.process import Gate, gate_of
from pgref.clock import ManualClock
from pgref.embedded import PostgresServer
from pgref.postgres import Stores, drop_schema, new_schema
from tests.backlog.doubt import PAUSE, Backlog, asked, verdicts


@pytest.fixture(scope="session")
def app(postgres: PostgresServer) -> Iterator[Celery]:
    app = Celery("doubtful", broker="memory://", set_as_current=False)
    app.conf.task_create_missing_queues = True
    dsn = postgres.create_database("doubtful")
    install(app, dsn=dsn, reconcile_seconds=PAUSE, probe_seconds=20, sweep_batch_max=100)
    app.finalize()
    yield app
    gate_of(app).stores.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def gate(app: Celery, clock: ManualClock) -> Iterator[Gate]:
    gate = gate_of(app)
    schema = new_schema(gate.stores.engine)
    gate.effects = Stores.open(gate.stores.engine, schema=schema, clock=clock).effects
    asked.clear()
    verdicts.clear()
    yield gate
    drop_schema(gate.stores.engine, schema)


@pytest.fixture
def backlog(app: Celery, gate: Gate) -> Backlog:
    return Backlog(app, gate)
