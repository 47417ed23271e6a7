"""Limits of names and numbers, and fingerprints."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgref.contracts.effects import Action
from pgref.errors import InvalidArgument
from pgref.keys import FENCE_MAX, fingerprint, idempotency_key, valid_fence, valid_limit, valid_ttl


@pytest.mark.parametrize("bad", ["", "x" * 513, "é" * 257, "a\0b", "\ud800", None, 7, b"bytes"])
@pytest.mark.parametrize("argument", ["key", "resource"])
def test_a_bad_name_is_refused_with_its_argument(argument: str, bad: object) -> None:
    names = {"key": "k", "resource": "r", argument: bad}
    with pytest.raises(InvalidArgument, match=f"^{argument} must "):
        Action(**names)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["x" * 512, "é" * 256])
def test_the_limit_counts_bytes(name: str) -> None:
    assert Action(name, name).key == name


@pytest.mark.parametrize("bad", [0, -1, 0.0, float("nan"), float("inf"), -float("inf"), True, "5", None, 10**400, 4e7])
def test_a_bad_ttl_is_refused(bad: object) -> None:
    with pytest.raises(InvalidArgument, match="^ttl_seconds must be"):
        valid_ttl(bad)


@pytest.mark.parametrize("bad", [0, -1, True, 1.0, "1", None, FENCE_MAX + 1])
def test_a_bad_fence_is_refused(bad: object) -> None:
    with pytest.raises(InvalidArgument, match="^fence must be"):
        valid_fence(bad)


@pytest.mark.parametrize("bad", [0, -1, True, 1.0, None, 100_001])
def test_a_bad_limit_is_refused(bad: object) -> None:
    with pytest.raises(InvalidArgument, match="^limit must be"):
        valid_limit(bad)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (1.10, Decimal("1.1")),
        (1, 1.0),
        (1, Decimal("1.00")),
        (0.0, -0.0),
        ((1, 2), [1, 2]),
        ({3, 1}, {1, 3}),
        (UUID(int=5), str(UUID(int=5))),
        (datetime(2030, 1, 1, tzinfo=UTC), "2030-01-01T00:00:00+00:00"),
    ],
)
def test_equal_requests_have_one_fingerprint(one: object, other: object) -> None:
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [(10, 11), ("1", 1), (True, 1), (None, "None"), ([1, [2]], [[1], 2]), ({"a": 1}, [["a", 1]]), (2**53, 2**53 + 1)],
)
def test_different_requests_have_different_fingerprints(one: object, other: object) -> None:
    assert fingerprint(one) != fingerprint(other)


@pytest.mark.parametrize("bad", [object(), float("nan"), float("inf"), {"a": {1: object()}}])
def test_what_has_no_stable_text_has_no_fingerprint(bad: object) -> None:
    with pytest.raises(InvalidArgument, match="fingerprint"):
        fingerprint(bad)


def test_a_request_that_holds_itself_has_no_fingerprint() -> None:
    request: list[object] = []
    request.append(request)
    with pytest.raises(InvalidArgument, match="fingerprint"):
        fingerprint(request)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(json_values)
def test_a_fingerprint_survives_the_message(request: object) -> None:
    from kombu.utils import json

    assert fingerprint(request) == fingerprint(json.loads(json.dumps(request)))


def test_an_idempotency_key_depends_on_the_key_alone() -> None:
    assert idempotency_key("a") == idempotency_key("a") != idempotency_key("b")
