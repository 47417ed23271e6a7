"""Every error that pgref raises; the branch says what to do next.

PgrefError
├── InvalidArgument         fix the call; nothing was sent (also a ValueError)
├── SchemaError             stop the deployment: schema absent or of another version
├── Unavailable             nothing was written; try again later
├── OutcomeUnknown          it may have been written; reconcile
└── Refused                 the store judged and said no; do not repeat the call as it is
    ├── FingerprintMismatch the key stands for another request
    ├── FenceError          the lease does not entitle to this
    │   ├── ResourceMismatch
    │   ├── FenceStale
    │   ├── NotHolder
    │   └── LeaseLost
    ├── NotUncertain        there is nothing to rule on
    ├── ReconcileTaken      another reconciler has the claim
    ├── ReconcileDeferred   a reconciler has put the key off
    └── UnsafeNotRetryable  only ``force_retryable`` may free this key

All of them can be rebuilt from their message alone and survive pickling with their attributes.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "FenceError",
    "FenceStale",
    "FingerprintMismatch",
    "InvalidArgument",
    "LeaseLost",
    "NotHolder",
    "NotUncertain",
    "OutcomeUnknown",
    "PgrefError",
    "ReconcileDeferred",
    "ReconcileTaken",
    "Refused",
    "ResourceMismatch",
    "SchemaError",
    "Unavailable",
    "UnsafeNotRetryable",
]


class PgrefError(Exception):
    """Root of the tree. Keyword arguments become attributes."""

    def __init__(self, message: str = "", **attributes: Any) -> None:
        super().__init__(message)
        self.__dict__.update(attributes)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


def _rebuild(cls: type[PgrefError], args: tuple[Any, ...], attributes: dict[str, Any]) -> PgrefError:
    error = cls(*args)
    error.__dict__.update(attributes)
    return error


def cause_of(raised: BaseException, met: BaseException) -> BaseException | None:
    """Return what to raise ``raised`` from, where it may be the very error that was ``met``."""
    return met.__cause__ if raised is met else met


class InvalidArgument(PgrefError, ValueError):
    """An argument is outside its limits; the message names both. Raised before anything is sent."""


class SchemaError(PgrefError):
    """The schema is missing or not of the version that this code needs."""


class Unavailable(PgrefError):
    """The store could not be reached and nothing was written."""


class OutcomeUnknown(PgrefError):
    """The store was reached, its answer was lost, and reading back could not settle it in time."""


class Refused(PgrefError):
    """The store judged the call and refused it. No row that existed was changed."""

    key: str | None = None


class FingerprintMismatch(Refused):
    """The key is known for another input; its state and result are not shown."""


class FenceError(Refused):
    """The lease does not authorise this call."""


class ResourceMismatch(FenceError):
    """The lease was granted on another resource than the action names."""


class FenceStale(FenceError):
    """A newer fence exists. ``fence`` is the caller's, ``seen`` the newest."""

    fence: int | None = None
    seen: int | None = None


class NotHolder(FenceError):
    """The lease is not the one recorded in the intent of this key."""


class LeaseLost(FenceError):
    """The lease was the right one, but its intent no longer stands (expired, uncertain, done or withdrawn)."""


class NotUncertain(Refused):
    """Reconciliation was asked for a key that is not uncertain. ``state`` says what it is."""

    state: str | None = None


class ReconcileTaken(Refused):
    """Another reconciler holds the claim for ``retry_after_seconds`` more."""

    retry_after_seconds: float | None = None


class ReconcileDeferred(Refused):
    """Whoever looked last has put the key off for ``retry_after_seconds`` more, or parked it for a person (None)."""

    retry_after_seconds: float | None = None


class UnsafeNotRetryable(Refused):
    """The ruling *not applied* frees an UNSAFE action only with ``force_retryable``."""
