"""Connections of a process stay its own (FC-50), and a restarted server is found again."""

from __future__ import annotations

import os

import sqlalchemy as sa

from pgref.contracts.effects import Action, Granted
from pgref.embedded import PostgresServer
from pgref.postgres import Stores, ensure_schema
from tests.faults.state import assert_clean


def backend_pid(stores: Stores) -> int:
    with stores.database.raw() as connection:
        return connection.info.backend_pid


def in_child(stores: Stores) -> int:
    """Fork, use the stores there, and return the backend that the child talked to."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        stores.effects.lookup("k")
        os.write(writer, str(backend_pid(stores)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        pid = int(answer.read())
    os.wait()
    return pid


def test_a_forked_child_has_its_own_connection(engine: sa.Engine, schema: str) -> None:
    stores = Stores.open(engine.url, schema=schema)
    stores.effects.lookup("k")
    parent = backend_pid(stores)
    children = {in_child(stores) for _ in range(3)}
    assert len(children | {parent}) == 4
    assert backend_pid(stores) == parent
    stores.close()


def test_a_restarted_server_is_found_by_the_next_call() -> None:
    """Every pooled connection is dead; the call is asked again on a new one (G26)."""
    with PostgresServer(settings={"fsync": "off"}) as server:
        stores = Stores.open(server.dsn)
        ensure_schema(stores.engine)
        connections = [stores.engine.connect() for _ in range(4)]
        for connection in connections:
            connection.close()
        server.restart()
        assert isinstance(stores.effects.acquire(Action("k", "r"), 10), Granted)
        stores.close()


def test_the_pool_gets_back_idle_connections(engine: sa.Engine, schema: str) -> None:
    stores = Stores.open(engine, schema=schema)
    for _ in range(20):
        stores.effects.lookup("k")
    assert engine.pool.status().endswith("Current Checked out connections: 0")


def test_a_connection_in_the_middle_of_something_leaves_the_pool(engine: sa.Engine, schema: str) -> None:
    """G26: the next call does not find itself in somebody's transaction."""
    stores = Stores.open(engine.url, schema=schema)
    first = backend_pid(stores)
    with stores.database.raw() as connection:
        connection.execute("BEGIN")
    assert_clean(stores.engine)
    assert backend_pid(stores) != first
    stores.close()
