"""The one clock that judges expiry: by default the store's own, in tests one that is set by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Protocol

__all__ = ["Clock", "DatabaseClock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """Tells a store what time it is."""

    def now(self) -> datetime | None:
        """Return an aware time, or None to let the store ask its database (after its locks are held)."""


class DatabaseClock:
    """The default in PostgreSQL: `clock_timestamp()`, read after the locks (G23)."""

    def now(self) -> None:
        return None


class SystemClock:
    """This process's clock: the default in memory, where store and caller share a process."""

    def now(self) -> datetime:
        return datetime.now(UTC)


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start: datetime | None = None) -> None:
        self._now = start or datetime(2030, 1, 1, tzinfo=UTC)

    def now(self) -> datetime:
        return self._now

    def tick(self, seconds: float) -> datetime:
        """Move by ``seconds`` and return the new time."""
        self._now += timedelta(seconds=seconds)
        return self._now
