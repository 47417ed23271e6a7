"""``celery -A app fenced …``: what is in doubt, why, for how long, and settling it."""

from __future__ import annotations

import click

from celery_integration.cli import backlog, doctor, health, metrics, operate

__all__ = ["fenced"]


@click.group(name="fenced")
def fenced() -> None:
    """Watch and settle effects that may have happened.

    Exit codes: 0 done; 1 it could not be done; 2 the command was wrong; 3 something is in doubt (with --check);
    4 the key is not known; 5 a reconciler looks into it right now; 6 the other ruling stands; 7 not safe to run again
    without --force; 8 the key is not in doubt; 9 the doctor found a fault.
    """


for command in (backlog.status, backlog.backlog, backlog.show, operate.resolve, operate.sweep, operate.migrate):
    fenced.add_command(command)
fenced.add_command(doctor.doctor)
fenced.add_command(health.health)
fenced.add_command(metrics.metrics)
