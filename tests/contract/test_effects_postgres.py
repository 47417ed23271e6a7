"""PostgreSQL keeps the guarantees that the executable specification keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from pgref.clock import Clock
from pgref.conformance import EffectStoreConformance
from pgref.conformance.harness import TTL
from pgref.contracts.effects import EffectStore
from pgref.postgres import Stores, drop_schema, new_schema


class TestPostgresEffectStore(EffectStoreConformance):
    @pytest.fixture
    def conformance_backend(self, engine: sa.Engine, schema: str) -> Any:
        return engine, schema

    def make_store(self, clock: Clock) -> EffectStore:
        engine, schema = self.backend
        return Stores.open(engine, schema=schema, clock=clock).effects

    def make_empty_store(self, clock: Clock) -> EffectStore:
        engine, _ = self.backend
        schema = new_schema(engine)
        self.afterwards.callback(drop_schema, engine, schema)
        return Stores.open(engine, schema=schema, clock=clock).effects


@pytest.fixture(scope="module")
def serializable(engine: sa.Engine) -> Iterator[sa.Engine]:
    default = r"-c default_transaction_isolation=serializable"
    serializable = sa.create_engine(engine.url, connect_args={"options": default})
    yield serializable
    serializable.dispose()


class TestPostgresEffectStoreOnSerializable(TestPostgresEffectStore):
    """READ COMMITTED is ours, whatever the database's default is."""

    @pytest.fixture
    def conformance_backend(self, serializable: sa.Engine, schema: str) -> Any:
        return serializable, schema

    def test_renewed_within_its_transaction(self) -> None:
        """G12, G13: what an effect has looked at before its lease was renewed does not make its completion fail."""
        engine, schema = self.backend
        stores = Stores.open(engine, schema=schema, clock=self.clock)
        action = self.action()
        lease = self.granted(action)
        with stores.database.transaction() as connection:
            connection.exec_driver_sql("SELECT 1")
            self.store.renew(action, lease, TTL)
            stores.effects.complete_within(connection, action, lease, "result")
        assert self.record(action).result == "result"
