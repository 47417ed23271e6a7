"""Every guarantee that the suites cover is named by a test, and the published table says so."""

from pathlib import Path

import pytest

from pgref.conformance.table import GUARANTEES, by_guarantee, claims, render

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "guarantees.md"
FIRST_OF_SECTION_3 = 40
NOT_YET = {name for name in GUARANTEES if int(name[1:]) >= FIRST_OF_SECTION_3}


@pytest.mark.parametrize("guarantee", [name for name in GUARANTEES if name not in NOT_YET])
def test_guarantee_has_a_test(guarantee: str) -> None:
    assert guarantee in by_guarantee()


def test_what_is_not_yet_covered_is_known() -> None:
    assert set(GUARANTEES) - set(by_guarantee()) == NOT_YET


def test_every_test_names_a_guarantee() -> None:
    assert by_guarantee().get("", []) == []
    assert set(by_guarantee()) <= set(GUARANTEES)


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == render(), "python -m pgref.conformance.table > docs/reference/guarantees.md"


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [("G2: text", ["G2"]), ("G2, G33: text", ["G2", "G33"]), ("G2 text", []), ("See G2: text", []), (None, [])],
)
def test_claims(docstring: str | None, expected: list[str]) -> None:
    assert claims(docstring) == expected
