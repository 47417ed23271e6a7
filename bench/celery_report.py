"""Measure tasks on one real worker beside a bare task of the same run, and print it."""

from __future__ import annotations

import argparse
import os
import statistics
import time
import uuid
from typing import Any

from bench.network import Network
from bench.operations import prepare
from bench.report import COUNTERS, through
from celery_integration.testing import WorkerProcess
from pgref.embedded import PostgresServer, ValkeyServer
from pgref.postgres import Stores

__all__ = ["main"]

WARMED_UP = 20
COUNTED = 100
FLUSH_SECONDS = 1.1
"""A session tells the server's counters of its commits at most once a second."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.celery", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=400, help="per round and variant")
    options = parser.parse_args()
    settings = {"shared_preload_libraries": "pg_stat_statements"}
    with PostgresServer(settings=settings) as postgres, ValkeyServer() as valkey, Network(postgres.port) as network:
        prepare(postgres.dsn)
        environment = {"BENCH_BROKER_URL": valkey.url, "BENCH_DSN": postgres.dsn}
        os.environ.update(environment)
        from bench import tasks  # noqa: PLC0415  reads the environment

        sender = Sender(tasks)
        with WorkerProcess("bench.tasks", concurrency=1, environment=environment):
            sender.report_times(options.rounds, options.tasks)
        stores = Stores.open(postgres.dsn)
        through_proxy = {**environment, "BENCH_DSN": through(network, postgres.dsn)}
        with WorkerProcess("bench.tasks", concurrency=1, environment=through_proxy):
            sender.report_costs(network, stores)
        stores.close()


class Sender:
    """Sends tasks, lets the worker run them, and takes the time."""

    def __init__(self, tasks: Any) -> None:
        self._all = {**tasks.FLOORS, **{name: task for name, (task, _) in tasks.VARIANTS.items()}}
        self._floors = {name: floor for name, (_, floor) in tasks.VARIANTS.items()}
        self._control = tasks.app.control

    def report_times(self, rounds: int, tasks: int) -> None:
        """Print milliseconds a task, and the rate beside that of the bare task."""
        for name in self._all:
            self.seconds(name, WARMED_UP)
        times: dict[str, list[float]] = {name: [] for name in self._all}
        for number in range(rounds):
            for name in list(self._all)[:: 1 if number % 2 else -1]:
                times[name].append(self.seconds(name, tasks) / tasks)
        print(f"{'task':24} {'ms each':>12} {'of bare':>9}")
        for name, each in times.items():
            floor = times[self._floors.get(name, name)]
            ratio = statistics.median(theirs / mine for mine, theirs in zip(each, floor, strict=True))
            print(f"{name:24} {statistics.median(each) * 1000:12.2f} {ratio:9.2f}", flush=True)

    def report_costs(self, network: Network, stores: Stores) -> None:
        """Print what the database was asked for one task, as a proxy and the server count it."""
        print(f"\n{'counted per task':24} {'round trips':>12} {'commits':>9}")
        for name in self._all:
            self.seconds(name, WARMED_UP)
            before = self._counted(name, network, stores)
            self.seconds(name, COUNTED - 1)
            after = self._counted(name, network, stores)
            trips, commits = ((late - early) / COUNTED for early, late in zip(before, after, strict=True))
            print(f"{name:24} {trips:12.2f} {commits:9.2f}", flush=True)

    def seconds(self, name: str, count: int) -> float:
        """Return the time that sending so many tasks and then running them takes."""
        self._control.cancel_consumer("celery", reply=True)
        started = time.perf_counter()
        results = [self._all[name].delay("known" if name == "replay" else uuid.uuid4().hex) for _ in range(count)]
        sent = time.perf_counter() - started
        started = time.perf_counter()
        self._control.add_consumer("celery")
        for result in results:
            result.get(timeout=60)
        return sent + time.perf_counter() - started

    def _counted(self, name: str, network: Network, stores: Stores) -> tuple[int, int]:
        time.sleep(FLUSH_SECONDS)
        self.seconds(name, 1)  # with its commit the worker's session tells what it has counted
        with stores.database.raw() as connection:
            row = connection.execute(COUNTERS).fetchone()
        assert row is not None
        return network.round_trips, row[1]
