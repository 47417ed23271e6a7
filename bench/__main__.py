"""Measure the gate against floors of the same run."""

from __future__ import annotations

import argparse
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier

import sqlalchemy as sa

from pgref.contracts.effects import Action, Granted, RetrySafety
from pgref.embedded import PostgresServer
from pgref.postgres import Stores, ensure_schema

Operation = Callable[[str], None]

UPSERT = "INSERT INTO floor VALUES (%s, 1, 'x') ON CONFLICT (key) DO UPDATE SET n = floor.n + 1"
UPDATE = "UPDATE floor SET n = n + 1 WHERE key = %s"
SELECT = "SELECT * FROM floor WHERE key = %s"


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
        self.known = Action("known", "known", retry_safety=RetrySafety.SAFE)
        self.effects.complete(self.known, self._grant(self.known).lease, "1")
        for name in ("known", "row"):
            self._floor(UPSERT, name)

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
        self.effects.acquire(self.known, 60)

    def lookup(self, _: str) -> None:
        self.effects.lookup("known")

    def select(self, _: str) -> None:
        with self.stores.database.raw() as connection:
            connection.execute(SELECT, ("known",)).fetchall()

    def database_effect(self, name: str) -> None:
        action = Action(name, name)
        lease = self._grant(action).lease
        with self.stores.database.transaction() as connection:
            connection.exec_driver_sql(UPSERT, (f"row-{name}",))
            self.effects.complete_within(connection, action, lease, "1")

    def two_updates(self, name: str) -> None:
        for _ in range(2):
            self._floor(UPSERT, f"row-{name}")


def seconds(operation: Operation, clients: int, operations: int) -> float:
    """Return the time that ``clients`` threads take for ``operations`` calls together."""
    names = [[uuid.uuid4().hex for _ in range(operations // clients)] for _ in range(clients)]
    barrier = Barrier(clients + 1)

    def client(mine: list[str]) -> None:
        barrier.wait()
        for name in mine:
            operation(name)

    with ThreadPoolExecutor(clients) as pool:
        futures = [pool.submit(client, mine) for mine in names]
        barrier.wait()
        started = time.perf_counter()
        for future in futures:
            future.result()
        return time.perf_counter() - started


def measured(subject: Subject, case: Case, clients: int, rounds: int, operations: int) -> Iterator[tuple[float, float]]:
    """Yield the rates of operation and floor, round by round, the order turning."""
    for number in range(rounds):
        pair = [getattr(subject, case.operation), getattr(subject, case.floor)]
        order = pair if number % 2 else pair[::-1]
        times = {operation: seconds(operation, clients, operations) for operation in order}
        yield operations / times[pair[0]], operations / times[pair[1]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--operations", type=int, default=400, help="per round and operation")
    parser.add_argument("--clients", default="1,8", help="numbers of threads, with commas")
    options = parser.parse_args()
    with PostgresServer() as server:
        engine = sa.create_engine(server.dsn, pool_size=20)
        ensure_schema(engine)
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE floor (key text PRIMARY KEY, n int, note text)")
        subject = Subject(Stores.open(engine))
        print(f"{'':40} {'clients':>7} {'per second':>11} {'floor':>8} {'ratio':>6}")
        for case in CASES:
            for clients in map(int, options.clients.split(",")):
                rates = list(measured(subject, case, clients, options.rounds, options.operations))
                rate, floor = (statistics.median(column) for column in zip(*rates, strict=True))
                ratio = statistics.median(mine / theirs for mine, theirs in rates)
                print(f"{case.name:40} {clients:7} {rate:11.0f} {floor:8.0f} {ratio:6.2f}")
        engine.dispose()


if __name__ == "__main__":
    main()
