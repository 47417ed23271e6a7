"""Acting: ``resolve``, ``sweep`` and ``migrate``."""

from __future__ import annotations

import getpass
import socket
from dataclasses import asdict

import click
from kombu.utils import json

from celery_integration.cli.backlog import record_of
from celery_integration.cli.output import (
    Exit,
    app_of,
    as_json,
    command_errors,
    fail,
    gate_in,
    json_option,
    printable,
    table,
)
from celery_integration.process import Gate, gate_of
from celery_integration.reconcile import call_of, shut_out
from celery_integration.sweep import sweep as sweep_once
from pgref.contracts.effects import EffectRecord, ReconcileClaim, Resolution, RetrySafety, Ruling, State
from pgref.errors import NotUncertain, ReconcileTaken, UnsafeNotRetryable
from pgref.postgres import migration_sql

__all__ = ["migrate", "resolve", "sweep"]


@click.command
@click.argument("key")
@click.option("--applied/--not-applied", default=None, help="It happened, or it did not.")
@click.option("--result", metavar="JSON", help="With --applied: what the task returns from now on.")
@click.option("--force", is_flag=True, help="With --not-applied: nothing that was sent can still arrive, on your word.")
@click.option("--by", required=True, help="Who rules; kept in the history.")
@click.option("--why", required=True, help="On what ground; kept in the history.")
@click.option("--yes", is_flag=True, help="Do not ask before it is done.")
@json_option
@click.pass_context
@command_errors
def resolve(
    context: click.Context,
    *,
    key: str,
    applied: bool | None,
    result: str | None,
    force: bool,
    by: str,
    why: str,
    yes: bool,
    as_json_: bool,
) -> None:
    """Rule on an effect that may have happened. The first ruling stands; the same again changes nothing."""
    if applied is None:
        raise click.UsageError("say --applied or --not-applied")
    if result is not None:
        if not applied:
            raise click.UsageError("--result is for --applied")
        try:
            json.loads(result)
        except ValueError as error:
            raise click.UsageError(f"--result is not JSON: {error}") from error
    if force and applied:
        raise click.UsageError("--force is for --not-applied")
    gate = gate_in(context)
    record = record_of(context, key)
    ruling = Resolution(applied, result, by=by, why=why, force_retryable=force)
    if not yes:
        click.echo(_intention(record, ruling), err=True)
        click.confirm("Rule so?", abort=True, err=True)
    stands = _ruled(context, gate, record, ruling)
    if stands.applied is not applied or (result is not None and stands.result != result):
        fail(Exit.CONTRARY, f"{key!r} stands as {_word(stands)}; nothing was changed")
    told = {"key": key, "applied": stands.applied, "result": stands.result}
    if as_json_:
        as_json(told)
    else:
        click.echo(f"{printable(key)} stands as {_word(stands)}")


def _intention(record: EffectRecord, ruling: Resolution) -> str:
    if ruling.applied:
        then = f"it is done, and its task returns {ruling.result or 'null'}"
    elif record.payload is None:
        then = "it may run again when its next message comes"
    else:
        then = "its message is sent, and it runs again"
    return printable(f"{record.key} ({record.state}, {record.reason or 'no doubt recorded'}): {then}.")


def _word(ruling: Ruling) -> str:
    return f"applied, with result {ruling.result or 'null'}" if ruling.applied else "not applied"


def _ruled(context: click.Context, gate: Gate, record: EffectRecord, ruling: Resolution) -> Ruling:
    """Give the ruling. What did not happen is shut out of its sink first, and must be looked into by nobody else."""
    unsafe = f"{record.key!r} is not safe to run again: --force, if nothing that was sent can still arrive"
    if not (ruling.applied or ruling.force_retryable) and _is_unsafe(record):
        fail(Exit.UNSAFE, unsafe)
    claim = None if ruling.applied else _claimed(context, gate, record)
    try:
        return gate.effects.resolve_uncertain(record.action, ruling, claim=claim)
    except NotUncertain as error:
        fail(Exit.NOT_IN_DOUBT, f"{record.key!r} is {error.state or 'unknown'}, and not in doubt")
    except ReconcileTaken:
        fail(Exit.TAKEN, f"a reconciler has begun to look into {record.key!r}: try again")
    except UnsafeNotRetryable:
        fail(Exit.UNSAFE, unsafe)  # its lease ended since it was looked up


def _is_unsafe(record: EffectRecord) -> bool:
    return record.state is State.UNCERTAIN and record.retry_safety is RetrySafety.UNSAFE


def _claimed(context: click.Context, gate: Gate, record: EffectRecord) -> ReconcileClaim | None:
    try:
        claim = gate.effects.begin_reconcile(record.action, gate.settings.reconcile_seconds, early=True)
    except NotUncertain:
        return None  # a ruling may stand already
    except ReconcileTaken as taken:
        seconds = taken.retry_after_seconds or 0.0
        fail(Exit.TAKEN, f"a reconciler looks into {record.key!r} right now, for {seconds:.0f} s at most")
    call = call_of(app_of(context), gate, record)
    failed = None if call is None else shut_out(call, claim)
    if failed is not None:
        gate.effects.defer_reconcile(claim, None if record.parked else gate.settings.reconcile_seconds, note=failed)
        raise click.ClickException(
            f"its sink cannot be sealed, so what was sent could still arrive: {printable(failed)}"
        )
    return claim


@click.command
@json_option
@click.pass_context
@command_errors
def sweep(context: click.Context, *, as_json_: bool) -> None:
    """Do what beat's sweep does, now and here: expire, probe, rule, send again."""
    swept = asdict(sweep_once(app_of(context), by=f"{getpass.getuser()} on {socket.gethostname()}"))
    if as_json_:
        as_json(swept)
    else:
        table(("", "KEYS"), list(swept.items()))


@click.command
@click.option("--sql", is_flag=True, help="Print the statements for an empty database instead of running them.")
@click.pass_context
@command_errors
def migrate(context: click.Context, *, sql: bool) -> None:
    """Create the schema, or bring it to this release. Safe to repeat, and while workers run."""
    gate = gate_of(app_of(context))
    if sql:
        click.echo(migration_sql(gate.settings.schema))
        return
    gate.stores.ensure_schema()
    click.echo(f"schema {gate.settings.schema} is up to date")
