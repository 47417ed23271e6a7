"""Fenced sinks: the compare-and-write that a stale holder cannot pass (G30-G34)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

__all__ = ["FencedSink", "SealableSink"]

Connection_co = TypeVar("Connection_co", covariant=True)
T = TypeVar("T")


class FencedSink(Protocol[Connection_co]):
    """A place that remembers the highest fence per resource and refuses lower ones."""

    def write_fenced(self, resource: str, fence: int, write: Callable[[Connection_co], T]) -> T:
        """Compare ``fence`` with the highest seen and run ``write``, as one atomic operation.

        Equal passes, higher raises seen; an exception in ``write`` rolls back data and seen fence together.
        Raises `FenceStale` before ``write`` is called, and `InvalidArgument` for a fence below 1.
        """

    def seen_fence(self, resource: str) -> int:
        """Return the highest fence seen for ``resource``, 0 if none."""


class SealableSink(FencedSink[Connection_co], Protocol[Connection_co]):
    """A fenced sink that can be sealed, so that what a probe sees afterwards is final (G27)."""

    def seal(self, resource: str, fence: int) -> None:
        """Raise the seen fence to ``fence`` without writing: lower writers are refused from now on.

        Raises `FenceStale` if a higher one was seen, and `InvalidArgument`.
        """
