"""Tasks that do nothing, plain and protected in several ways, on one app."""

from __future__ import annotations

import os
from typing import Any

import sqlalchemy as sa
from celery import Celery
from celery_once import QueueOnce
from celery_singleton import Singleton

from celery_integration import Effect, fenced_task, install
from celery_integration.process import gate_of

URL = os.environ.get("BENCH_BROKER_URL", "memory://")

app = Celery("bench", broker=URL, backend=URL)
app.conf.update(
    task_acks_late=True,
    worker_prefetch_multiplier=64,
    singleton_backend_url=URL,
    singleton_lock_expiry=600,
    broker_connection_retry_on_startup=True,
    ONCE={"backend": "celery_once.backends.Redis", "settings": {"url": URL, "default_timeout": 600}},
)
app.set_default()
install(app, dsn=os.environ.get("BENCH_DSN", "postgresql+psycopg://nobody@localhost/none"))

UPDATE = sa.text("UPDATE floor SET n = n + 1 WHERE key = :key")


@app.task
def bare(name: str) -> int:
    return 1


@app.task
def bare_update(name: str) -> int:
    with gate_of(app).stores.engine.begin() as connection:
        connection.execute(UPDATE, {"key": name})
    return 1


@fenced_task(key="{name}")
def fenced(effect: Effect, name: str) -> int:
    return 1


@fenced_task(key="{name}", single_commit=True)
def single_commit(effect: Effect, name: str) -> int:
    return 1


@fenced_task(key="{name}", single_commit=True)
def single_commit_update(effect: Effect, name: str) -> int:
    effect.connection.execute(UPDATE, {"key": name})
    return 1


@fenced_task(key="known")
def replay(effect: Effect, name: str = "") -> int:
    return 1


@app.task(base=QueueOnce, once={"keys": ["name"]})
def once(name: str) -> int:
    return 1


class Single(Singleton):  # type: ignore[misc]
    """A singleton that does not trip over its own base class."""

    abstract = True


@app.task(base=Single)
def singleton(name: str) -> int:
    return 1


VARIANTS: dict[str, tuple[Any, str]] = {
    "fenced": (fenced, "bare"),
    "single_commit": (single_commit, "bare"),
    "single_commit_update": (single_commit_update, "bare_update"),
    "replay": (replay, "bare"),
    "celery-once": (once, "bare"),
    "celery-singleton": (singleton, "bare"),
}
"""By name: the task, and the one it is compared with."""

FLOORS: dict[str, Any] = {"bare": bare, "bare_update": bare_update}
