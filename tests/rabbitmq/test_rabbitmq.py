"""What only RabbitMQ does: quorum queues, the redelivery flag, the consumer timeout, a broker that restarts."""

from __future__ import annotations

import amqp
import pytest
from pytest_celery import CeleryTestSetup

from celery_integration.testing import LocalWorker, RabbitMQServer, WorkerProcess
from pgref.contracts.effects import State
from tests.smoke import tasks
from tests.smoke.conftest import Ledger, until
from tests.smoke.test_effects import WAIT


def test_the_queue_is_a_quorum_queue(celery_setup: CeleryTestSetup, worker: LocalWorker) -> None:
    """What the other tests run on."""
    with celery_setup.app.connection() as connection, pytest.raises(amqp.PreconditionFailed, match="'quorum'"):
        connection.channel().queue_declare(
            "celery", durable=True, auto_delete=False, arguments={"x-queue-type": "classic"}
        )


def test_a_redelivery_says_that_it_is_one(worker: LocalWorker, ledger: Ledger, key: str) -> None:
    """The flag is the broker's, the judgement the gate's; the second attempt has both."""
    result = tasks.book.delay(key, "hold")
    ledger.wait_for_the_body(key)
    worker.kill()
    worker.restart()
    assert result.get(**WAIT) == {"attempt": 2}
    assert ledger.entered(key) == ["1", "2, redelivered"]
    assert ledger.booked(key) == ["2"]


def test_the_consumer_timeout(worker: LocalWorker, ledger: Ledger, key: str, second: WorkerProcess) -> None:
    """FC-04: what the broker takes back does not run while its holder renews; and not when the holder has died.

    Celery 5.7 ends the worker's main process on it, after the running tasks. Its child goes on until then.
    """
    result = tasks.charge.delay(key, "hold")
    ledger.wait_for_the_body(key)
    until(lambda: "PRECONDITION_FAILED" in worker.logs())
    second.start()
    until(lambda: f"{tasks.charge.name}[{result.id}] received" in second.log_text())
    assert ledger.state(tasks.charge, key) is State.IN_FLIGHT
    worker.kill()
    assert result.get(**WAIT) == {"probed": 1}
    assert ledger.outside(key) == ledger.entered(key) == ["1"]


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_a_broker_that_restarts(
    worker: LocalWorker, ledger: Ledger, key: str, local_rabbitmq: RabbitMQServer, how: str
) -> None:
    """FC-03: the acknowledgement is lost with the connection, the queue is not, and the next delivery is a replay."""
    result = tasks.charge.delay(key, "hold")
    ledger.wait_for_the_body(key)
    connected = worker.logs().count("Connected to")
    getattr(local_rabbitmq, how)()
    local_rabbitmq.start()
    until(lambda: worker.logs().count("Connected to") > connected)
    ledger.release(key)
    assert result.get(**WAIT) == {"attempt": 1}
    assert tasks.ping.delay().get(**WAIT) == "pong"
    until(lambda: worker.logs().count(f"{tasks.charge.name}[{result.id}] succeeded") == 2)
    assert ledger.outside(key) == ledger.entered(key) == ["1"]
