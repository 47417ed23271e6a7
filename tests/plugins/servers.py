"""Real servers, started once per session; a schema of its own per module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from pgref.embedded import PostgresServer, ValkeyServer
from pgref.postgres import Stores, drop_schema, new_schema


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer(settings={"fsync": "off"}) as server:
        yield server


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="session")
def engine(postgres: PostgresServer) -> Iterator[sa.Engine]:
    engine = sa.create_engine(postgres.dsn)
    yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def schema(engine: sa.Engine) -> Iterator[str]:
    name = new_schema(engine)
    yield name
    drop_schema(engine, name)


@pytest.fixture(scope="module")
def stores(engine: sa.Engine, schema: str) -> Stores:
    return Stores.open(engine, schema=schema)
