"""Messages: what is kept of one so that it can be sent again, and sending a delivery back to come later."""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING, Any, NoReturn

from celery import Celery, Task
from celery.exceptions import Ignore, Reject
from kombu.utils import json

from celery_integration.errors import EffectBusy

if TYPE_CHECKING:
    from celery.canvas import Signature

__all__ = ["come_back", "payload_of", "signature_of"]

logger = logging.getLogger(__name__)

JITTER_SECONDS_MAX = 0.5


def payload_of(task: Task[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the text of a message that does the current request again, links and chord membership included.

    None, with a logged error, if the message is not JSON: then it cannot be dispatched again from the database.
    """
    try:
        return json.dumps(_signature(task, args, kwargs))
    except (TypeError, ValueError, RecursionError) as error:
        logger.error("the message of %s is not JSON and cannot be dispatched again: %s", task.name, error)  # noqa: TRY400
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
        raise EffectBusy(f"{key!r} is busy", key=key, retry_after_seconds=seconds)
    countdown = seconds + random.uniform(0, JITTER_SECONDS_MAX)  # noqa: S311  spreads load, guards nothing
    try:
        _signature(task, args, kwargs, countdown=countdown).apply_async()
    except Exception as error:
        logger.warning("cannot send %s back to its queue: %s", key, error)
        raise Reject(error, requeue=True) from error
    raise Ignore(f"{key!r} comes back in {countdown:.1f} s")
