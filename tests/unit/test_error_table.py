"""The one table from SQLSTATE to what a caller may do next (G26)."""

from __future__ import annotations

import psycopg
import pytest
import sqlalchemy as sa

from pgref import errors
from pgref.postgres._errors import _FAILURES, Failure, classify, rolled_back, sqlstate, translated

TRANSLATED = {
    Failure.UNAVAILABLE: errors.Unavailable,
    Failure.SCHEMA: errors.SchemaError,
    Failure.ARGUMENT: errors.InvalidArgument,
}
STATES = [name for name in _FAILURES if isinstance(name, str)]
CLASSES = [name for name in _FAILURES if not isinstance(name, str)]
AMBIGUOUS = ["08000", "08003", "08006", "08P01", "25P03", "40003", "57P01", "57P02", "57P05", "58030", "XX000"]


def raised_by_server(state: str) -> psycopg.Error:
    try:
        return psycopg.errors.lookup(state)("first line\nCONTEXT: more")
    except KeyError:
        unknown = psycopg.DatabaseError("first line\nCONTEXT: more")
        unknown.sqlstate = state
        return unknown


@pytest.mark.parametrize("state", STATES)
def test_every_state_is_found_by_its_prefix(state: str) -> None:
    error = raised_by_server(state.ljust(5, "0"))
    assert (sqlstate(error), classify(error)) == (state.ljust(5, "0"), _FAILURES[state])


@pytest.mark.parametrize("state", STATES)
def test_an_unknown_member_of_a_class_is_judged_by_the_class(state: str) -> None:
    known = next((_FAILURES[name] for name in (state[:3], state[:2]) if name in _FAILURES), Failure.OTHER)
    assert classify(raised_by_server(state.ljust(4, "Z") + "Z" if len(state) < 5 else f"{state[:3]}ZZ")) is known


@pytest.mark.parametrize("cls", CLASSES)
def test_what_did_not_come_from_the_server_is_judged_by_type(cls: type[Exception]) -> None:
    assert classify(cls("text")) is _FAILURES[cls]


@pytest.mark.parametrize("state", AMBIGUOUS)
def test_a_connection_that_went_is_ambiguous(state: str) -> None:
    assert classify(raised_by_server(state)) is Failure.AMBIGUOUS


def test_a_lost_connection_has_no_state() -> None:
    lost = psycopg.OperationalError("server closed the connection unexpectedly")
    assert (sqlstate(lost), classify(lost)) == (None, Failure.AMBIGUOUS)


@pytest.mark.parametrize("name", _FAILURES, ids=str)
def test_a_wrapped_error_is_judged_as_itself(name: str | type[Exception]) -> None:
    error = raised_by_server(name.ljust(5, "0")) if isinstance(name, str) else name("text")
    assert classify(sa.exc.DBAPIError("SELECT 1", None, error)) is classify(error)


@pytest.mark.parametrize("state", STATES)
def test_a_definite_failure_has_an_error_of_ours(state: str) -> None:
    error = raised_by_server(state.ljust(5, "0"))
    answer = translated(error)
    assert type(answer) is TRANSLATED.get(_FAILURES[state], type(error))
    assert answer is error or "CONTEXT" not in str(answer)


@pytest.mark.parametrize("state", STATES)
def test_before_its_commit_nothing_of_a_transaction_is_ambiguous(state: str) -> None:
    answer = rolled_back(raised_by_server(state.ljust(5, "0")))
    assert type(answer) is TRANSLATED.get(_FAILURES[state], errors.Unavailable)


def test_an_answer_of_ours_stays_itself() -> None:
    away = errors.Unavailable("away")
    assert translated(away) is away
