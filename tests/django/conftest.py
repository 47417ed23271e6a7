"""The example project in this process, on the test's own servers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import celery
import pytest
from django.db import connections

from celery_integration.process import Gate, gate_of
from pgref.embedded import PostgresServer, ValkeyServer
from pgref.postgres import Stores
from tests.django.acts import Body, Entries, Put, bodies


@pytest.fixture(scope="session")
def environment(postgres: PostgresServer, valkey: ValkeyServer) -> dict[str, str]:
    dsn = postgres.create_database("django")
    stores = Stores.open(dsn)
    stores.ensure_schema()
    stores.close()
    return {
        "DATABASE_URL": dsn,
        "BROKER_URL": f"{valkey.url.rpartition('/')[0]}/7",  # a database of its own
        "DJANGO_SETTINGS_MODULE": "examples.django.settings",
    }


@pytest.fixture(scope="session")
def project(environment: dict[str, str]) -> Iterator[celery.Celery]:
    """The project, set up as `python -m django` would, with its table made. Other tests' apps are not Django's."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(sys, "path", [*sys.path])
        import django

        django.setup()
    from django.core.management import call_command

    from examples.django import app

    call_command("migrate", verbosity=0)
    app.finalize()
    yield app
    connections.close_all()


@pytest.fixture(autouse=True)
def app(project: celery.Celery) -> Iterator[celery.Celery]:
    """The project's Celery app, current for one test, on an empty queue."""
    previous: Any = celery.current_app
    previous = previous._get_current_object()
    project.set_current()
    project.control.purge()
    yield project
    previous.set_current()


@pytest.fixture
def gate(app: celery.Celery) -> Gate:
    return gate_of(app)


@pytest.fixture
def sent(app: celery.Celery) -> Callable[[], int]:
    """How many messages are in the queue."""

    def sent() -> int:
        with app.connection_for_read() as connection:
            channel: Any = connection.default_channel
            return int(channel.client.llen("celery"))

    return sent


@pytest.fixture
def entries() -> Entries:
    """What is committed under an order, read on a connection of its own."""
    from examples.django.ledger.models import Entry

    def entries(order: str) -> list[int]:
        other = connections.create_connection("default")
        try:
            with other.cursor() as cursor:
                cursor.execute(f'SELECT cents FROM {Entry._meta.db_table} WHERE "order" = %s', [order])
                return [cents for (cents,) in cursor.fetchall()]
        finally:
            other.close()

    return entries


@pytest.fixture
def connection(app: celery.Celery) -> Iterator[Any]:
    """Django's connection, closed after the test."""
    yield connections["default"]
    connections["default"].close()


@pytest.fixture
def body(key: str, connection: object) -> Iterator[Put]:
    """Put down the body of the test's key."""

    def body(function: Body) -> Body:
        bodies[key] = function
        return function

    yield body
    bodies.pop(key, None)
