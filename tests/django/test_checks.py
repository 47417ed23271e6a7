"""The system check, and what importing costs those who have no Django."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from django.core.checks import run_checks
from django.db import connections

ROOT = Path(__file__).parents[2]


def warnings_of(app: Celery) -> list[str]:
    """What `python -m django check` says of it."""
    return [str(warning) for warning in run_checks() if warning.id == "fenced.W001"]


def test_one_database_is_no_warning(app: Celery) -> None:
    assert warnings_of(app) == []


@pytest.mark.parametrize("part", ["HOST", "PORT", "NAME"])
def test_another_database_is_warned_of(app: Celery, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.setitem(connections.settings["default"], part, "1234")
    (warning,) = warnings_of(app)
    assert "'default'" in warning
    assert "1234" in warning


@pytest.mark.parametrize(
    "change",
    [{"HOST": "localhost"}, {"HOST": "/run/postgresql"}, {"HOST": ""}, {"NAME": "", "OPTIONS": {"service": "shop"}}],
    ids=repr,
)
def test_what_may_be_one_database_is_no_warning(
    app: Celery, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    for name, value in change.items():
        monkeypatch.setitem(connections.settings["default"], name, value)
    assert warnings_of(app) == []


def test_without_a_gate_there_is_nothing_to_say(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FENCED_DSN", raising=False)
    dsn, app.conf.fenced_dsn = app.conf.fenced_dsn, None
    try:
        assert warnings_of(app) == []
    finally:
        app.conf.fenced_dsn = dsn


def test_celery_integration_works_without_django() -> None:
    code = "import sys; sys.modules['django'] = None; import celery_integration"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
