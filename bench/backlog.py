"""`make bench-backlog`: how fast a backlog is settled by several sweeps, and listed when it is large."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

from celery import Celery

from celery_integration import Applied, Effect, fenced_task, install
from celery_integration.process import gate_of
from celery_integration.sweep import sweep
from pgref.embedded import PostgresServer
from pgref.postgres import Stores

__all__ = ["main"]

PAGE = 50
LISTINGS = 50
FILL = """
WITH made AS (
  INSERT INTO pgref.effect_resource (fence, granted_fence, resource, action_key)
  SELECT 1, 1, 'asked:' || n, 'asked:' || n FROM generate_series(%(low)s::int, %(high)s::int) n RETURNING resource
)
INSERT INTO pgref.effect_action (
  fence, created_at, granted_at, expires_at, uncertain_at, holder, attempt, state, retry_safe, key, resource, reason,
  payload)
SELECT 1, t, t, t, t, gen_random_uuid(), 1, 2, false, resource, resource, 'bench',
    json_build_object('task', 'bench.asked', 'args', ARRAY[resource], 'kwargs', '{}'::json, 'options', '{}'::json)::text
FROM made, LATERAL (SELECT clock_timestamp() AS t) now
"""
FIRST_PAGE = f"SELECT * FROM pgref.effect_action WHERE uncertain_at IS NOT NULL ORDER BY uncertain_at, key LIMIT {PAGE}"


@fenced_task(name="bench.asked", key="{name}", scope="asked", sink="external")
def asked(effect: Effect, name: str) -> None: ...


@asked.probe
def asked_probe(effect: Effect, name: str) -> Applied:
    return Applied(1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.backlog", description=__doc__)
    parser.add_argument("--keys", type=int, default=10_000, help="uncertain keys to settle")
    parser.add_argument("--sweeps", type=int, default=4, help="processes that settle them")
    parser.add_argument("--listed", type=int, default=1_000_000, help="uncertain keys to list; 0: not measured")
    parser.add_argument("--sweep", metavar="DSN", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sweep:
        _sweep(options.sweep)
        return
    with PostgresServer() as server:
        stores = Stores.open(server.dsn)
        stores.ensure_schema()
        _fill(stores, 1, options.keys)
        _print_settled(server.dsn, options.keys, options.sweeps)
        if options.listed:
            _fill(stores, options.keys + 1, options.keys + options.listed)
            _print_listed(stores, options.listed)
        stores.close()


def _fill(stores: Stores, low: int, high: int) -> None:
    with stores.engine.begin() as connection:
        connection.exec_driver_sql(FILL, {"low": low, "high": high})
    with stores.database.raw() as connection_:
        connection_.execute("VACUUM (ANALYZE) pgref.effect_action, pgref.effect_resource")


def _print_settled(dsn: str, keys: int, sweeps: int) -> None:
    command = [sys.executable, "-m", "bench.backlog", "--sweep", dsn]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(sweeps)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()  # ready
    started = time.perf_counter()
    told = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        output, _ = process.communicate()
        told.append(json.loads(output))
    seconds = time.perf_counter() - started
    settled = sum(sweep["settled"] for sweep in told)
    assert settled == keys, told
    grown = max(sweep["grown"] for sweep in told)
    print(f"{settled} keys with a probe that does nothing, {sweeps} sweeps: {settled / seconds:.0f} a second")
    print(f"memory of a sweep grew by at most {grown / 1e6:.1f} MB after its first keys")


def _sweep(dsn: str) -> None:
    app = Celery("bench", broker="memory://")
    install(app, dsn=dsn, sweep_seconds=3600)
    app.finalize()
    gate_of(app).effects.now()
    before = _peak_bytes()
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps({**asdict(sweep(app)), "grown": _peak_bytes() - before}))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _print_listed(stores: Stores, listed: int) -> None:
    effects = stores.effects

    def bare() -> None:
        with stores.database.raw() as connection:
            connection.execute(FIRST_PAGE).fetchall()

    ours, floor = _median_ms(lambda: effects.backlog(PAGE)), _median_ms(bare)
    print(f"first {PAGE} of {listed} uncertain keys: {ours:.1f} ms, a bare indexed query {floor:.1f} ms")
    print(f"tallies over them: {_median_ms(effects.tallies, 3):.0f} ms")


def _median_ms(call: Callable[[], object], times: int = LISTINGS) -> float:
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1000


if __name__ == "__main__":
    main()
