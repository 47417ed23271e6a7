"""Looking: ``status``, ``backlog`` and ``show``."""

from __future__ import annotations

import re
from dataclasses import asdict
from datetime import datetime
from typing import Any

import click
from celery import Celery
from kombu.utils import json

from celery_integration.cli.output import (
    Exit,
    age,
    app_of,
    as_json,
    command_errors,
    definitions,
    fail,
    gate_in,
    json_option,
    printable,
    table,
)
from celery_integration.process import gate_of
from pgref.contracts.effects import EffectRecord, Kind, late_seconds
from pgref.errors import InvalidArgument
from pgref.keys import LIMIT_MAX, shown, valid_key

__all__ = ["backlog", "show", "status"]

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}


class Span(click.ParamType):  # type: ignore[type-arg]  # no subscript in older ones
    """A time span: seconds, or a number with one of the units s, m, h, d."""

    name = "span"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", str(value))
        if match is None:
            self.fail(f"{value!r} is not a time span such as 90, 15m, 2h or 1d", param, ctx)
        return float(match[1]) * UNITS[match[2] or "s"]


@click.command
@click.option("--check", is_flag=True, help="Exit with 3 if anything is in doubt.")
@json_option
@click.pass_context
@command_errors
def status(context: click.Context, *, check: bool, as_json_: bool) -> None:
    """Count what is in doubt, parked, due and in flight, by task and reason."""
    effects = gate_in(context).effects
    now, tallies = effects.now(), sorted(effects.tallies(), key=lambda tally: (tally.kind, -tally.count, tally.scope))
    late = late_seconds(tallies, now)
    if as_json_:
        as_json({"now": now, "sweep_late_seconds": late, "tallies": [asdict(tally) for tally in tallies]})
    elif tallies:
        headings = ("STATE", "TASK", "COUNT", "OLDEST", "REASON")
        ages = [age((now - tally.oldest_at).total_seconds()) for tally in tallies]
        table(headings, [(t.kind, t.scope, t.count, since, t.reason) for t, since in zip(tallies, ages, strict=True)])
        click.echo(f"\nwaiting for a sweep for {age(late)}" if late else "\nnothing waits for a sweep")
    else:
        click.echo("nothing is in flight, in doubt or due")
    if check and any(tally.kind in (Kind.UNCERTAIN, Kind.PARKED, Kind.EXPIRED) for tally in tallies):
        raise click.exceptions.Exit(Exit.IN_DOUBT)


@click.command
@click.option("--task", "task_name", metavar="NAME", default="", help="Only effects of this task.")
@click.option("--prefix", default="", help="Only keys that begin so.")
@click.option("--reason", default="", help="Only those whose reason contains this.")
@click.option("--older-than", type=Span(), metavar="SPAN", help="Only those in doubt for longer: 90, 15m, 2h, 1d.")
@click.option("--parked/--waiting", default=None, help="Only those that wait for a person, or only the others.")
@click.option("--limit", type=click.IntRange(1, LIMIT_MAX), default=50, show_default=True, help="At most so many.")
@click.option("--after", metavar="KEY", help="Go on after this key, the last of the page before.")
@click.option("--check", is_flag=True, help="Exit with 3 if anything is listed.")
@json_option
@click.pass_context
@command_errors
def backlog(
    context: click.Context,
    *,
    task_name: str,
    prefix: str,
    reason: str,
    older_than: float | None,
    parked: bool | None,
    limit: int,
    after: str | None,
    check: bool,
    as_json_: bool,
) -> None:
    """List effects that may have happened, the oldest first."""
    app = app_of(context)
    effects = gate_of(app).effects
    if task_name and prefix:
        raise click.UsageError("--task and --prefix exclude one another")
    records = effects.backlog(
        limit,
        prefix=f"{_scope(app, task_name)}:" if task_name else prefix,
        reason=reason,
        older_than_seconds=older_than,
        parked=parked,
        after=None if after is None else record_of(context, after),
    )
    if as_json_:
        as_json([_told(record) for record in records])
    elif records:
        now = effects.now()
        headings = ("KEY", "AGE", "ATTEMPT", "LOOKS", "NEXT LOOK", "REASON", "NOTE")
        table(headings, [_row(record, now) for record in records])
        if len(records) == limit:
            click.echo(f"\nmore may follow: --after {printable(records[-1].key)!r}")
    else:
        click.echo("nothing is in doubt")
    if check and records:
        raise click.exceptions.Exit(Exit.IN_DOUBT)


def _scope(app: Celery, name: str) -> str:
    known = dict(definitions(app))
    if name not in known:
        raise click.UsageError(f"{name!r} is no fenced task; those are {', '.join(known) or 'none'}")
    return known[name].policy.scope or name


def _row(record: EffectRecord, now: datetime) -> tuple[object, ...]:
    assert record.uncertain_at is not None
    if record.parked:
        look = "a person's"
    elif record.next_look_at is None or record.next_look_at <= now:
        look = "next sweep"
    else:
        look = f"in {age((record.next_look_at - now).total_seconds())}"
    since = age((now - record.uncertain_at).total_seconds())
    return record.key, since, record.attempt, record.looks, look, record.reason, record.note


def record_of(context: click.Context, key: str) -> EffectRecord:
    """Return the record of ``key``, or exit with 4."""
    try:
        record = gate_in(context).effects.lookup(valid_key(key, "KEY"))
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error
    if record is None:
        fail(Exit.UNKNOWN_KEY, f"{key!r} is not known")
    return record


@click.command
@click.argument("key")
@click.option("--arguments", is_flag=True, help="Show the arguments and the result, which may be confidential.")
@json_option
@click.pass_context
@command_errors
def show(context: click.Context, *, key: str, arguments: bool, as_json_: bool) -> None:
    """Show all that is known of an effect: state, attempts, history, and what came too late."""
    effects = gate_in(context).effects
    record = record_of(context, key)
    told = _told(record, arguments=arguments)
    history = [asdict(entry) for entry in effects.history(key)]
    evidence = [asdict(late) if arguments else {**asdict(late), "result": None} for late in effects.evidence(key)]
    if as_json_:
        as_json({**told, "history": history, "evidence": evidence})
        return
    table(("FIELD", "VALUE"), [(name, value) for name, value in told.items() if value is not None])
    if history:
        click.echo()
        table(("AT", "EVENT", "FENCE", "BY", "WHY"), [list(entry.values()) for entry in history])
    if evidence:
        click.echo("\nended well, but too late to be recorded:")
        table(("AT", "FENCE", "RESULT"), [(late["at"], late["fence"], late["result"]) for late in evidence])


def _told(record: EffectRecord, *, arguments: bool = False) -> dict[str, Any]:
    """Return the record by field, with its task, and without arguments and result unless they are asked for."""
    told = asdict(record)
    payload = told.pop("payload")
    result = told.pop("result")
    try:
        message = json.loads(payload) if payload is not None else {}
    except ValueError:
        message = {}
    if not isinstance(message, dict):
        message = {}
    told["task"] = message.get("task")
    told["in_logs"] = shown(record.key)
    if arguments:
        told.update(args=message.get("args"), kwargs=message.get("kwargs"), result=result)
    return told
