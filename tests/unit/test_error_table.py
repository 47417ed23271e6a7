"""The one table from SQLSTATE to what a caller may do next (G26)."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from pgref import errors
from pgref.postgres import _connection, _errors
from pgref.postgres._errors import _FAILURES, _REFUSALS, Failure, classify, rolled_back, sqlstate, translated

TRANSLATED = {
    Failure.UNAVAILABLE: errors.Unavailable,
    Failure.SCHEMA: errors.SchemaError,
    Failure.ARGUMENT: errors.InvalidArgument,
}
STATES = [name for name in _FAILURES if isinstance(name, str)]
CLASSES = [name for name in _FAILURES if not isinstance(name, str)]
JUDGED = {
    Failure.REPEAT: ["40001", "40P01"],
    Failure.UNAVAILABLE: ["25006", "53000", "53100", "53200", "53300", "55P03", "57014"],
    Failure.ARGUMENT: ["22001", "22021", "22P02", "22P05", "54000"],
    Failure.SCHEMA: ["3F000", "42501", "42883", "42P01"],
    Failure.OTHER: ["23505", "42601"],
}
ANSWERS = {
    *("granted", "done", "uncertain", "in_flight", "contended", "again", "expired"),
    *("accepted", "completed", "renewed", "ok", "claimed", "applied", "not_applied", "busy", "lost"),
}
NO_VERDICTS = {"infinity", "parked"}
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


@pytest.mark.parametrize(("failure", "state"), [(failure, state) for failure in JUDGED for state in JUDGED[failure]])
def test_what_the_server_says_is_definite(failure: Failure, state: str) -> None:
    assert classify(raised_by_server(state)) is failure


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


def test_every_verdict_that_refuses_has_an_error() -> None:
    sql = Path(_errors.__file__).with_name("sql").joinpath("effects.sql").read_text()
    verdicts = set(re.findall(r"(?:verdict := |THEN |ELSE |RETURN |verdict, )'([a-z_]+)'", sql))
    assert verdicts - ANSWERS - NO_VERDICTS == set(_REFUSALS) - {"done"}
    assert verdicts >= ANSWERS
    assert all(issubclass(cls, errors.Refused) for cls, _ in _REFUSALS.values())


class Connection:
    """A connection that says how long it was told to wait, on a clock that each wait takes 4 seconds of."""

    def __init__(self) -> None:
        self.now = 0.0

    def wait(self, _: object, __: float, timeout: float) -> float:
        self.now += 4.0
        return timeout


@pytest.mark.parametrize(("limit", "timeouts"), [({"each_seconds": 5.0}, [5.0, 5.0]), ({"answer_by": 9.0}, [9.0, 5.0])])
def test_a_limit_is_for_each_answer_or_for_all(
    monkeypatch: pytest.MonkeyPatch, limit: dict[str, float], timeouts: list[float]
) -> None:
    """G26: after `complete_within` the caller's transaction may last, but none of its statements."""
    connection: Any = Connection()
    monkeypatch.setattr(_connection, "time", SimpleNamespace(monotonic=lambda: connection.now))
    _connection._limit(connection, **limit)
    assert [connection.wait(None) for _ in range(2)] == timeouts
