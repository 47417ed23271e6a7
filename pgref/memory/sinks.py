"""A fenced sink in a dict (G30-G34)."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from threading import Lock
from typing import Any, TypeVar

from pgref.errors import FenceStale
from pgref.keys import shown, valid_callable, valid_fence, valid_key

__all__ = ["MemorySink"]

T = TypeVar("T")


class MemorySink:
    """A `FencedSink` over a dict. ``write`` gets a copy of it, which becomes the data only if ``write`` returns.

    ``write`` runs under the sink's lock, so it must not call the sink.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._data: dict[str, Any] = {}
        self._seen: dict[str, int] = {}

    def write_fenced(self, resource: str, fence: int, write: Callable[[dict[str, Any]], T]) -> T:
        """Compare ``fence`` with the highest seen and run ``write``, as one atomic operation."""
        valid_key(resource, "resource")
        valid_fence(fence)
        valid_callable(write, "write")
        with self._lock:
            self._refuse_lower(resource, fence)
            draft = deepcopy(self._data)
            answer = write(draft)
            self._data = draft
            self._seen[resource] = fence
            return answer

    def seal(self, resource: str, fence: int) -> None:
        """Refuse fences below ``fence`` from now on, without writing (G27). Raises `FenceStale`."""
        valid_key(resource, "resource")
        valid_fence(fence)
        with self._lock:
            self._refuse_lower(resource, fence)
            self._seen[resource] = fence

    def seen_fence(self, resource: str) -> int:
        """Return the highest fence seen for ``resource``, 0 if none."""
        valid_key(resource, "resource")
        with self._lock:
            return self._seen.get(resource, 0)

    def read(self) -> dict[str, Any]:
        """Return a copy of the data."""
        with self._lock:
            return deepcopy(self._data)

    def _refuse_lower(self, resource: str, fence: int) -> None:
        seen = self._seen.get(resource, 0)
        if fence < seen:
            raise FenceStale(f"fence {fence} of {shown(resource)} is below {seen}", fence=fence, seen=seen)
