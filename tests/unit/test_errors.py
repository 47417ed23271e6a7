"""The error tree: every error survives pickling and Celery's rebuilding from its message."""

from __future__ import annotations

import pickle

import pytest

import celery_integration.errors
import pgref.errors
from celery_integration.effect import NotApplied

CLASSES = [
    getattr(module, name) for module in (pgref.errors, celery_integration.errors) for name in sorted(module.__all__)
]


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_survives_pickling_with_its_attributes(cls: type[pgref.errors.PgrefError]) -> None:
    error = pickle.loads(pickle.dumps(cls("what to do", key="k", fence=3)))
    assert (type(error), str(error), error.key, error.fence) == (cls, "what to do", "k", 3)


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_can_be_rebuilt_from_its_message(cls: type[pgref.errors.PgrefError]) -> None:
    assert str(cls("what to do")) == "what to do"


def test_every_error_is_drawn_in_the_module() -> None:
    for module in (pgref.errors, celery_integration.errors):
        missing = [name for name in module.__all__ if name not in str(module.__doc__)]
        assert missing == []


def test_an_error_is_never_its_own_cause() -> None:
    met = pgref.errors.Unavailable("away")
    met.__cause__ = driver = OSError("refused")
    assert pgref.errors.cause_of(met, met) is driver
    assert pgref.errors.cause_of(pgref.errors.SchemaError("absent"), met) is met


def test_not_applied_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(NotApplied("declined", force=True)))
    assert (str(error), error.force) == ("declined", True)
