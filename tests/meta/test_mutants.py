"""The seeded bugs fit the code as it stands, so that `make mutants` tries each of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mutants.__main__ import Run, judgement
from tests.mutants.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
GUARANTEES = set(re.findall(r"^\| (G\d+) \|", (ROOT / "docs/reference/guarantees.md").read_text(), re.MULTILINE))
LEAST = 24

each = pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)


def test_there_are_enough() -> None:
    assert len(MUTATIONS) >= LEAST


def test_names_are_unique() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


@each
def test_there_is_one_place_for_it(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.new != mutation.old


@each
def test_it_breaks_a_known_guarantee(mutation: Mutation) -> None:
    assert mutation.guarantee in GUARANTEES


@each
def test_its_tests_are_there(mutation: Mutation) -> None:
    assert mutation.killed_by
    assert all((ROOT / selector.split("::")[0]).is_file() for selector in mutation.killed_by)


@pytest.mark.parametrize(
    ("code", "output", "caught", "by"),
    [
        (1, "FAILED tests/x.py::test_y[a b] - assert 1 == 2\n1 failed", True, "tests/x.py::test_y[a b]"),
        (1, "ERROR tests/x.py::test_y - in a fixture\n1 error", False, "ERROR: pytest ended with 1: 1 error"),
        (None, "", True, "no end within 120 s"),
        (0, "1 passed", False, "SURVIVED"),
        (2, "Interrupted", False, "ERROR: pytest ended with 2: Interrupted"),
        (4, "", False, "ERROR: pytest ended with 4: no output"),
        (5, "no tests ran", False, "ERROR: pytest ended with 5: no tests ran"),
    ],
)
def test_only_a_failed_test_or_no_end_counts(code: int | None, output: str, by: str, *, caught: bool) -> None:
    assert judgement(Run(code, output)) == (caught, by)
