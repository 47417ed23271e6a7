"""A fenced task over Django's connection whose body each test puts down, and what the tests look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_integration import Effect, fenced_task
from celery_integration.django import DjangoSink
from celery_integration.process import Gate
from pgref.contracts.effects import State

Body = Callable[[Effect], Any]
Put = Callable[[Body], Body]
Entries = Callable[[str], list[int]]

bodies: dict[str, Body] = {}


@fenced_task(key="{key}", sink=DjangoSink())
def act(effect: Effect, key: str) -> Any:
    """Run the body that the test has put down under the key."""
    return bodies[key](effect)


def book(order: str, cents: int = 5) -> Any:
    from examples.django.ledger.models import Entry

    Entry.objects.create(order=order, cents=cents)


def state(gate: Gate, key: str) -> State | None:
    record = gate.effects.lookup(f"{act.name}:{key}")
    return None if record is None else record.state


def pid(connection: Any) -> int:
    """The server process of a Django connection."""
    return int(connection.connection.info.backend_pid)


def terminate(gate: Gate, pid: int) -> None:
    """End a server process; return when it has ended."""
    with gate.stores.database.raw() as other:
        other.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
