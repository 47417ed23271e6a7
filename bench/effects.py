"""Measure the gate against floors of the same run."""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pgref.contracts.effects import Action, Granted, RetrySafety
from pgref.embedded import PostgresServer
from pgref.postgres import Stores, ensure_schema

UPSERT = "INSERT INTO floor VALUES (%s, 1, 'x') ON CONFLICT (key) DO UPDATE SET n = floor.n + 1"
UPDATE = "UPDATE floor SET n = n + 1 WHERE key = %s"
SELECT = "SELECT * FROM floor WHERE key = %s"


KNOWN = Action("known", "known", retry_safety=RetrySafety.SAFE)
BUSINESS_ROWS = [f"row {number}" for number in range(1000)]


@dataclass(frozen=True)
class Case:
    """An operation, its floor, and how often the floor's operation stands in one operation."""

    name: str
    operation: str
    floor: str


CASES = (
    Case("acquire+complete / 2 upsert commits", "acquire_complete", "two_upserts"),
    Case("replay / primary-key SELECT", "replay", "select"),
    Case("lookup / primary-key SELECT", "lookup", "select"),
    Case("database effect / 2 UPDATE commits", "database_effect", "two_updates"),
)


class Subject:
    """The operations, by name; each takes a fresh name, except replay and lookup, which use known ones."""

    def __init__(self, stores: Stores) -> None:
        self.stores = stores
        self.effects = stores.effects

    def _grant(self, action: Action) -> Granted:
        outcome = self.effects.acquire(action, 60)
        assert isinstance(outcome, Granted)
        return outcome

    def _floor(self, statement: str, name: str) -> None:
        with self.stores.database.raw() as connection:
            connection.execute(statement, (name,))

    def acquire_complete(self, name: str) -> None:
        action = Action(name, name)
        self.effects.complete(action, self._grant(action).lease, "1")

    def two_upserts(self, name: str) -> None:
        self._floor(UPSERT, name)
        self._floor(UPSERT, name)

    def replay(self, _: str) -> None:
        self.effects.acquire(KNOWN, 60)

    def lookup(self, _: str) -> None:
        self.effects.lookup("known")

    def select(self, _: str) -> None:
        with self.stores.database.raw() as connection:
            connection.execute(SELECT, ("known",)).fetchall()

    def database_effect(self, name: str) -> None:
        action = Action(name, name)
        lease = self._grant(action).lease
        with self.stores.database.transaction() as connection:
            connection.exec_driver_sql(UPDATE, (_row(name),))
            self.effects.complete_and_commit(connection, action, lease, "1")

    def two_updates(self, name: str) -> None:
        for half in (name, name[::-1]):
            self._floor(UPDATE, _row(half))


def _row(name: str) -> str:
    return BUSINESS_ROWS[int(name[:8], 16) % len(BUSINESS_ROWS)]


class Clients:
    """Processes that each run the operations they are told, on connections of their own."""

    def __init__(self, dsn: str, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes = []
        self._processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_client, args=(dsn, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers()

    def seconds(self, operation: str, operations: int) -> float:
        """Return the time that all clients together take for ``operations`` calls."""
        share = operations // len(self._pipes)
        started = time.perf_counter()
        for pipe in self._pipes:
            pipe.send((operation, share))
        self._answers()
        return time.perf_counter() - started

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()

    def _answers(self) -> None:
        for pipe in self._pipes:
            pipe.recv()


def _client(dsn: str, pipe: Any) -> None:
    subject = Subject(Stores.open(dsn))
    pipe.send("ready")
    while order := pipe.recv():
        operation, count = order
        run = getattr(subject, operation)
        for name in [uuid.uuid4().hex for _ in range(count)]:
            run(name)
        pipe.send("done")


def measured(clients: Clients, case: Case, rounds: int, operations: int) -> Iterator[tuple[float, float]]:
    """Yield the rates of operation and floor, round by round, the order turning."""
    for operation in (case.operation, case.floor):
        clients.seconds(operation, operations // 4)
    for number in range(rounds):
        order = (case.operation, case.floor)[:: 1 if number % 2 else -1]
        times = {operation: clients.seconds(operation, operations) for operation in order}
        yield operations / times[case.operation], operations / times[case.floor]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--operations", type=int, default=400, help="per round and operation")
    parser.add_argument("--clients", default="1,8", help="numbers of client processes, with commas")
    options = parser.parse_args()
    with PostgresServer() as server:
        prepare(server.dsn)
        print(f"{'':40} {'clients':>7} {'per second':>11} {'floor':>8} {'ratio':>6}")
        for count in map(int, options.clients.split(",")):
            clients = Clients(server.dsn, count)
            for case in CASES:
                report(case, count, list(measured(clients, case, options.rounds, options.operations)))
            clients.close()


def prepare(dsn: str) -> None:
    engine = sa.create_engine(dsn)
    ensure_schema(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE floor (key text PRIMARY KEY, n int, note text) WITH (fillfactor = 70)")
        rows = ((name,) for name in ("known", *BUSINESS_ROWS))
        for row in rows:
            connection.exec_driver_sql(UPSERT, row)
    effects = Stores.open(engine).effects
    granted = effects.acquire(KNOWN, 60)
    assert isinstance(granted, Granted)
    effects.complete(KNOWN, granted.lease, "1")
    engine.dispose()


def report(case: Case, clients: int, rates: list[tuple[float, float]]) -> None:
    rate, floor = (statistics.median(column) for column in zip(*rates, strict=True))
    ratio = statistics.median(mine / theirs for mine, theirs in rates)
    print(f"{case.name:40} {clients:7} {rate:11.0f} {floor:8.0f} {ratio:6.2f}", flush=True)
