"""The single-commit form: judged at the start of a transaction, granted and completed at its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import psycopg
import pytest
import sqlalchemy as sa

from pgref.clock import Clock
from pgref.conformance.harness import SCENES, TTL, EffectStoreHarness
from pgref.contracts.effects import Action, Contended, Done, Granted, InFlight, Lease, Outcome, State, Uncertain
from pgref.errors import FenceStale, FingerprintMismatch, LeaseLost, Unavailable
from pgref.postgres import PostgresEffectStore, Stores, drop_schema, new_schema


class TestSingleCommit(EffectStoreHarness):
    stores: Stores

    @pytest.fixture
    def conformance_backend(self, engine: sa.Engine, schema: str) -> Any:
        return engine, schema

    def make_store(self, clock: Clock) -> PostgresEffectStore:
        engine, schema = self.backend
        self.stores = Stores.open(engine, schema=schema, clock=clock)
        return self.stores.effects

    def once(self, action: Action, result: str = "result") -> Outcome:
        """Run an effect that writes nothing else."""
        with self.stores.database.transaction() as connection:
            outcome = self.stores.effects.acquire_within(connection, action)
            if isinstance(outcome, Granted):
                self.stores.effects.complete_acquired(connection, action, outcome.lease, result)
        return outcome

    def overtaken(self, action: Action, meanwhile: Callable[[Lease], object]) -> None:
        """Run an effect during which something else happens."""
        with self.stores.database.transaction() as connection:
            outcome = self.stores.effects.acquire_within(connection, action)
            assert isinstance(outcome, Granted)
            meanwhile(outcome.lease)
            self.stores.effects.complete_acquired(connection, action, outcome.lease, "late")

    @pytest.mark.parametrize("name", SCENES)
    def test_judges_as_acquire_does(self, name: str) -> None:
        """G1-G6, G8, G22: the same answer in every state, and what it says is done afterwards."""
        expected = self.acquire(SCENES[name](self).action)
        self.token = uuid4().hex
        action = SCENES[name](self).action
        outcome = self.once(action)
        if isinstance(outcome, Granted):
            assert isinstance(expected, Granted)
            assert (outcome.lease.fence, outcome.attempt) == (expected.lease.fence, expected.attempt)
            record = self.record(action)
            assert (record.state, record.fence, record.attempt) == (State.DONE, outcome.lease.fence, outcome.attempt)
            assert self.acquire(action) == Done("result")
            self.resource_is(action.resource.removeprefix(self.named("")), held=False, newest=outcome.lease.fence)
        elif isinstance(outcome, Uncertain):
            assert isinstance(expected, Uncertain)
            assert outcome.reason == expected.reason
        else:
            assert outcome == expected

    def test_an_expired_intent_is_flipped(self) -> None:
        """G3: committed although nothing is granted."""
        action = self.action()
        self.granted(action)
        self.tick()
        assert isinstance(self.once(action), Uncertain)
        assert (self.state(action), self.events(action)) == (State.UNCERTAIN, ["expired"])

    def test_an_expired_holder_of_the_resource_is_flipped(self) -> None:
        """G3, G6: by whoever takes the resource over."""
        other = self.action("other")
        self.granted(other)
        self.tick()
        assert isinstance(self.once(self.action()), Granted)
        assert self.state(other) is State.UNCERTAIN

    def test_another_input(self) -> None:
        """G9: refused in any state."""
        self.once(self.action(fingerprint="one"))
        with pytest.raises(FingerprintMismatch):
            self.once(self.action(fingerprint="two"))

    def test_what_is_rolled_back_never_was(self) -> None:
        """G10: no key, no fence, no attempt."""
        action = self.action()
        with pytest.raises(ZeroDivisionError):
            self.overtaken(action, lambda _: 1 // 0)
        assert self.store.lookup(action.key) is None
        outcome = self.once(action)
        assert isinstance(outcome, Granted)
        assert (outcome.lease.fence, outcome.attempt) == (1, 1)

    def test_a_second_one_is_told_at_once(self) -> None:
        """G4, G5, G7: without waiting for the transaction of the first."""
        action = self.action()
        with self.stores.database.transaction() as connection:
            first = self.stores.effects.acquire_within(connection, action)
            assert isinstance(first, Granted)
            assert isinstance(self.once(action), InFlight)
            assert isinstance(self.once(self.action("other")), Contended)
            assert isinstance(self.once(self.action("other", on="another")), Granted)
            self.stores.effects.complete_acquired(connection, action, first.lease, "first")
        assert self.once(action) == Done("first")
        assert isinstance(self.once(self.action("third")), Granted)

    @pytest.mark.parametrize("known", [False, True])
    @pytest.mark.parametrize(("rival", "error"), [("key", LeaseLost), ("other", LeaseLost), ("gone", FenceStale)])
    def test_the_ordinary_way_wins(self, known: bool, rival: str, error: type[Exception]) -> None:
        """G7, G11: what was granted meanwhile stands, and the transaction with its effect is rolled back."""
        action = self.action()
        if known:
            self.store.abandon(action, self.granted(action))

        def meanwhile(_: Lease) -> None:
            lease = self.granted(self.action(rival))
            if rival == "gone":
                self.store.complete(self.action(rival), lease, "other")

        with pytest.raises(error):
            self.overtaken(action, meanwhile)
        assert self.state(self.action(rival)) is (State.DONE if rival == "gone" else State.IN_FLIGHT)
        record = self.store.lookup(action.key)
        assert record is None or record.state is not State.DONE

    def test_raised_fences(self) -> None:
        """G28: a fence from before is not completed."""
        engine, _ = self.backend
        schema = new_schema(engine)
        self.afterwards.callback(drop_schema, engine, schema)
        self.backend = engine, schema
        self.store = self.make_store(self.clock)
        self.once(self.action("first"))
        with pytest.raises(FenceStale):
            self.overtaken(self.action(), lambda lease: self.store.raise_fences(lease.fence + 10))

    def test_no_lease_to_use_elsewhere(self) -> None:
        """G11: before its commit nobody knows of it."""
        action = self.action()
        with pytest.raises(FenceStale):
            self.overtaken(action, lambda lease: self.store.renew(action, lease, TTL))

    def test_a_transaction_of_ones_own(self) -> None:
        """G26: any connection judges; the commit in the same round trip is for one that `transaction` lent."""
        engine, _ = self.backend
        action = self.action()
        with engine.connect() as connection, connection.begin():
            assert isinstance(self.stores.effects.acquire_within(connection, action), Granted)
        assert self.store.lookup(action.key) is None

    def test_a_transaction_that_has_failed(self) -> None:
        """G26: what the database refuses to hear is not written."""
        with self.stores.engine.connect() as connection:
            with pytest.raises(sa.exc.DBAPIError):
                connection.exec_driver_sql("SELECT 1 / 0")
            with pytest.raises(psycopg.errors.InFailedSqlTransaction):
                self.stores.effects.acquire_within(connection, self.action())

    def test_no_connection(self) -> None:
        """G26: said so, and nothing is written."""
        nobody = Stores.open("postgresql+psycopg://nobody@127.0.0.1:1/none", settle_seconds=1)
        with pytest.raises(Unavailable), nobody.database.transaction():
            pytest.fail("there is no connection to lend")
