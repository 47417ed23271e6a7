"""The tasks of the smoke tests, and what they have done, in tables that would show a duplicate.

Bodies write `outside` at once, as a provider would; database effects write `booked` in their own transaction. A body
that is told to hold says so in `entered` and waits until its key is in `released`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from celery import Celery, shared_task
from celery.signals import before_task_publish

from celery_integration import Applied, Effect, NotApplied, fenced_task, install
from celery_integration.process import gate_of

LEASE_SECONDS = 1.0

metadata = sa.MetaData()
booked, outside, entered, released, noted = tables = [
    sa.Table(name, metadata, sa.Column("key", sa.Text, index=True), sa.Column("note", sa.Text))
    for name in ("booked", "outside", "entered", "released", "noted")
]

CONFIG: dict[str, Any] = {
    "broker_connection_retry_on_startup": True,
    "worker_cancel_long_running_tasks_on_connection_loss": False,
    "worker_prefetch_multiplier": 1,
}
VALKEY: dict[str, Any] = {
    "broker_transport_options": {
        "visibility_timeout": 2,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        # A worker that is killed while it restores must not keep the next one from restoring.
        "unacked_mutex_expire": 2,
    }
}
if "gevent.monkey" in sys.modules:
    # There kombu restores only when its wait of two seconds passes without an answer, which else comes every second.
    VALKEY["broker_transport_options"]["polling_interval"] = 2.1
RABBITMQ = {
    "broker_native_delayed_delivery_queue_type": "classic",
    "task_default_exchange_type": "topic",
    "task_default_queue_type": "quorum",
    "task_default_routing_key": "celery",
}


def configure(app: Celery, dsn: str) -> None:
    """Configure caller and worker alike, for the broker that the app has."""
    app.conf.update(CONFIG)
    app.conf.update(RABBITMQ if str(app.conf.broker_url).startswith("amqp") else VALKEY)
    install(app, dsn=dsn, lease_seconds=LEASE_SECONDS, comeback_seconds_max=0.5, reconcile_seconds=1, probe_seconds=1)


def _write(effect: Effect, table: sa.Table, key: str, note: Any) -> None:
    with gate_of(effect.task.app).stores.engine.begin() as connection:
        connection.execute(sa.insert(table).values(key=key, note=str(note)))


def _is_in(effect: Effect, table: sa.Table, key: str) -> bool:
    with gate_of(effect.task.app).stores.engine.begin() as connection:
        return connection.execute(sa.select(table).where(table.c.key == key)).first() is not None


def _end(effect: Effect, key: str, how: str) -> dict[str, int]:
    again = (effect.task.request.delivery_info or {}).get("redelivered")
    _write(effect, entered, key, f"{effect.attempt}, redelivered" if again else effect.attempt)
    match how:
        case "hold" if effect.attempt == 1:
            _wait_until_released(effect, key)
        case "kill" if effect.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        case "renew":
            _wait_for_renewals(effect, 4)
    return {"attempt": effect.attempt}


def _wait_until_released(effect: Effect, key: str) -> None:
    while not _is_in(effect, released, key):
        threading.Event().wait(0.05)


def _wait_for_renewals(effect: Effect, count: int) -> None:
    seen: set[datetime] = set()
    while len(seen) <= count:
        record = gate_of(effect.task.app).effects.lookup(effect.key)
        assert record is not None
        seen.add(record.expires_at)
        threading.Event().wait(0.02)


@fenced_task(key="{key}")
def book(effect: Effect, key: str, how: str = "return") -> Any:
    effect.connection.execute(sa.insert(booked).values(key=key, note=str(effect.attempt)))
    return _end(effect, key, how)


@fenced_task(key="{key}", sink="external", retry_safety="safe")
def charge(effect: Effect, key: str, how: str = "return") -> Any:
    effect.ensure_held()
    if how == "before":  # ends before anything has gone out
        return _end_before(effect, key)
    _write(effect, outside, key, effect.attempt)
    return _end(effect, key, how)


def _end_before(effect: Effect, key: str) -> Any:
    ended = _end(effect, key, "hold")
    _write(effect, outside, key, effect.attempt)
    return ended


def _asked(effect: Effect, key: str) -> Applied | NotApplied:
    return Applied({"probed": 1}) if _is_in(effect, outside, key) else NotApplied()


@charge.probe
def charge_probe(effect: Effect, key: str, how: str = "return") -> Applied | NotApplied:
    return _asked(effect, key)


@fenced_task(key="{key}", sink="external", retry_safety="safe", soft_time_limit=1)
def limited_softly(effect: Effect, key: str) -> Any:
    _write(effect, outside, key, effect.attempt)
    return _end(effect, key, "hold")


@fenced_task(key="{key}", sink="external", retry_safety="safe", time_limit=1)
def limited_hard(effect: Effect, key: str) -> Any:
    _write(effect, outside, key, effect.attempt)
    return _end(effect, key, "hold")


limited_softly.probe(_asked)
limited_hard.probe(_asked)


@fenced_task(key="{key}")
def note(effect: Effect, value: Any, key: str) -> Any:
    effect.connection.execute(sa.insert(noted).values(key=key, note=str(value)))
    return value


@shared_task
def ping() -> str:
    return "pong"


@before_task_publish.connect(sender=note.name)
def die_before_the_next_step(body: Any, **_: Any) -> None:
    """Kill the process that sends the next step of a chain, once for each key that asks for it."""
    key = body[1]["key"]
    if key.startswith("dies-"):
        from celery import current_app

        with gate_of(current_app).stores.engine.begin() as connection:
            before = connection.execute(sa.select(entered).where(entered.c.key == f"{key}/published")).first()
            connection.execute(sa.insert(entered).values(key=f"{key}/published", note=""))
        if before is None:
            os.kill(os.getpid(), signal.SIGKILL)


if "SMOKE_DSN" in os.environ:
    app = Celery("smoke")
    configure(app, os.environ["SMOKE_DSN"])
