"""The contracts in plain Python under one lock: the executable specification, and a store for unit tests."""

from pgref.memory.effects import MemoryEffectStore
from pgref.memory.sinks import MemorySink

__all__ = ["MemoryEffectStore", "MemorySink"]
