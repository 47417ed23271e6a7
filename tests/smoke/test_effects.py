"""Fenced tasks in real workers of each pool, through pytest-celery's `celery_setup`: what took place, and how often."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from celery import chain
from pytest_celery import CeleryTestSetup

from celery_integration.testing import LocalWorker
from pgref.contracts.effects import State
from tests.smoke import tasks
from tests.smoke.conftest import DEADLINE_SECONDS, Ledger, until

WAIT: dict[str, Any] = {"timeout": DEADLINE_SECONDS}
BOTH = pytest.mark.parametrize("name", ["book", "charge"])


def test_the_setup_is_pytest_celerys_own(celery_setup: CeleryTestSetup) -> None:
    """Each of its nodes is up, and the worker answers over the broker."""
    assert len(celery_setup) == 3
    assert celery_setup.ready(control=True)
    assert tasks.ping.delay().get(**WAIT) == "pong"


def test_ten_calls_at_once_are_one_effect(worker: LocalWorker, ledger: Ledger, key: str) -> None:
    """FC-01: each caller gets the stored result, those that came while the first was at work included."""
    results = [tasks.book.delay(key, "renew") for _ in range(10)]
    assert [result.get(**WAIT) for result in results] == [{"attempt": 1}] * 10
    assert ledger.booked(key) == ledger.entered(key) == ["1"]


def test_ten_copies_of_one_message_are_one_effect(worker: LocalWorker, ledger: Ledger, key: str) -> None:
    """FC-01, FC-03: ten deliveries with one id, each of which returns normally."""
    task_id = str(uuid.uuid4())
    results = [tasks.charge.apply_async((key, "renew"), task_id=task_id) for _ in range(10)]
    until(lambda: worker.logs().count(f"{tasks.charge.name}[{task_id}] succeeded") == 10)
    assert [result.get(**WAIT) for result in results] == [{"attempt": 1}] * 10
    assert ledger.outside(key) == ledger.entered(key) == ["1"]


@BOTH
def test_a_body_may_outlast_its_lease(worker: LocalWorker, ledger: Ledger, key: str, name: str) -> None:
    """FC-02, FC-37: it is renewed in every pool; under gevent by a greenlet, beside a body that waits."""
    assert getattr(tasks, name).delay(key, "renew").get(**WAIT) == {"attempt": 1}
    assert ledger.booked(key) + ledger.outside(key) == ["1"]
    assert ledger.entered(key) == ["1"]


@BOTH
def test_a_replay_lets_the_chain_go_on(worker: LocalWorker, ledger: Ledger, key: str, name: str) -> None:
    """FC-26: the process dies after the commit and before it has sent the next step; the next delivery sends it."""
    key = f"dies-{key}"
    result = chain(getattr(tasks, name).s(key), tasks.note.s(key=key)).delay()
    if worker.pool != "prefork":  # there only a child has died
        worker.container.wait()
        worker.restart()
    assert result.get(**WAIT) == {"attempt": 1}
    assert ledger.booked(key) + ledger.outside(key) == ["1"]
    assert len(ledger.noted(key)) == 1


@pytest.mark.parametrize(
    ("name", "how", "effects", "result"),
    [
        ("book", "hold", ["2"], {"attempt": 2}),
        ("charge", "hold", ["1"], {"probed": 1}),
        ("charge", "before", ["2"], {"attempt": 2}),
    ],
)
def test_a_worker_killed_in_the_body(
    worker: LocalWorker, ledger: Ledger, key: str, name: str, how: str, effects: list[str], result: dict[str, int]
) -> None:
    """FC-06: rolled back and run again; or probed, and run again only if nothing went out."""
    sent = getattr(tasks, name).delay(key, how)
    ledger.wait_for_the_body(key)
    worker.kill()
    worker.restart()
    assert sent.get(**WAIT) == result
    assert ledger.booked(key) + ledger.outside(key) == effects


@pytest.mark.parametrize(
    ("name", "effects", "result"), [("book", ["2"], {"attempt": 2}), ("charge", ["1"], {"probed": 1})]
)
def test_a_child_killed_in_the_body(
    worker: LocalWorker, ledger: Ledger, key: str, name: str, effects: list[str], result: dict[str, int]
) -> None:
    """FC-06, FC-07."""
    if worker.pool != "prefork":
        pytest.skip("no pool but prefork has children")
    assert getattr(tasks, name).delay(key, "kill").get(**WAIT) == result
    assert ledger.booked(key) + ledger.outside(key) == effects


def test_a_time_limit_in_the_body(worker: LocalWorker, ledger: Ledger, key: str) -> None:
    """FC-10, FC-42: a timeout is not a "no"."""
    task = {"prefork": tasks.limited_softly, "gevent": tasks.limited_hard}.get(worker.pool)
    if task is None:
        pytest.skip("Celery has no time limits in this pool")
    with pytest.raises(Exception, match="TimeLimitExceeded"):
        task.delay(key).get(**WAIT)
    # Under gevent Celery gives the message back, and its next delivery asks the probe: no call may come between.
    settled = State.DONE if worker.pool == "gevent" else State.UNCERTAIN
    until(lambda: ledger.state(task, key) is settled)
    assert ledger.outside(key) == ["1"]
    assert task.delay(key).get(**WAIT) == {"probed": 1}
    assert ledger.outside(key) == ["1"]


def test_a_warm_shutdown_lets_the_body_end(worker: LocalWorker, ledger: Ledger, key: str) -> None:
    result = tasks.charge.delay(key, "hold")
    ledger.wait_for_the_body(key)
    worker.kill("SIGTERM")
    until(lambda: "Warm shutdown" in worker.logs())
    ledger.release(key)
    worker.container.wait()
    assert result.get(**WAIT) == {"attempt": 1}
    assert ledger.outside(key) == ["1"]


@pytest.mark.parametrize(
    ("name", "interrupted", "effects", "result"),
    [
        ("book", State.FREE, ["2"], {"attempt": 2}),
        ("charge", State.UNCERTAIN, ["1"], {"probed": 1}),
    ],
)
def test_a_cold_shutdown_in_the_body(
    worker: LocalWorker,
    ledger: Ledger,
    key: str,
    name: str,
    interrupted: State,
    effects: list[str],
    result: dict[str, int],
) -> None:
    """FC-10: what was not committed is rolled back, what went out is uncertain, and either is known at once."""
    task = getattr(tasks, name)
    sent = task.delay(key, "hold")
    ledger.wait_for_the_body(key)
    worker.kill("SIGQUIT")
    until(lambda: "terminate all running tasks" in worker.logs())
    if worker.pool == "threads":  # nothing can interrupt a thread: it ends its work, with its lease renewed
        ledger.release(key)
        interrupted, effects, result = State.DONE, ["1"], {"attempt": 1}
    worker.container.wait()
    assert ledger.state(task, key) is interrupted
    worker.restart()
    if worker.pool in ("gevent", "solo"):  # Celery has acknowledged the message
        sent = task.delay(key, "hold")
    assert sent.get(**WAIT) == result
    assert ledger.booked(key) + ledger.outside(key) == effects
