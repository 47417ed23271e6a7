"""The sink in a dict passes the suite of fenced sinks."""

from typing import Any

from pgref.conformance import FencedSinkConformance
from pgref.memory import MemorySink

Data = dict[str, Any]


class TestMemorySink(FencedSinkConformance[Data]):
    sink: MemorySink

    def make_sink(self) -> MemorySink:
        return MemorySink()

    def write_value(self, connection: Data, resource: str, value: str) -> None:
        connection[resource] = value

    def read_value(self, resource: str) -> str | None:
        value: str | None = self.sink.read().get(resource)
        return value
