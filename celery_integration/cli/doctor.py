"""``doctor``: whether what is set can work together, and whether it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import click
import sqlalchemy as sa
from celery import Celery
from kombu.exceptions import OperationalError

from celery_integration.cli.output import Exit, age, app_of, as_json, definitions, json_option, printable, table
from celery_integration.definition import Definition
from celery_integration.process import Gate, gate_of
from celery_integration.results import told
from pgref.contracts.effects import Kind, RetrySafety, late_seconds
from pgref.errors import PgrefError
from pgref.postgres import verify_schema

__all__ = ["diagnose", "doctor"]

OFFSET_SECONDS_MAX = 5.0
LATE_PERIODS = 3
BEAT = ("fenced.sweep", "fenced.dispatch", "fenced.renew", "fenced.retain")
OLD_SECONDS = 3600.0
WORKERS_SECONDS = 1
VISIBILITY_SECONDS = 3600.0
"""What a Redis transport takes if nothing is set."""
REDELIVERY_SECONDS = 24 * 3600.0
"""How late a copy can come from a broker that has no such setting: when a connection was lost, or a queue restored."""


class Verdict(StrEnum):
    """What the doctor says of one thing."""

    OK = "ok"
    WARNING = "warning"
    """It works, and not as you might think."""
    FAULT = "fault"
    """It does not work, or loses what it should keep."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's."""

    subject: str
    verdict: Verdict
    text: str


def ok(subject: str, text: str) -> Finding:
    return Finding(subject, Verdict.OK, text)


def warning(subject: str, text: str) -> Finding:
    return Finding(subject, Verdict.WARNING, text)


def fault(subject: str, text: str) -> Finding:
    return Finding(subject, Verdict.FAULT, text)


@click.command
@json_option
@click.pass_context
def doctor(context: click.Context, *, as_json_: bool) -> None:
    """Look at database, settings, tasks, workers and backlog. Exits with 9 if something is at fault."""
    findings = diagnose(app_of(context))
    if as_json_:
        as_json([asdict(finding) for finding in findings])
    else:
        table(("", "WHAT", "FINDING"), [(f.verdict, f.subject, f.text) for f in findings])
    if any(finding.verdict is Verdict.FAULT for finding in findings):
        raise click.exceptions.Exit(Exit.FAULT)


def diagnose(app: Celery) -> list[Finding]:
    """Return what there is to say about ``app``: at least a line for each subject."""
    try:
        gate = gate_of(app)
    except PgrefError as error:
        return [fault("settings", told(error))]
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("database", lambda: _database(gate)),
        ("backlog", lambda: _backlog(gate)),
        ("tasks", lambda: _tasks(app)),
        ("broker", lambda: _broker(app)),
        ("retention", lambda: _retention(app)),
        ("beat", lambda: _beat(app)),
        ("workers", lambda: _workers(app)),
    ]
    return [finding for subject, check in checks for finding in _findings(subject, check)]


