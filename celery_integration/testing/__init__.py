"""For tests of fenced tasks: pytest-celery's broker, backend and worker nodes as local processes, without Docker.

Needs the extra ``testing``. `celery_integration.testing.fixtures` has the fixtures; this is what they are made of.
"""

from celery_integration.testing.nodes import (
    LocalContainer,
    LocalWorker,
    RabbitMQBroker,
    ValkeyBackend,
    ValkeyBroker,
    running_worker,
)
from celery_integration.testing.rabbitmq import RabbitMQServer
from celery_integration.testing.worker import POOLS, WorkerProcess

__all__ = [
    "POOLS",
    "LocalContainer",
    "LocalWorker",
    "RabbitMQBroker",
    "RabbitMQServer",
    "ValkeyBackend",
    "ValkeyBroker",
    "WorkerProcess",
    "running_worker",
]
