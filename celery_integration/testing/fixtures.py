"""Fixtures for `celery_setup` without Docker: import them into a conftest, or name this module in ``pytest_plugins``.

Override `local_worker_app`, and what else does not fit; `celery_worker` runs in the pool that `local_worker_pool`
names. Servers and worker live as long as the session: a test that ends the worker needs to start it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
from celery import Celery, current_app
from pytest_celery import CeleryTestBackend, CeleryTestBroker, CeleryTestSetup

from celery_integration.testing.nodes import LocalWorker, RabbitMQBroker, ValkeyBackend, ValkeyBroker, running_worker
from celery_integration.testing.rabbitmq import PROGRAM, RabbitMQServer
from pgref.embedded import ValkeyServer

__all__ = [
    "celery_backend",
    "celery_broker",
    "celery_setup_app",
    "celery_worker",
    "local_rabbitmq",
    "local_rabbitmq_settings",
    "local_valkey",
    "local_worker_app",
    "local_worker_environment",
    "local_worker_pool",
    "rabbitmq_broker",
    "valkey_backend",
    "valkey_broker",
]


@pytest.fixture(scope="session")
def local_valkey() -> Iterator[ValkeyServer]:
    """Return a Valkey server. Raises ``MissingBinary``."""
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="session")
def valkey_broker(local_valkey: ValkeyServer) -> ValkeyBroker:
    """Return the broker node on `local_valkey`."""
    return ValkeyBroker(local_valkey)


@pytest.fixture(scope="session")
def valkey_backend(local_valkey: ValkeyServer) -> ValkeyBackend:
    """Return the backend node on `local_valkey`."""
    return ValkeyBackend(local_valkey)


@pytest.fixture(scope="session")
def local_rabbitmq_settings() -> dict[str, str]:
    """Return the lines of ``rabbitmq.conf``; override to add some."""
    return {}


@pytest.fixture(scope="session")
def local_rabbitmq(local_rabbitmq_settings: dict[str, str]) -> Iterator[RabbitMQServer]:
    """Return a RabbitMQ server. Skips where the package is not installed."""
    if not PROGRAM.exists():
        pytest.skip("RabbitMQ is not installed (Debian: apt-get install --no-install-recommends rabbitmq-server)")
    with RabbitMQServer(settings=local_rabbitmq_settings) as server:
        yield server


@pytest.fixture(scope="session")
def rabbitmq_broker(local_rabbitmq: RabbitMQServer) -> RabbitMQBroker:
    """Return the broker node on `local_rabbitmq`."""
    return RabbitMQBroker(local_rabbitmq)


@pytest.fixture(scope="session")
def celery_broker(valkey_broker: ValkeyBroker) -> CeleryTestBroker:
    """Return the broker of `celery_setup`: Valkey, unless overridden."""
    return valkey_broker


@pytest.fixture(scope="session")
def celery_backend(valkey_backend: ValkeyBackend) -> CeleryTestBackend:
    """Return the result backend of `celery_setup`: Valkey, unless overridden."""
    return valkey_backend


@pytest.fixture(scope="session")
def local_worker_app() -> str:
    """Return the app as in ``celery -A``. To be overridden."""
    raise pytest.UsageError("override the fixture local_worker_app: it returns the app as in `celery -A`")


@pytest.fixture(scope="session")
def local_worker_pool() -> str:
    """Return the worker's pool; override with ``params=POOLS`` to run in all."""
    return "prefork"


@pytest.fixture(scope="session")
def local_worker_environment() -> dict[str, str]:
    """Return what to add to the worker's environment, which names broker and backend already."""
    return {}


@pytest.fixture(scope="session")
def celery_worker(
    celery_broker: CeleryTestBroker,
    celery_backend: CeleryTestBackend,
    local_worker_app: str,
    local_worker_pool: str,
    local_worker_environment: dict[str, str],
) -> Iterator[LocalWorker]:
    """Return the worker of `celery_setup`. Raises ``ServerFailed`` with the end of its log."""
    with running_worker(
        local_worker_app,
        celery_broker,
        celery_backend,
        pool=local_worker_pool,
        environment=local_worker_environment,
    ) as worker:
        yield worker


@pytest.fixture
def celery_setup_app(
    celery_setup_cls: type[CeleryTestSetup], celery_setup_config: dict[str, str], celery_setup_name: str
) -> Iterator[Celery]:
    """Return the caller's app; afterwards its connections are closed, and the app that was current is so again."""
    before: Celery = cast(Any, current_app)._get_current_object()  # noqa: SLF001  what the proxy stands for
    app = celery_setup_cls.create_setup_app(celery_setup_config, celery_setup_name)
    app.set_current()  # another app may be: shared tasks are sent by the current one
    yield app
    app.close()
    before.set_current()
