"""The suite catches a sink that judges and writes in separate steps (G33)."""

import pytest

from pgref.conformance import BrokenSink, FencedSinkConformance

Data = dict[str, str]


class BrokenSuite(FencedSinkConformance[Data]):
    sink: BrokenSink

    def make_sink(self) -> BrokenSink:
        return BrokenSink()

    def write_value(self, connection: Data, resource: str, value: str) -> None:
        connection[resource] = value

    def read_value(self, resource: str) -> str | None:
        return self.sink.data.get(resource)


@pytest.fixture
def suite() -> BrokenSuite:
    suite = BrokenSuite()
    suite.prepare()
    return suite


def test_the_interleaving_is_caught(suite: BrokenSuite) -> None:
    with pytest.raises(AssertionError):
        suite.test_delayed_write()


def test_one_writer_at_a_time_would_not_catch_it(suite: BrokenSuite) -> None:
    suite.test_lower_fence_is_refused(4)
    suite.prepare()
    suite.test_equal_fence_passes()
    suite.prepare()
    suite.test_higher_fence_raises_seen()
