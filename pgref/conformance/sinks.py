"""The suite of fenced sinks: semantics.md, section 2 (G30-G34, G27), and a broken sink that it must catch."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar
from uuid import uuid4

import pytest

from pgref.conformance.capabilities import Capabilities
from pgref.conformance.races import REPEATS, race
from pgref.contracts.sinks import FencedSink
from pgref.errors import FenceStale, InvalidArgument
from pgref.keys import FENCE_MAX

__all__ = ["BrokenSink", "FencedSinkConformance"]

ConnectionT = TypeVar("ConnectionT")
T = TypeVar("T")


class _Sealing(Protocol):
    def seal(self, resource: str, fence: int) -> None: ...


class _WriteError(Exception):
    """Raised by a write of the tests."""


class FencedSinkConformance(Generic[ConnectionT]):
    """Every guarantee of `FencedSink`. Subclass it as ``Test…`` and override the three hooks.

    ``ConnectionT`` is what the sink hands to ``write``.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()
    backend: Any
    sink: FencedSink[ConnectionT]
    resource: str

    def make_sink(self) -> FencedSink[ConnectionT]:
        """Return a sink. Can use ``self.backend``."""
        raise NotImplementedError

    def write_value(self, connection: ConnectionT, resource: str, value: str) -> None:
        """Store ``value`` for ``resource`` through the connection that the sink handed out."""
        raise NotImplementedError

    def read_value(self, resource: str) -> str | None:
        """Return the committed value of ``resource``."""
        raise NotImplementedError

    def wait_for_rival(self, rival: Future[object]) -> None:
        """Return when ``rival`` has ended, or seems to wait for the writer that calls this.

        Override it where waiting can be seen, as in ``pg_stat_activity``, to save the time.
        """
        wait([rival], timeout=0.2)

    @pytest.fixture
    def conformance_backend(self) -> Any:
        """Override to request fixtures of your own; the value becomes ``self.backend``."""
        return None

    @pytest.fixture(autouse=True)
    def _prepared(self, conformance_backend: Any) -> None:
        self.prepare(conformance_backend)

    def prepare(self, backend: object = None) -> None:
        """Make a sink and a fresh resource; what the fixtures do before each test."""
        self.backend = backend
        self.sink = self.make_sink()
        self.resource = f"{uuid4().hex}/resource"

    # Short forms

    def put(self, fence: int, value: str | None = None, *, resource: str | None = None) -> None:
        """Write ``value``, by default the fence, in one fenced write."""
        target = resource or self.resource
        self.sink.write_fenced(target, fence, lambda c: self.write_value(c, target, value or str(fence)))

    def fail(self, fence: int) -> None:
        """Write, then raise in the same fenced write."""

        def write(connection: ConnectionT) -> None:
            self.write_value(connection, self.resource, "half done")
            raise _WriteError

        with pytest.raises(_WriteError):
            self.sink.write_fenced(self.resource, fence, write)

    def shows(self, fence: int, value: str | None) -> None:
        """Check seen fence and value."""
        assert (self.sink.seen_fence(self.resource), self.read_value(self.resource)) == (fence, value)

    def seal(self, fence: int) -> None:
        """Seal the resource, if the sink can."""
        if not self.capabilities.seal:
            pytest.skip("seal")
        sink: Any = self.sink
        sealing: _Sealing = sink
        sealing.seal(self.resource, fence)

    # One writer at a time

    def test_first_write(self) -> None:
        """G30: a first write stores value and fence, and returns what ``write`` returned."""

        def write(connection: ConnectionT) -> str:
            self.write_value(connection, self.resource, "a")
            return "answer"

        assert self.sink.write_fenced(self.resource, 3, write) == "answer"
        self.shows(3, "a")

    @pytest.mark.parametrize("fence", [1, 4])
    def test_lower_fence_is_refused(self, fence: int) -> None:
        """G30: a fence lower than seen is refused before ``write`` is called, and changes nothing."""
        self.put(5)
        called: list[object] = []
        with pytest.raises(FenceStale) as info:
            self.sink.write_fenced(self.resource, fence, called.append)
        assert (called, info.value.fence, info.value.seen) == ([], fence, 5)
        self.shows(5, "5")

    def test_equal_fence_passes(self) -> None:
        """G31: one holder may write in batches."""
        self.put(5, "a")
        self.put(5, "b")
        self.shows(5, "b")

    def test_higher_fence_raises_seen(self) -> None:
        """G31: a higher fence passes and becomes the one seen, up to the largest."""
        for fence in (1, 2, 9, FENCE_MAX):
            self.put(fence)
            self.shows(fence, str(fence))

    def test_resources_are_independent(self) -> None:
        """G30: the fence of one resource says nothing about another."""
        other = f"{self.resource}/other"
        self.put(5)
        self.put(1, resource=other)
        self.shows(5, "5")
        assert (self.sink.seen_fence(other), self.read_value(other)) == (1, "1")

    def test_failed_first_write(self) -> None:
        """G32: an exception in the first write leaves no value and no fence."""
        self.fail(3)
        self.shows(0, None)
        self.put(1)

    @pytest.mark.parametrize("fence", [5, 6])
    def test_failed_write(self, fence: int) -> None:
        """G32: an exception rolls back value and seen fence together, so that the fence before still passes."""
        self.put(5, "before")
        self.fail(fence)
        self.shows(5, "before")
        self.put(5, "after")

    @pytest.mark.parametrize("fence", [0, -1, FENCE_MAX + 1, True, 1.0, "1", None])
    def test_fence_that_is_none(self, fence: Any) -> None:
        """G34: a fence below 1, too large or of another type is refused, and ``write`` is not called."""
        called: list[object] = []
        with pytest.raises(InvalidArgument):
            self.sink.write_fenced(self.resource, fence, called.append)
        assert called == []
        self.shows(0, None)

    @pytest.mark.parametrize("resource", ["", "x" * 513, "a\0b", "\ud800", None])
    def test_resource_that_cannot_be_stored(self, resource: Any) -> None:
        """G24, G34: a resource outside the limits is refused."""
        with pytest.raises(InvalidArgument):
            self.sink.write_fenced(resource, 1, lambda _: None)
        with pytest.raises(InvalidArgument):
            self.sink.seen_fence(resource)

    def test_unknown_resource(self) -> None:
        """G34: of an unknown resource no fence was seen."""
        self.shows(0, None)

    # Sealing

    def test_seal_raises_seen_without_writing(self) -> None:
        """G27: sealing raises the fence seen and leaves the value."""
        self.put(1)
        self.seal(2)
        self.shows(2, "1")

    def test_seal_refuses_the_uncertain_attempt(self) -> None:
        """G27: after the seal the attempt's delayed write is refused, so that what is seen is final."""
        self.seal(2)
        with pytest.raises(FenceStale):
            self.put(1)
        self.shows(2, None)
        self.put(2)

    def test_seal_below_seen(self) -> None:
        """G27: a seal below the fence seen is refused, one at it changes nothing."""
        self.put(5)
        with pytest.raises(FenceStale):
            self.seal(4)
        self.seal(5)
        self.shows(5, "5")

    @pytest.mark.parametrize("fence", [0, -1, FENCE_MAX + 1])
    def test_seal_with_a_fence_that_is_none(self, fence: int) -> None:
        """G27, G34: sealing takes the same fences as writing."""
        with pytest.raises(InvalidArgument):
            self.seal(fence)

    # Many writers

    def test_delayed_write(self) -> None:
        """G33: a writer that is overtaken between its check and its write does not win over the higher fence."""
        committed = self.interleaved(1, 2)
        highest = max(committed)
        self.shows(highest, str(highest))

    def test_delayed_write_of_the_higher(self) -> None:
        """G33: a lower fence that arrives while a higher one writes does not get past it."""
        assert max(self.interleaved(2, 1)) == 2
        self.shows(2, "2")

    def test_rival_of_a_failed_write(self) -> None:
        """G32, G33: what waited for a write that failed is judged by the fence that was committed before."""
        self.put(1)

        def write(connection: ConnectionT, rival: Future[object]) -> None:
            self.write_value(connection, self.resource, "half done")
            self.wait_for_rival(rival)
            raise _WriteError

        assert self.delayed(3, write, rival=2) == [2]
        self.shows(2, "2")

    def interleaved(self, fence: int, rival: int) -> list[int]:
        """Start ``rival`` while the write with ``fence`` has passed its check. Return the fences that committed."""

        def write(connection: ConnectionT, other: Future[object]) -> None:
            self.wait_for_rival(other)
            self.write_value(connection, self.resource, str(fence))

        return self.delayed(fence, write, rival=rival)

    def delayed(self, fence: int, write: Callable[[ConnectionT, Future[object]], None], *, rival: int) -> list[int]:
        """Run ``write`` with the future of a rival that starts within it. Return the fences that committed."""
        rivals: list[Future[object]] = []

        with ThreadPoolExecutor(1) as pool:

            def body(connection: ConnectionT) -> None:
                rivals.append(pool.submit(self.put, rival))
                write(connection, rivals[0])

            committed = [fence] if self.commits(lambda: self.sink.write_fenced(self.resource, fence, body)) else []
        return committed + ([rival] if self.commits(rivals[0].result) else [])

    def commits(self, call: Callable[[], object]) -> bool:
        """Run ``call``; return whether it committed."""
        try:
            call()
        except (FenceStale, _WriteError):
            return False
        return True

    def test_many_writers(self) -> None:
        """G33: after many concurrent writes the value is that of the highest fence, whoever came last."""
        for _ in range(REPEATS):
            self.resource = f"{uuid4().hex}/resource"
            fences = random.sample(range(1, 100), 8)
            answers = race([partial(self.put, fence) for fence in fences])
            assert answers[fences.index(max(fences))] is None
            self.shows(max(fences), str(max(fences)))


class BrokenSink:
    """What a fenced sink must not be: it reads, judges and writes in separate steps. The suite must fail it (G33)."""

    def __init__(self) -> None:
        self.data: dict[str, str] = {}
        self.seen: dict[str, int] = {}

    def write_fenced(self, resource: str, fence: int, write: Callable[[dict[str, str]], T]) -> T:
        """Judge now, write later."""
        if fence < self.seen.get(resource, 0):
            raise FenceStale(fence=fence, seen=self.seen[resource])
        answer = write(self.data)
        self.seen[resource] = fence
        return answer

    def seen_fence(self, resource: str) -> int:
        """Return the fence written last."""
        return self.seen.get(resource, 0)
