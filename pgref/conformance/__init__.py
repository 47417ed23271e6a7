"""The guarantees as tests, for whoever writes a store: subclass a suite, say how to make yours, run pytest.

    class TestMine(EffectStoreConformance):
        capabilities = Capabilities(shared_between_processes=False)

        def make_store(self, clock):
            return MyStore(clock)

Each test's docstring begins with the guarantees that it checks. The only package here that imports pytest.
"""

import pytest

_SUITES = (
    "backlog",
    "batches",
    "credentials",
    "effects",
    "harness",
    "limits",
    "races",
    "reconciliation",
    "sinks",
    "upkeep",
)
pytest.register_assert_rewrite(*[f"{__name__}.{name}" for name in _SUITES])

from pgref.conformance.capabilities import Capabilities  # noqa: E402 - asserts are rewritten before the import
from pgref.conformance.effects import EffectStoreConformance  # noqa: E402
from pgref.conformance.sinks import BrokenSink, FencedSinkConformance  # noqa: E402

__all__ = ["BrokenSink", "Capabilities", "EffectStoreConformance", "FencedSinkConformance"]
