"""How long a retry can take until it is delivered: from then on the database takes it as lost."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, cast

import pytest
from celery import Celery
from celery.exceptions import Ignore, Reject, Retry

from celery_integration.delivery import retry_delay_seconds
from celery_integration.effect import RetryLater
from pgref.errors import PgrefError, Unavailable

HOUR = 3600.0


app: Any = Celery("delivery", broker="memory://", set_as_current=False)
numbers = count()


def task(**options: Any) -> Any:
    def body() -> None: ...

    made: Any = app.task(name=f"delivery.{next(numbers)}", dont_autoretry_for=(PgrefError,), **options)(body)
    return made


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (RetryLater({}), 180.0),
        (RetryLater({"countdown": 7}), 7.0),
        (RetryLater({"eta": datetime(2020, 1, 1, tzinfo=UTC)}), 0.0),
        (Retry(when=cast("Any", 5)), 5.0),
        (ValueError(), None),
        (Ignore(), None),
        (Reject(), None),
    ],
    ids=repr,
)
def test_only_a_retry_has_a_delay(error: Exception, seconds: float | None) -> None:
    """FC-13, FC-17: Celery's default delay where none is given, nothing for what is no retry."""
    assert retry_delay_seconds(task(), error) == seconds


def test_a_time_is_waited_for() -> None:
    later = datetime.now(UTC) + timedelta(seconds=HOUR)
    for when in (later, later.replace(tzinfo=None)):
        seconds = retry_delay_seconds(task(), RetryLater({"eta": when}))
        assert seconds is not None
        assert 0 < seconds <= HOUR


@pytest.mark.parametrize(
    ("options", "retries", "seconds"),
    [
        ({}, 0, 180.0),
        ({"default_retry_delay": 3}, 0, 3.0),
        ({"retry_kwargs": {"countdown": 4}}, 0, 4.0),
        ({"retry_backoff": 2, "max_retries": None}, 3, 16.0),
        ({"retry_backoff": True, "retry_backoff_max": 5, "max_retries": 20}, 10, 5.0),
        ({"max_retries": 2}, 2, None),
        ({"max_retries": None}, 1000, 180.0),
        ({"retry_kwargs": {"max_retries": 1}}, 1, None),
    ],
)
def test_a_failure_that_celery_retries_has_a_delay(
    options: dict[str, Any], retries: int, seconds: float | None
) -> None:
    """FC-16: as long as Celery will wait at most, and none when it has given up."""
    made = task(autoretry_for=(Exception,), **options)
    made.push_request(retries=retries)
    try:
        assert retry_delay_seconds(made, ValueError()) == seconds
        assert retry_delay_seconds(made, Unavailable("ours")) is None
    finally:
        made.pop_request()
