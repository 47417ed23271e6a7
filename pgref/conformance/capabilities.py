"""What an implementation can do beyond the contract. All is expected until the subclass says otherwise."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Capabilities"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Tests that need a capability set to False are skipped, with its name as the reason."""

    manual_clock: bool = True
    """The store judges expiry by the clock given to `make_store`."""
    shared_between_processes: bool = True
    """Two stores from `make_store` see the same data."""
    seal: bool = True
    """The sink has ``seal(resource, fence)`` (G27)."""
