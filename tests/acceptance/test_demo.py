"""The whole product in one run: workers are killed all the while, and every effect takes place once."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def demo(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.worker.demo", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def fenced_column(output: str) -> dict[str, int]:
    """Read the column of the fenced shop from the closing table."""
    rows = re.findall(r"^(\w[\w ]*?) {2,}(\d+)", output, re.MULTILINE)
    return {name: int(figure) for name, figure in rows}


@pytest.mark.parametrize("provider", ["keys", "none"])
def test_every_effect_takes_place_once(provider: str) -> None:
    run = demo("--orders", "40", "--kill-every", "0.5", "--seed", "3", "--provider", provider)
    assert run.returncode == 0, run.stdout + run.stderr
    column = fenced_column(run.stdout)
    assert (column["orders"], column["bookings"], column["duplicates"], column["lost"]) == (40, 40, 0, 0)
    assert column["charges seen by the processor"] + column["left uncertain"] >= 40
    assert column["kills"] > 0
    assert provider == "none" or column["left uncertain"] == 0


@pytest.mark.parametrize("options", [("--orders", "0"), ("--kill-every", "-1"), ("--provider", "magic")])
def test_a_bad_option_is_one_readable_line(options: tuple[str, str]) -> None:
    run = demo(*options)
    assert run.returncode != 0
    assert options[0] in run.stderr
    assert "Traceback" not in run.stderr


def test_make_runs_the_demo() -> None:
    if shutil.which("uv") is None and not (ROOT / ".uv").exists():
        pytest.skip("no uv here: make would install it")
    run = subprocess.run(["make", "demo", "ARGS=--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "--kill-every" in run.stdout
