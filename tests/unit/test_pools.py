"""Pools in which fenced tasks cannot run are refused, in one sentence that says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from celery import Celery, concurrency
from celery.worker import WorkController

from celery_integration import ConfigurationError
from celery_integration.pools import check_pool

ROOT = Path(__file__).parents[2]
UNDER_GEVENT = """
import sys
if sys.argv[1] == "psycopg first":
    import psycopg
if sys.argv[1] != "not patched":
    from gevent import monkey
    monkey.patch_all()
from celery_integration.pools import check_pool
check_pool(sys.argv[2])
"""
WORKER = "import celery_integration.pools; from celery import Celery; app = Celery(broker='memory://')\n"
TOO_LATE = "psycopg was imported before gevent patched the process: start the worker with `--pool gevent`"


def under_gevent(order: str, pool: str = "gevent") -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", UNDER_GEVENT, order, pool]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("pool", ["prefork", "processes", "threads", "solo", "custom_package.pool:TaskPool"])
def test_other_pools_are_let_through(pool: str) -> None:
    check_pool(pool)


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_pool_class_will_do(pool: str) -> None:
    check_pool(concurrency.get_implementation(pool))


@pytest.mark.parametrize("pool", ["eventlet", "celery.concurrency.eventlet:TaskPool"])
def test_eventlet_is_refused(pool: str) -> None:
    with pytest.raises(ConfigurationError, match="do not run under eventlet: start the worker with --pool gevent"):
        check_pool(pool)


def test_gevent_in_a_process_that_is_not_patched_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=TOO_LATE):
        check_pool(concurrency.get_implementation("gevent"))


@pytest.mark.parametrize("order", ["psycopg first", "not patched"])
def test_gevent_patched_too_late_is_refused(order: str) -> None:
    ended = under_gevent(order)
    assert ended.returncode == 1
    assert TOO_LATE in ended.stderr


@pytest.mark.parametrize("pool", ["gevent", "celery.concurrency.gevent:TaskPool"])
def test_gevent_patched_first_is_let_through(pool: str) -> None:
    assert under_gevent("gevent first", pool).stderr == ""


def test_a_worker_that_is_refused_does_not_start() -> None:
    """A signal's handler that raises an `Exception` would stop nothing."""
    app = Celery(broker="memory://", set_as_current=False)
    with pytest.raises(SystemExit, match=TOO_LATE):
        WorkController(app=app, pool="gevent")


def test_the_sentence_is_what_the_user_sees(tmp_path: Path) -> None:
    """FC-53: an app that chooses its pool in its settings is not patched by Celery."""
    (tmp_path / "late.py").write_text(f"{WORKER}app.conf.worker_pool = 'gevent'\n")
    command = [sys.executable, "-m", "celery", "-A", "late", "worker"]
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(TOO_LATE)
