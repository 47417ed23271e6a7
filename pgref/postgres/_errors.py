"""The one table from SQLSTATE and verdict to pgref's errors."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

import psycopg
import sqlalchemy as sa

from pgref import errors
from pgref.keys import shown

__all__ = ["Failure", "classify", "first_line", "refusal", "rolled_back", "sqlstate", "translated"]


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


# By whole SQLSTATE first, then by class. What has no SQLSTATE did not come from the server: by type.
_FAILURES: Final[Mapping[str | type[Exception], Failure]] = {
    "08": Failure.AMBIGUOUS,
    "22": Failure.ARGUMENT,
    "25006": Failure.UNAVAILABLE,
    "25P03": Failure.AMBIGUOUS,
    "25P04": Failure.AMBIGUOUS,
    "3F": Failure.SCHEMA,
    "40001": Failure.REPEAT,
    "40003": Failure.AMBIGUOUS,
    "40P01": Failure.REPEAT,
    "42501": Failure.SCHEMA,
    "42883": Failure.SCHEMA,
    "42P01": Failure.SCHEMA,
    "42703": Failure.SCHEMA,
    "42704": Failure.SCHEMA,
    "53": Failure.UNAVAILABLE,
    "54": Failure.ARGUMENT,
    "55P03": Failure.UNAVAILABLE,
    "57014": Failure.UNAVAILABLE,
    "57P": Failure.AMBIGUOUS,
    "58": Failure.AMBIGUOUS,
    "XX": Failure.AMBIGUOUS,
    errors.Unavailable: Failure.UNAVAILABLE,
    psycopg.DataError: Failure.ARGUMENT,
    psycopg.ProgrammingError: Failure.OTHER,
    psycopg.Error: Failure.AMBIGUOUS,
}

_REFUSALS: Final[Mapping[str, tuple[type[errors.Refused], str]]] = {
    "fingerprint_mismatch": (errors.FingerprintMismatch, "is known for another input"),
    "resource_mismatch": (errors.ResourceMismatch, "has another resource than the lease"),
    "fence_stale": (errors.FenceStale, "has a newer grant than the lease"),
    "not_holder": (errors.NotHolder, "is not held by this lease"),
    "lease_lost": (errors.LeaseLost, "has no standing intent of this lease any more"),
    "not_uncertain": (errors.NotUncertain, "is not uncertain"),
    "reconcile_taken": (errors.ReconcileTaken, "is claimed by another reconciler"),
    "reconcile_deferred": (errors.ReconcileDeferred, "is put off by a reconciler"),
    "unsafe_not_retryable": (errors.UnsafeNotRetryable, "is not safe to run again without force_retryable"),
    "done": (errors.LeaseLost, "was done by another attempt"),
}


def sqlstate(error: BaseException) -> str | None:
    """Return the SQLSTATE of a psycopg error or of SQLAlchemy's wrapper around one."""
    return getattr(_unwrapped(error), "sqlstate", None)


def classify(error: BaseException) -> Failure:
    """Say what ``error`` means. A lost connection has no SQLSTATE."""
    cause = _unwrapped(error)
    state = sqlstate(cause)
    names = type(cause).__mro__ if state is None else (state, state[:3], state[:2])
    return next((_FAILURES[name] for name in names if name in _FAILURES), Failure.OTHER)


def _unwrapped(error: BaseException) -> BaseException:
    return (error.orig or error) if isinstance(error, sa.exc.DBAPIError) else error


def first_line(error: BaseException) -> str:
    """Return what ``error`` says, without the server's context."""
    return (str(_unwrapped(error)).strip() or type(error).__name__).splitlines()[0]


def translated(error: Exception) -> Exception:
    """Return pgref's error for that of a statement which was not written, or ``error`` if there is none."""
    text = first_line(error)
    match classify(error):
        case Failure.UNAVAILABLE if not isinstance(error, errors.Unavailable):
            return errors.Unavailable(text)
        case Failure.SCHEMA:
            return errors.SchemaError(f"{text}: run the migrations, and grant the application its role")
        case Failure.ARGUMENT:
            return errors.InvalidArgument(text)
        case _:
            return error


def rolled_back(error: Exception) -> Exception:
    """Return pgref's error for that of a statement in a transaction: if no commit was sent, nothing was written."""
    if classify(error) in {Failure.AMBIGUOUS, Failure.REPEAT}:
        return errors.Unavailable(f"rolled back: {first_line(error)}")
    return translated(error)


def refusal(verdict: str, key: str, **attributes: object) -> errors.Refused:
    """Return the error for a verdict that refuses."""
    cls, text = _REFUSALS[verdict]
    return cls(f"{shown(key)} {text}", key=key, **attributes)
