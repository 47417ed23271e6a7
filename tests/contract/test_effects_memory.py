"""The executable specification passes its own suite."""

from pgref.clock import Clock
from pgref.conformance import Capabilities, EffectStoreConformance
from pgref.contracts.effects import EffectStore
from pgref.memory import MemoryEffectStore


class TestMemoryEffectStore(EffectStoreConformance):
    capabilities = Capabilities(shared_between_processes=False)

    def make_store(self, clock: Clock) -> EffectStore:
        return MemoryEffectStore(clock)
