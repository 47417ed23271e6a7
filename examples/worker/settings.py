"""What the shop reads from its environment, and how both columns are set up for a broker that forgets quickly."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Settings", "celery_settings"]

VISIBILITY_TIMEOUT_SECONDS = 5

_MEANING = {
    "BROKER_URL": "the URL of Redis or Valkey, like redis://localhost:6379/0",
    "FENCED_DSN": "the DSN of PostgreSQL, like postgresql+psycopg://user@localhost/shop",
    "PROCESSOR_URL": "what `python -m examples.worker.processor --file charges.jsonl` prints",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Where things are."""

    broker_url: str
    dsn: str
    processor_url: str
    provider: str = "keys"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Ends the process with one readable line when something is missing."""
        for name, meaning in _MEANING.items():
            if not environment.get(name):
                sys.exit(f"examples.worker: set {name} to {meaning}")
        provider = environment.get("PROVIDER", "keys")
        if provider not in ("keys", "fences", "none"):
            sys.exit(f"examples.worker: PROVIDER must be keys, fences or none, not {provider!r}")
        return cls(environment["BROKER_URL"], environment["FENCED_DSN"], environment["PROCESSOR_URL"], provider)

    def to_environment(self) -> dict[str, str]:
        return {
            "BROKER_URL": self.broker_url,
            "FENCED_DSN": self.dsn,
            "PROCESSOR_URL": self.processor_url,
            "PROVIDER": self.provider,
        }


def celery_settings(queue: str) -> dict[str, Any]:
    """Return the settings that both columns share: a crash must not take minutes to be noticed."""
    return {
        "task_default_queue": queue,
        "task_ignore_result": True,
        # The message of a killed pool process keeps its place until the pool is next looked after, up to 5 s later.
        "worker_prefetch_multiplier": 8,
        "worker_lost_wait": 0.5,
        "broker_connection_retry_on_startup": True,
        "broker_transport_options": {
            "visibility_timeout": VISIBILITY_TIMEOUT_SECONDS,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
            # A worker killed while it restores would keep the others from restoring for five minutes.
            "unacked_mutex_expire": 2,
        },
    }
