"""The one table from SQLSTATE and verdict to pgref's errors."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

import psycopg
import sqlalchemy as sa

from pgref import errors

__all__ = ["Failure", "classify", "refusal", "sqlstate"]


class Failure(Enum):
    """What a database error says about the statement that met it."""

    AMBIGUOUS = auto()
    """The connection went: it may have been written. Every call is safe to repeat."""
    REPEAT = auto()
    """Rolled back by the server in favour of another transaction: repeat at once."""
    UNAVAILABLE = auto()
    """Not written; the server cannot serve it now."""
    SCHEMA = auto()
    """The schema, or a privilege on it, is missing."""
    ARGUMENT = auto()
    """The server refuses a value."""
    OTHER = auto()


# By whole SQLSTATE first, then by class.
_FAILURES: Final[Mapping[str, Failure]] = {
    "08": Failure.AMBIGUOUS,
    "22": Failure.ARGUMENT,
    "25006": Failure.UNAVAILABLE,
    "3F": Failure.SCHEMA,
    "40001": Failure.REPEAT,
    "40P01": Failure.REPEAT,
    "42501": Failure.SCHEMA,
    "42883": Failure.SCHEMA,
    "42P01": Failure.SCHEMA,
    "42704": Failure.SCHEMA,
    "53": Failure.UNAVAILABLE,
    "54": Failure.ARGUMENT,
    "55P03": Failure.UNAVAILABLE,
    "57014": Failure.UNAVAILABLE,
    "57P": Failure.AMBIGUOUS,
    "58": Failure.AMBIGUOUS,
    "XX": Failure.AMBIGUOUS,
}

_REFUSALS: Final[Mapping[str, tuple[type[errors.Refused], str]]] = {
    "fingerprint_mismatch": (errors.FingerprintMismatch, "is known for another input"),
    "resource_mismatch": (errors.ResourceMismatch, "has another resource than the lease"),
    "fence_stale": (errors.FenceStale, "has a newer grant than the lease"),
    "not_holder": (errors.NotHolder, "is not held by this lease"),
    "lease_lost": (errors.LeaseLost, "has no standing intent of this lease any more"),
    "not_uncertain": (errors.NotUncertain, "is not uncertain"),
    "reconcile_taken": (errors.ReconcileTaken, "is claimed by another reconciler"),
    "unsafe_not_retryable": (errors.UnsafeNotRetryable, "is not safe to run again without force_retryable"),
    "done": (errors.LeaseLost, "was done by another attempt"),
}


def sqlstate(error: BaseException) -> str | None:
    """Return the SQLSTATE of a psycopg error or of SQLAlchemy's wrapper around one."""
    if isinstance(error, sa.exc.DBAPIError):
        error = error.orig or error
    return getattr(error, "sqlstate", None)


def classify(error: BaseException) -> Failure:
    """Say what ``error`` means. A lost connection has no SQLSTATE."""
    state = sqlstate(error)
    if state is None:
        inner = error.orig if isinstance(error, sa.exc.DBAPIError) else error
        return Failure.ARGUMENT if isinstance(inner, psycopg.DataError) else Failure.AMBIGUOUS
    for length in (5, 3, 2):
        if found := _FAILURES.get(state[:length]):
            return found
    return Failure.OTHER


def refusal(verdict: str, key: str, **attributes: object) -> errors.Refused:
    """Return the error for a verdict that refuses."""
    cls, text = _REFUSALS[verdict]
    return cls(f"{key!r} {text}", key=key, **attributes)
