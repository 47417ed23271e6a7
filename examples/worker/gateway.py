"""The shop's client of the card processor."""

from __future__ import annotations

import json
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import ProxyHandler, Request, build_opener

__all__ = ["CONNECTION_ERRORS", "charge", "find"]

TIMEOUT_SECONDS = 2.0

CONNECTION_ERRORS = (OSError, HTTPException)
"""What a lost answer looks like. It says nothing about whether the charge was applied."""


# A proxy set in the environment is not meant for a processor on this machine.
_open = build_opener(ProxyHandler({})).open


def charge(
    url: str, order: int, cents: int, *, idempotency_key: str | None = None, fence: int | None = None
) -> dict[str, Any]:
    """Charge a card and return the processor's record of it."""
    body = {"order": order, "cents": cents, "idempotency_key": idempotency_key, "fence": fence}
    return _ask(Request(f"{url}/charges", data=json.dumps(body).encode(), method="POST"))


def find(url: str, **query: str | int) -> dict[str, Any] | None:
    """Look a charge up by ``idempotency_key`` or ``order``."""
    try:
        return _ask(Request(f"{url}/charges?{urlencode(query)}"))
    except HTTPError as error:
        if error.code != 404:
            raise
        return None


def _ask(request: Request) -> dict[str, Any]:
    with _open(request, timeout=TIMEOUT_SECONDS) as answer:
        record: dict[str, Any] = json.load(answer)
        return record
