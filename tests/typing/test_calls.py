"""The public surface is typed end to end: two checkers agree on what is right and what is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

CALLS = Path(__file__).with_name("calls.py")
ROOT = CALLS.parents[2]
WRONG = {number for number, line in enumerate(CALLS.read_text().splitlines(), 1) if line.endswith("# wrong")}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)


def test_mypy() -> None:
    checked = run("mypy", "--no-error-summary", "--hide-error-context", str(CALLS))
    lines = {int(number) for number in re.findall(r"calls\.py:(\d+): error", checked.stdout)}
    assert lines == WRONG, checked.stdout + checked.stderr


def test_pyright() -> None:
    checked = run("pyright", "--pythonpath", sys.executable, "--outputjson", str(CALLS))
    if not checked.stdout.lstrip().startswith("{"):
        pytest.skip(f"pyright cannot be fetched: {checked.stderr[-200:]}")
    found = json.loads(checked.stdout)["generalDiagnostics"]
    lines = {one["range"]["start"]["line"] + 1 for one in found if one["severity"] == "error"}
    assert lines == WRONG, checked.stdout
