"""The system check that the gate and Django's connection mean one database."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from celery import current_app
from django.core.checks import CheckMessage, Warning  # noqa: A004  Django's name for it
from django.db import connections
from django.utils.module_loading import autodiscover_modules

from celery_integration.django.sink import DjangoSink
from celery_integration.errors import ConfigurationError
from celery_integration.settings import Settings

__all__ = ["check_databases"]

PORT = "5432"
LOCAL = {"", "localhost", "127.0.0.1", "::1"}


def check_databases(*_: object, **__: object) -> list[CheckMessage]:
    """Warn (``fenced.W001``) of each alias that a `DjangoSink` writes to and that is not the gate's database.

    Compares host, port and name as configured and connects to nothing. No gate is configured: nothing to say.
    """
    try:
        gate = _of_dsn(Settings.of(current_app).dsn)
    except ConfigurationError:
        return []
    autodiscover_modules("tasks")
    places = {alias: _of_alias(connections[alias].settings_dict) for alias in sorted(_aliases())}
    return [_warning(alias, place, gate) for alias, place in places.items() if gate and place and place != gate]


def _aliases() -> set[str]:
    policies = [task.definition.policy for task in current_app.tasks.values() if hasattr(task, "definition")]
    return {policy.sink.using for policy in policies if isinstance(policy.sink, DjangoSink)}


def _warning(alias: str, place: str, gate: str) -> CheckMessage:
    return Warning(
        f"Fenced tasks write to the database {alias!r}, {place}, but the gate is in {gate}: "
        "their completion cannot commit there, so each attempt will be rolled back.",
        hint="Let fenced_dsn name the database of the alias. If it does, by another name, silence this check.",
        id="fenced.W001",
    )


def _of_dsn(dsn: str) -> str | None:
    url = sa.make_url(dsn)
    return _place(url.host or url.query.get("host"), url.port or url.query.get("port"), url.database)


def _of_alias(settings: Mapping[str, Any]) -> str | None:
    return _place(settings["HOST"], settings["PORT"], settings["NAME"])


def _place(host: object, port: object, name: object) -> str | None:
    """Return a text that is equal for equal places, or None where configuration alone does not tell."""
    if not name or not isinstance(host, str | None):
        return None
    host = "localhost" if (host or "") in LOCAL or (host or "").startswith("/") else host
    return f"{host}:{port or PORT}/{name}"
