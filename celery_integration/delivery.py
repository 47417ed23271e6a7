"""Messages: what is kept of one so that it can be sent again, and sending a delivery back to come later."""

from __future__ import annotations

import logging
import math
import random
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn

from celery import Celery, Task
from celery.exceptions import Ignore, Reject, Retry
from celery.utils.time import get_exponential_backoff_interval
from kombu.utils import json

from celery_integration.effect import RetryLater
from celery_integration.errors import EffectBusy
from pgref.keys import shown

if TYPE_CHECKING:
    from celery.canvas import Signature

__all__ = ["come_back", "dumped", "payload_of", "retry_delay_seconds", "signature_of"]

logger = logging.getLogger(__name__)

JITTER_SECONDS_MAX = 0.5


def payload_of(task: Task[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the text of a message that does the current request again, links and chord membership included.

    None, with a logged error, if the message is not JSON: then it cannot be dispatched again from the database.
    """
    return dumped(_signature(task, args, kwargs))


def dumped(signature: Signature[Any]) -> str | None:
    """Return the text that `signature_of` reads, or None, with a logged error, if it is not JSON."""
    try:
        return json.dumps(signature)
    except (TypeError, ValueError, RecursionError) as error:
        logger.error("the message of %s is not JSON and cannot be dispatched: %s", signature.task, error)  # noqa: TRY400
        return None


def _signature(task: Task[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any) -> Signature[Any]:
    if task.request.called_directly:
        return task.signature(args, kwargs, **options)
    return task.signature_from_request(args=args, kwargs=kwargs, **options)


def signature_of(app: Celery, payload: str) -> Signature[Any]:
    """Return the signature that `payload_of` kept."""
    return app.signature(json.loads(payload))


def come_back(
    task: Task[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, key: str, seconds: float
) -> NoReturn:
    """End this delivery and let an equal one come after ``seconds``: same id, retries, links, queue and priority.

    One message goes out for the one that is acknowledged; if it cannot be sent, the broker keeps the old one.
    Raises `Ignore` or `Reject` towards Celery, and `EffectBusy` where there is no delivery to send back.
    """
    request = task.request
    if request.called_directly or request.is_eager:
        raise EffectBusy(f"{shown(key)} is busy", key=key, retry_after_seconds=seconds)
    countdown = seconds + random.uniform(0, JITTER_SECONDS_MAX)  # noqa: S311  spreads load, guards nothing
    if _counts_whole_seconds(task.app):
        countdown = max(1, math.ceil(countdown))
    try:
        _signature(task, args, kwargs, countdown=countdown).apply_async()
    except Exception as error:
        logger.warning("cannot send %s back to its queue: %s", shown(key), error)
        raise Reject(error, requeue=True) from error
    raise Ignore(f"{shown(key)} comes back in {countdown:.1f} s")


def _counts_whole_seconds(app: Celery) -> bool:
    """RabbitMQ delays the messages of quorum queues itself, by whole seconds, and Celery fails on less than one."""
    url = app.conf.broker_write_url or app.conf.broker_url or ""
    return str(url).startswith(("amqp", "pyamqp"))


def retry_delay_seconds(task: Task[Any, Any], error: BaseException) -> float | None:
    """Return after how long at most Celery will deliver the retry that ``error`` leads to, or None if to none."""
    match error:
        case RetryLater(options=options):
            return _seconds_until(task, options.get("eta") or options.get("countdown"))
        case Retry(when=when):
            return _seconds_until(task, when)
    unwanted = tuple(getattr(task, "dont_autoretry_for", ()))
    if not isinstance(error, tuple(getattr(task, "autoretry_for", ()))) or isinstance(error, (Ignore, *unwanted)):
        return None
    options = getattr(task, "retry_kwargs", {})
    retries_max = options.get("max_retries", task.max_retries)
    if retries_max is not None and task.request.retries >= retries_max:
        return None
    if factor := float(getattr(task, "retry_backoff", False)):
        maximum = int(getattr(task, "retry_backoff_max", 600))
        return float(get_exponential_backoff_interval(int(max(1.0, factor)), task.request.retries, maximum))
    return _seconds_until(task, options.get("countdown"))


def _seconds_until(task: Task[Any, Any], when: Any) -> float:
    if when is None:
        return float(task.default_retry_delay)
    if not isinstance(when, datetime):
        return max(0.0, float(when))
    now = datetime.now(UTC)
    return max(0.0, ((when if when.tzinfo else when.replace(tzinfo=UTC)) - now).total_seconds())
