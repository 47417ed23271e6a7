"""Asking a probe: in a thread of its own, so that one that hangs delays nobody else."""

from __future__ import annotations

import contextvars
import logging
import threading
from queue import Empty, SimpleQueue
from typing import Any

from celery_integration.definition import Call, Verdict
from celery_integration.effect import Applied, Effect, NotApplied, Unknown
from celery_integration.results import told
from pgref import signals
from pgref.keys import shown

__all__ = ["ask"]

logger = logging.getLogger(__name__)


def ask(call: Call, effect: Effect, limit_seconds: float) -> Verdict:
    """Return what the probe of ``call`` says, or `Unknown` if it fails, says something else, or takes too long.

    It gets the original arguments and has no request. One that hangs is left to itself: its answer counts no more.
    """
    answers: SimpleQueue[Any] = SimpleQueue()
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(_answer, call, effect, answers), daemon=True)
    with signals.held():
        thread.start()
    try:
        answer = answers.get(timeout=limit_seconds)
    except Empty:
        logger.error("the probe of %s did not answer in %g s", shown(effect.key), limit_seconds)  # noqa: TRY400
        return Unknown(f"no answer in {limit_seconds:g} s")
    if isinstance(answer, (Applied, NotApplied, Unknown)):
        return answer
    if isinstance(answer, BaseException):
        logger.error("the probe of %s failed", shown(effect.key), exc_info=answer)
        return Unknown(told(answer))
    logger.error("the probe of %s returned %r, not Applied, NotApplied or Unknown", shown(effect.key), type(answer))
    return Unknown("no verdict")


def _answer(call: Call, effect: Effect, answers: SimpleQueue[Any]) -> None:
    call.task.app.set_current()  # a thread has its own
    assert call.definition.probe is not None
    try:
        answers.put(call.definition.probe(effect, *call.args, **call.kwargs))
    except BaseException as error:
        answers.put(error)
