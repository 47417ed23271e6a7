"""`celery fenced health`, as a supervisor calls it."""

from __future__ import annotations

import subprocess
import sys

from tests.plugins.workers import ROOT, Worker

AWAY = {"FENCED_DSN": "postgresql+psycopg://nobody:hidden@127.0.0.1:1/none"}


def health(worker: Worker, *options: str, **environment: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "celery", "-A", "tests.celery.shop", "fenced", "health", *options]
    done = subprocess.run(
        command, env={**worker.environment, **environment}, cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_a_worker_that_can_work_is_ready(worker: Worker) -> None:
    code, said = health(worker)
    assert (code, said.rpartition(": ")[2]) == (0, "ready\n")
    assert health(worker, said.partition(":")[0]) == (0, said)


def test_without_its_database_it_lives_and_is_not_ready(worker: Worker) -> None:
    code, said = health(worker, "--live", **AWAY)
    assert (code, said.rpartition(": ")[2]) == (0, "alive\n")
    code, said = health(worker, **AWAY)
    assert (code, "not reachable" in said, "hidden" in said) == (1, True, False)


def test_a_worker_that_does_not_answer(worker: Worker) -> None:
    assert health(worker, "nobody@nowhere", "--timeout", "0.5") == (1, "Error: nobody@nowhere does not answer\n")


def test_the_broker_is_away(worker: Worker) -> None:
    code, said = health(worker, BROKER_URL="redis://127.0.0.1:1/0")
    assert (code, said.startswith("Error: the broker is away")) == (1, True)
