"""The shop's client of the card processor."""

from __future__ import annotations

import json
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import ProxyHandler, Request, build_opener

__all__ = ["CONNECTION_ERRORS", "StaleFence", "charge", "find", "seal"]

TIMEOUT_SECONDS = 2.0

CONNECTION_ERRORS = (OSError, HTTPException)
"""What a lost answer looks like. It says nothing about whether the charge was applied."""


class StaleFence(Exception):
    """The processor has seen a higher fence and did nothing."""


# A proxy set in the environment is not meant for a processor on this machine.
_open = build_opener(ProxyHandler({})).open


def charge(
    url: str,
    order: int,
    cents: int,
    *,
    idempotency_key: str | None = None,
    resource: str | None = None,
    fence: int | None = None,
) -> dict[str, Any]:
    """Charge a card and return the processor's record of it. Raises `StaleFence`."""
    body = {"order": order, "cents": cents, "idempotency_key": idempotency_key, "resource": resource, "fence": fence}
    return _post(f"{url}/charges", body)


def seal(url: str, resource: str, fence: int) -> None:
    """Have the processor refuse charges below ``fence``, also those on their way. Raises `StaleFence`: it does so."""
    _post(f"{url}/seal", {"resource": resource, "fence": fence})


def find(url: str, **query: str | int) -> dict[str, Any] | None:
    """Look a charge up by ``idempotency_key`` or ``order``."""
    try:
        return _ask(Request(f"{url}/charges?{urlencode(query)}"))
    except HTTPError as error:
        if error.code != 404:
            raise
        return None


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    try:
        return _ask(Request(url, data=json.dumps(body).encode(), method="POST"))
    except HTTPError as error:
        if error.code == 409:
            raise StaleFence(f"refused: {body['resource']} has seen a fence above {body['fence']}") from error
        raise


def _ask(request: Request) -> dict[str, Any]:
    with _open(request, timeout=TIMEOUT_SECONDS) as answer:
        record: dict[str, Any] = json.load(answer)
        return record
