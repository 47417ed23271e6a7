"""What the commands share: the app's gate, exit codes, tables and JSON."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from enum import IntEnum
from importlib.util import find_spec
from typing import Any, NoReturn, ParamSpec

import click
import sqlalchemy as sa
from celery import Celery

from celery_integration.definition import Definition
from celery_integration.process import Gate, gate_of
from celery_integration.results import told
from pgref.errors import PgrefError

__all__ = [
    "Exit",
    "age",
    "app_of",
    "as_json",
    "command_errors",
    "definitions",
    "fail",
    "gate_in",
    "json_option",
    "printable",
    "table",
]

P = ParamSpec("P")

MINUTE, HOUR, DAY = 60, 3600, 24 * 3600

json_option = click.option("--json", "as_json_", is_flag=True, help="Print JSON, times in ISO 8601.")


class Exit(IntEnum):
    """Exit codes beside click's 0, 1 and 2."""

    IN_DOUBT = 3
    UNKNOWN_KEY = 4
    TAKEN = 5
    CONTRARY = 6
    UNSAFE = 7
    NOT_IN_DOUBT = 8
    FAULT = 9


def app_of(context: click.Context) -> Celery:
    """Return the app that ``celery -A`` names, with its tasks loaded."""
    app: Celery = context.obj.app
    app.loader.import_default_modules()
    return app


def gate_in(context: click.Context) -> Gate:
    """Return the gate of that app."""
    return gate_of(app_of(context))


def definitions(app: Celery) -> list[tuple[str, Definition]]:
    """Return the fenced tasks of ``app`` by name, with what their decorators were told."""
    found = [(name, getattr(task, "definition", None)) for name, task in sorted(app.tasks.items())]
    return [(name, definition) for name, definition in found if isinstance(definition, Definition)]


def command_errors(function: Callable[P, None]) -> Callable[P, None]:
    """Print an error of pgref's or of the database as a line, and exit with 1."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except PgrefError as error:
            raise click.ClickException(printable(told(error))) from error
        except sa.exc.DBAPIError as error:
            raise click.ClickException(printable(told(error.orig or error))) from error

    return run


def fail(code: Exit, message: str) -> NoReturn:
    """Print ``message`` to stderr and exit with ``code``."""
    click.echo(printable(message), err=True)
    raise click.exceptions.Exit(code)


def printable(value: object) -> str:
    """Return a text that does nothing to a terminal but to be read."""
    text = "" if value is None else str(value)
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def age(seconds: float) -> str:
    """Return a time span in its two largest units."""
    whole = max(0, int(seconds))
    if whole < MINUTE:
        return f"{whole}s"
    if whole < HOUR:
        return f"{whole // MINUTE}m {whole % MINUTE}s"
    if whole < DAY:
        return f"{whole // HOUR}h {whole % HOUR // MINUTE}m"
    return f"{whole // DAY}d {whole % DAY // HOUR}h"


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table, with rich on a terminal where it is installed."""
    texts = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty() and find_spec("rich") is not None:
        from rich.console import Console  # noqa: PLC0415  an extra
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        pretty = Table(*headings)
        for row in texts:
            pretty.add_row(*map(Text, row))
        Console().print(pretty)
        return
    widths = [max(len(row[column]) for row in [headings, *texts]) for column in range(len(headings))]
    for row in [list(headings), *texts]:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def as_json(value: Any) -> None:
    """Print ``value`` as JSON."""
    click.echo(json.dumps(value, default=_plain, indent=2))


def _plain(value: object) -> object:
    match value:
        case datetime():
            return value.isoformat()
        case Mapping():
            return dict(value)
    return str(value)