def _findings(subject: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as error:
        yield fault(subject, printable(told(error)))


def _database(gate: Gate) -> Iterator[Finding]:
    engine, schema = gate.stores.engine, gate.settings.schema
    with engine.connect() as connection:
        role, superuser, version = connection.execute(
            sa.text(
                "SELECT rolname, rolsuper, current_setting('server_version') FROM pg_roles WHERE rolname = current_user"
            )
        ).one()
    yield ok("database", f"PostgreSQL {version} answers")
    verify_schema(engine, schema)
    yield ok("schema", f"{schema} is of this release")
    if superuser:
        yield warning("role", f"{role} is a superuser: nothing is forbidden to it; see grant_application")
    else:
        yield ok("role", f"{role} is no superuser")
    offset = (datetime.now(UTC) - gate.effects.now()).total_seconds()
    text = f"this machine's clock is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} the database's"
    note = "; leases do not care, messages with a countdown do"
    yield ok("clock", text) if abs(offset) <= OFFSET_SECONDS_MAX else warning("clock", text + note)


def _backlog(gate: Gate) -> Iterator[Finding]:
    now, tallies = gate.effects.now(), gate.effects.tallies()
    late, period = late_seconds(tallies, now), gate.settings.sweep_seconds
    if late > LATE_PERIODS * period:
        yield fault("sweep", f"something has waited for {age(late)}: does beat run, and is a worker free?")
    else:
        yield ok("sweep", f"nothing waits for longer than {LATE_PERIODS} periods of {period:g} s")
    parked = sum(tally.count for tally in tallies if tally.kind is Kind.PARKED)
    doubtful = [tally for tally in tallies if tally.kind in (Kind.UNCERTAIN, Kind.PARKED)]
    oldest = max(((now - tally.oldest_at).total_seconds() for tally in doubtful), default=0.0)
    text = f"{sum(tally.count for tally in doubtful)} in doubt, {parked} of them wait for a person"
    if parked or oldest > OLD_SECONDS:
        yield warning("backlog", f"{text}, the oldest since {age(oldest)}: celery fenced backlog")
    else:
        yield ok("backlog", text)


def _tasks(app: Celery) -> Iterator[Finding]:
    fenced = definitions(app)
    if not fenced:
        yield warning("tasks", "no fenced task is known: does -A name the module that imports them?")
        return
    findings = [finding for name, definition in fenced for finding in _task(app, app.tasks[name], definition)]
    yield from findings
    if not findings:
        yield ok("tasks", f"{len(fenced)} fenced tasks, each with a probe where one is needed")


def _task(app: Celery, task: Any, definition: Definition) -> Iterator[Finding]:
    policy, subject = definition.policy, f"task {task.name}"
    if not task.acks_late:
        yield fault(subject, "acks_late is off: a crash before its first grant loses the message")
    if not task.reject_on_worker_lost:
        yield warning(subject, "reject_on_worker_lost is off: after a crash the sweep must send it again")
    if task.acks_on_failure_or_timeout:
        yield warning(subject, "acks_on_failure_or_timeout is on: after a time limit the sweep must send it again")
    if not policy.in_transaction and definition.probe is None and policy.safety is RetrySafety.UNSAFE:
        yield warning(subject, "has no probe and is not safe to run again: each doubt needs a person")
    limit = task.time_limit or app.conf.task_time_limit
    visibility = _visibility_seconds(app)
    if visibility is not None and limit is not None and limit > visibility:
        text = f"may run for {limit:g} s, but the broker delivers again after visibility_timeout = {visibility:g} s"
        yield warning(subject, f"{text}: copies come for nothing")


def _visibility_seconds(app: Celery) -> float | None:
    """After how long the broker delivers a message again that nobody has acknowledged; None if never."""
    if not str(app.conf.broker_url or "").startswith(("redis", "rediss", "sentinel")):
        return None
    return float((app.conf.broker_transport_options or {}).get("visibility_timeout", VISIBILITY_SECONDS))


def _broker(app: Celery) -> Iterator[Finding]:
    try:
        with app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=WORKERS_SECONDS)
            yield ok("broker", f"{connection.as_uri()} answers")  # without its password
    except OperationalError as error:
        yield fault("broker", printable(told(error)))
    visibility, lease = _visibility_seconds(app), gate_of(app).settings.lease_seconds
    if visibility is not None and visibility <= lease:
        text = f"visibility_timeout = {visibility:g} s is not above fenced_lease_seconds = {lease:g} s"
        yield warning("visibility", f"{text}: after a crash copies come that must wait for the lease to end")
    if visibility is not None and app.conf.worker_prefetch_multiplier != 1:
        text = f"worker_prefetch_multiplier = {app.conf.worker_prefetch_multiplier}"
        yield warning("prefetch", f"{text}: messages that wait behind a long task are delivered again; 1 avoids it")


def _retention(app: Celery) -> Iterator[Finding]:
    kept = gate_of(app).settings.retention_seconds
    horizon = _visibility_seconds(app) or REDELIVERY_SECONDS
    if kept is None:
        yield ok("retention", "what is done is remembered for ever")
    elif kept <= horizon:
        text = f"fenced_retention_seconds = {kept:g} s, but a copy of a message can come {horizon:g} s late"
        yield fault("retention", f"{text}: its effect would happen again")
    else:
        yield ok("retention", f"what is done is remembered for {age(kept)}")


def _beat(app: Celery) -> Iterator[Finding]:
    entries = {entry["task"] for entry in (app.conf.beat_schedule or {}).values()}
    missing = [name for name in BEAT if name not in entries]
    if "fenced.sweep" in missing:
        yield fault("beat", "fenced.sweep is not scheduled: call schedule(app)")
    elif missing:
        yield warning("beat", f"not scheduled: {', '.join(missing)}")
    else:
        yield ok("beat", "the gate's tasks are scheduled")


def _workers(app: Celery) -> Iterator[Finding]:
    if str(app.conf.worker_pool).startswith("eventlet"):
        yield fault("pool", "fenced tasks do not run under eventlet: take prefork, threads, gevent or solo")
    workers = app.control.inspect(timeout=WORKERS_SECONDS).registered() or {}
    if not workers:
        yield warning("workers", f"none answered in {WORKERS_SECONDS} s")
        return
    known = {name for name, _ in definitions(app)} | {"fenced.sweep"}
    for worker, registered in sorted(workers.items()):
        missing = known - {entry.split(" ")[0] for entry in registered}
        if missing:
            yield warning(f"worker {worker}", f"does not know {', '.join(sorted(missing))}")
        else:
            yield ok(f"worker {worker}", "knows every fenced task")
