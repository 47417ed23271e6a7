"""The setup of the smoke tests, over RabbitMQ."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_integration.testing import LocalWorker, RabbitMQBroker, WorkerProcess
from celery_integration.testing.fixtures import (  # noqa: F401
    celery_backend,
    celery_setup_app,
    celery_worker,
    local_rabbitmq,
    local_valkey,
    rabbitmq_broker,
    valkey_backend,
)
from tests.smoke.conftest import (  # noqa: F401
    celery_setup_cls,
    key,
    ledger,
    local_worker_app,
    local_worker_environment,
    smoke_dsn,
    worker,
)


@pytest.fixture(scope="session")
def local_rabbitmq_settings() -> dict[str, str]:
    # Milliseconds. Longer than the five seconds in which Celery notices that a child is lost.
    return {"consumer_timeout": "7000"}


@pytest.fixture(scope="session")
def celery_broker(rabbitmq_broker: RabbitMQBroker) -> RabbitMQBroker:  # noqa: F811  the fixture
    return rabbitmq_broker


@pytest.fixture(scope="session")
def local_worker_pool() -> str:
    return "prefork"


@pytest.fixture
def second(celery_worker: LocalWorker) -> Iterator[WorkerProcess]:  # noqa: F811  the fixture
    """Another worker like the setup's, not yet started."""
    like = celery_worker.container.server
    process = WorkerProcess(like.app, pool=like.pool, environment=like.environment)
    yield process
    process.close()
