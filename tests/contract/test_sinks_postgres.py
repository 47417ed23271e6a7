"""The sink in PostgreSQL passes the suite of fenced sinks."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from pgref.conformance import FencedSinkConformance
from pgref.postgres import PostgresSink, Stores

metadata = sa.MetaData()
value = sa.Table("sink_value", metadata, sa.Column("resource", sa.Text, primary_key=True), sa.Column("value", sa.Text))


class TestPostgresSink(FencedSinkConformance[sa.Connection]):
    backend: tuple[sa.Engine, str]

    @pytest.fixture
    def conformance_backend(self, engine: sa.Engine, schema: str) -> Any:
        metadata.create_all(engine)
        return engine, schema

    def make_sink(self) -> PostgresSink:
        engine, schema = self.backend
        return Stores.open(engine, schema=schema).sinks

    def write_value(self, connection: sa.Connection, resource: str, value_: str) -> None:
        connection.execute(sa.delete(value).where(value.c.resource == resource))
        connection.execute(sa.insert(value).values(resource=resource, value=value_))

    def read_value(self, resource: str) -> str | None:
        with self.backend[0].connect() as connection:
            return connection.execute(sa.select(value.c.value).where(value.c.resource == resource)).scalar()
