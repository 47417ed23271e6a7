"""What a fenced task raises towards Celery, besides what its body raises.

PgrefError
├── ConfigurationError   install() has no database to work with, or an option contradicts another
└── Refused
    ├── EffectUncertain  it may have happened: in the backlog until a probe or a person rules
    └── EffectBusy       a direct or eager call met another attempt; in a worker the delivery comes back instead
"""

from __future__ import annotations

from pgref.errors import PgrefError, Refused

__all__ = ["ConfigurationError", "EffectBusy", "EffectUncertain"]


class ConfigurationError(PgrefError):
    """The settings do not say what is needed; the message says what to set."""


class EffectUncertain(Refused):
    """The effect may have happened and nothing could tell. It is not run again before somebody has ruled."""


class EffectBusy(Refused):
    """Another attempt of the key runs, or another key holds the resource, for up to ``retry_after_seconds``."""

    retry_after_seconds: float | None = None
