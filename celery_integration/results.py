"""Results as text: the serializer's own JSON, or a marker where a value cannot be kept."""

from __future__ import annotations

import logging
from typing import Any

from kombu.utils import json

from pgref.keys import shown

__all__ = ["dump_result", "load_result", "storable", "told"]

logger = logging.getLogger(__name__)

CHARACTERS_MAX = 500


def dump_result(key: str, value: Any, bytes_max: int) -> tuple[str, Any]:
    """Return the text to store for ``value`` and the value that the task returns.

    A value that cannot be stored never un-does an effect: both become a marker, and the error is logged (G24).
    """
    try:
        text = json.dumps(value)
        if len(text) <= bytes_max:
            return text, value
        reason = f"{len(text)} bytes are more than fenced_result_bytes_max = {bytes_max}"
    except Exception as error:
        reason = told(error)
    logger.error("the result of %s is not kept: %s", shown(key), reason)
    marker = {"fenced": "result not kept", "reason": reason}
    return json.dumps(marker), marker


def told(error: BaseException) -> str:
    """Return the error in a line that can be stored; one whose text fails in its turn is only named."""
    try:
        return storable(f"{type(error).__name__}: {error}")
    except Exception:
        return type(error).__name__


def storable(text: str) -> str:
    """Return the beginning of ``text``, without what no database keeps."""
    return text[:CHARACTERS_MAX].replace("\0", "").encode("utf-8", "replace").decode()


def load_result(text: str | None) -> Any:
    """Return the value of a stored result."""
    return None if text is None else json.loads(text)
