"""Measure the gate against floors of the same run, and print it."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial

import sqlalchemy as sa

from bench.clients import Clients
from bench.growth import acquire_seconds, fill, hot_updates, memory_growth_bytes
from bench.network import Network
from bench.operations import CASES, Case, Operations, fresh_names, prepare
from pgref.embedded import PostgresServer
from pgref.postgres import Stores

__all__ = ["COUNTERS", "main", "through"]

WARMED_UP = 10
COUNTED = 50
"""Operations of each kind that round trips, statements and commits are counted over."""
COUNTERS = """
SELECT (SELECT sum(calls)::bigint FROM pg_stat_statements WHERE toplevel),
    (SELECT xact_commit FROM pg_stat_database WHERE datname = current_database())"""
ACQUIRES = 2000
"""Grants timed at each size of the store."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--operations", type=int, default=400, help="per round and operation")
    parser.add_argument("--clients", default="1,2,8,16", help="numbers of client processes, with commas")
    parser.add_argument("--delays", default="0,0.5", help="added network round trips in milliseconds, with commas")
    parser.add_argument("--growth", default="10000,1000000", help="done keys, with commas; empty: not measured")
    parser.add_argument("--effects", type=int, default=100_000, help="in one process, for its memory; 0: not measured")
    options = parser.parse_args()
    with PostgresServer(settings={"shared_preload_libraries": "pg_stat_statements"}) as server:
        prepare(server.dsn)
        print_costs(server)
        for delay in map(float, options.delays.split(",")):
            with Network(server.port, round_trip_seconds=delay / 1000) as network:
                dsn = through(network, server.dsn) if delay else server.dsn
                for count in map(int, options.clients.split(",")):
                    print_ratios(dsn, count, delay, options.rounds, options.operations)
        stores = Stores.open(server.dsn)
        if options.effects:
            grown = memory_growth_bytes(stores, options.effects)
            print(f"\nmemory of a process over {options.effects} effects: {grown / 1e6:+.1f} MB")
        for table, updates, hot in hot_updates(stores.engine):
            print(f"{table}: {hot / updates:.0%} of {updates} updates are HOT")
        if options.growth:
            print_growth(stores, [int(size) for size in options.growth.split(",")])
        stores.close()


def through(network: Network, dsn: str) -> str:
    return sa.make_url(dsn).set(port=network.port).render_as_string(hide_password=False)


def print_costs(server: PostgresServer) -> None:
    """Print what one call of each operation costs, as counted by a proxy and by the server."""
    print(f"{'counted per call':40} {'round trips':>12} {'statements':>12} {'commits':>9}")
    with Network(server.port) as network:
        stores = Stores.open(through(network, server.dsn))
        for case in CASES:
            run = getattr(Operations(stores), case.operation)
            for name in fresh_names(WARMED_UP):
                run(name)
            names = fresh_names(COUNTED)
            of_counting = _counted(network, stores, list)
            counted = _counted(network, stores, partial(_run_all, run, names))
            each = [(mine - of_it) / COUNTED for mine, of_it in zip(counted, of_counting, strict=True)]
            print(f"{case.operation:40} {each[0]:12.2f} {each[1]:12.2f} {each[2]:9.2f}", flush=True)
        stores.close()


def _run_all(run: Callable[[str], None], names: list[str]) -> None:
    for name in names:
        run(name)


def _counted(network: Network, stores: Stores, run: Callable[[], object]) -> tuple[int, int, int]:
    """Return the round trips, statements and commits of ``run``, and of counting them."""
    before = network.round_trips, *_counters(stores)
    run()
    after = network.round_trips, *_counters(stores)
    trips, statements, commits = (late - early for early, late in zip(before, after, strict=True))
    return trips, statements, commits


def _counters(stores: Stores) -> tuple[int, int]:
    with stores.database.raw() as connection:
        connection.execute("SELECT pg_stat_force_next_flush()")
        row: tuple[int, int] | None = connection.execute(COUNTERS).fetchone()
    assert row is not None
    return row


def print_ratios(dsn: str, clients: int, delay: float, rounds: int, operations: int) -> None:
    """Print rates beside those of the floors, as medians of rounds."""
    print(f"\n{f'{clients} clients, {delay} ms added':40} {'per second':>12} {'floor':>12} {'ratio':>9}")
    crowd = Clients(dsn, clients)
    for case in CASES:
        rates = list(measured(crowd, case, rounds, operations))
        rate, floor = (statistics.median(column) for column in zip(*rates, strict=True))
        ratio = statistics.median(mine / theirs for mine, theirs in rates)
        print(f"{case.title:40} {rate:12.0f} {floor:12.0f} {ratio:9.2f}", flush=True)
    crowd.close()


def measured(clients: Clients, case: Case, rounds: int, operations: int) -> Iterator[tuple[float, float]]:
    """Yield the rates of operation and floor, round by round, the order turning."""
    calls = {case.floor: operations, case.operation: max(16, operations // case.keys)}
    keys = {case.floor: 1, case.operation: case.keys}
    for operation, count in calls.items():
        clients.seconds(operation, max(count // 4, 16))
    for number in range(rounds):
        order = list(calls)[:: 1 if number % 2 else -1]
        rate = {name: calls[name] * keys[name] / clients.seconds(name, calls[name]) for name in order}
        yield rate[case.operation], rate[case.floor]


def print_growth(stores: Stores, sizes: list[int]) -> None:
    """Print the median time of a grant as done keys get more."""
    filled, first = 0, 0.0
    for size in sizes:
        fill(stores, filled + 1, size)
        filled = size
        seconds = acquire_seconds(stores, ACQUIRES)
        first = first or seconds
        print(f"acquire at {size:9} done keys: {seconds * 1e6:6.0f} us, {seconds / first:.2f} of the first", flush=True)
