"""Smoke tests over pytest-celery's stock containers, where a Docker engine answers; the worker is a local process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pytest_celery import RedisTestBackend, RedisTestBroker

from celery_integration.testing import LocalWorker, running_worker
from tests.smoke.test_effects import (  # noqa: F401
    test_a_child_killed_in_the_body,
    test_a_replay_lets_the_chain_go_on,
    test_ten_calls_at_once_are_one_effect,
    test_the_setup_is_pytest_celerys_own,
)

docker = pytest.importorskip("docker")


def answers() -> bool:
    try:
        docker.from_env().close()
    except docker.errors.DockerException:
        return False
    return True


pytestmark = pytest.mark.skipif(not answers(), reason="no Docker engine answers: the local nodes must do")


@pytest.fixture(scope="module")
def local_worker_pool() -> str:
    return "prefork"


@pytest.fixture
def celery_broker(celery_redis_broker: RedisTestBroker) -> RedisTestBroker:
    return celery_redis_broker


@pytest.fixture
def celery_backend(celery_redis_backend: RedisTestBackend) -> RedisTestBackend:
    return celery_redis_backend


@pytest.fixture
def celery_worker(
    celery_broker: RedisTestBroker,
    celery_backend: RedisTestBackend,
    local_worker_app: str,
    local_worker_environment: dict[str, str],
) -> Iterator[LocalWorker]:
    with running_worker(
        local_worker_app, celery_broker, celery_backend, environment=local_worker_environment
    ) as worker:
        yield worker
