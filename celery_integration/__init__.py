"""Fenced tasks for Celery: `fenced_task` makes a task that takes effect once, `install` gives it its database."""

import celery_integration.pools  # noqa: F401  its signal refuses pools in which fenced tasks cannot run
from celery_integration.decorator import fenced_task
from celery_integration.effect import Applied, Effect, NotApplied, Unknown
from celery_integration.errors import ConfigurationError, EffectBusy, EffectUncertain
from celery_integration.schedule import schedule
from celery_integration.settings import install
from celery_integration.task import FencedTask
from pgref.contracts.effects import RetrySafety

__all__ = [
    "Applied",
    "ConfigurationError",
    "Effect",
    "EffectBusy",
    "EffectUncertain",
    "FencedTask",
    "NotApplied",
    "RetrySafety",
    "Unknown",
    "fenced_task",
    "install",
    "schedule",
]
