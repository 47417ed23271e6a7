"""The example works as its README says: each command, and a worker that outlives its connections."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_integration.process import Gate
from pgref.embedded import PostgresServer
from tests.django.acts import Entries

ROOT = Path(__file__).parents[2]
README = (ROOT / "examples/django/README.md").read_text()
PREPARE, SERVE, CALL = [block.splitlines() for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)]
DEADLINE_SECONDS = 60.0

Environment = dict[str, str]


@pytest.fixture(scope="module")
def surroundings(environment: Environment) -> Environment:
    """The variables of a terminal in which the commands of this Python are found."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, **environment, "PATH": path}


def said(command: str, environment: Environment) -> str:
    """Run a command as written, and return the last line that it says."""
    done = subprocess.run(
        shlex.split(command),
        check=False,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return (done.stdout.splitlines() or [""])[-1]


def test_the_project_is_prepared_as_written(postgres: PostgresServer, surroundings: Environment) -> None:
    """The checks, the tables, and the project's own tests in Django's test database."""
    fresh = {**surroundings, "DATABASE_URL": postgres.create_database("fresh")}
    for command in PREPARE:
        if not command.startswith("export "):
            said(command, fresh)


@pytest.fixture(scope="module")
def worker(
    project: object, surroundings: Environment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[subprocess.Popen[bytes]]:
    with (tmp_path_factory.mktemp("django") / "worker.log").open("wb") as log:
        process = subprocess.Popen(
            shlex.split(SERVE[0]),
            cwd=ROOT,
            env=surroundings,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.usefixtures("worker")
def test_the_call_can_be_repeated(surroundings: Environment, entries: Entries) -> None:
    call, _ = CALL
    assert said(call, surroundings) == said(call, surroundings) == "{'booked': 1200, 'attempt': 1}"
    assert entries("7") == [1200]


@pytest.mark.usefixtures("worker")
def test_a_worker_survives_the_loss_of_its_connections(gate: Gate, key: str, entries: Entries) -> None:
    """Two copies; then every connection is cut, Django's and the gate's; and two copies of another."""
    from examples.django.ledger.tasks import book

    for order in (key, f"{key}-after"):
        copies = [book.delay(order, 5) for _ in range(2)]
        assert [copy.get(timeout=DEADLINE_SECONDS) for copy in copies] == [{"booked": 5, "attempt": 1}] * 2
        assert entries(order) == [5]
        with gate.stores.database.raw() as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )
