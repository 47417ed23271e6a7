"""A card processor in a process of its own: slow, sometimes silent, with an append-only list of what it applied.

The list has no unique key on purpose: one would hide duplicates.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

__all__ = ["BadRequest", "Charge", "ChargeRequest", "Fate", "Ledger", "StaleFence", "fate", "read_charges", "serve"]

Provider = Literal["keys", "fences", "none"]

DELAY_SECONDS_MIN = 0.02
DELAY_SECONDS_MAX = 0.2
SILENT_AFTER_SHARE = 0.08
SILENT_BEFORE_SHARE = 0.04


class BadRequest(Exception):
    """The request cannot be a charge. The text says why."""


class StaleFence(Exception):
    """A higher fence was seen for this resource."""


@dataclass(frozen=True, slots=True)
class ChargeRequest:
    """What a POST asks for."""

    order: int
    cents: int
    idempotency_key: str | None = None
    resource: str | None = None
    fence: int | None = None

    @classmethod
    def from_json(cls, body: bytes) -> ChargeRequest:
        """Raises `BadRequest`."""
        try:
            fields = json.loads(body)
            order, cents = fields["order"], fields["cents"]
        except (ValueError, TypeError, KeyError):
            raise BadRequest('the body must be JSON like {"order": 7, "cents": 1200}') from None
        if not isinstance(order, int) or not isinstance(cents, int) or cents < 1:
            raise BadRequest("order and cents must be whole numbers, cents at least 1")
        resource, fence = fields.get("resource"), fields.get("fence")
        if fence is not None:
            _check_fence(resource, fence)
        return cls(order, cents, fields.get("idempotency_key"), resource, fence)


@dataclass(frozen=True, slots=True)
class Charge:
    """One line of the list: money that moved."""

    id: str
    order: int
    cents: int
    idempotency_key: str | None
    resource: str | None
    fence: int | None


def _check_fence(resource: object, fence: object) -> None:
    if not isinstance(resource, str) or not isinstance(fence, int) or fence < 1:
        raise BadRequest("a fence must be a whole number of at least 1, and needs a resource")


@dataclass(frozen=True, slots=True)
class Fate:
    """What happens to one POST: how long it takes before and after applying, and whether it is answered."""

    before_seconds: float
    after_seconds: float
    ending: Literal["answered", "silent before applying", "silent after applying"]


def fate(seed: int, order: int, visit: int) -> Fate:
    """Return the fate of the ``visit``-th POST for ``order``: the same for the same seed, whatever the timing."""
    rng = random.Random(f"{seed}:{order}:{visit}")
    total = rng.uniform(DELAY_SECONDS_MIN, DELAY_SECONDS_MAX)
    before = total * rng.random()
    draw = rng.random()
    if draw < SILENT_AFTER_SHARE:
        return Fate(before, total - before, "silent after applying")
    if draw < SILENT_AFTER_SHARE + SILENT_BEFORE_SHARE:
        return Fate(before, total - before, "silent before applying")
    return Fate(before, total - before, "answered")


def _seal_from_json(body: bytes) -> tuple[str, int]:
    try:
        fields = json.loads(body)
        resource, fence = fields["resource"], fields["fence"]
    except (ValueError, TypeError, KeyError):
        raise BadRequest('the body must be JSON like {"resource": "account:7", "fence": 3}') from None
    _check_fence(resource, fence)
    return resource, fence


class Ledger:
    """The append-only list, in a file, and the idempotency keys or fences that the provider honours (or not)."""

    def __init__(self, file: Path, provider: Provider) -> None:
        self._fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._provider = provider
        self._lock = threading.Lock()
        self._charges: list[Charge] = []
        self._visits: Counter[int] = Counter()
        self._seen: dict[str, int] = {}

    def visit(self, order: int) -> int:
        """Count a POST for ``order`` and return which one it is, from 1."""
        with self._lock:
            self._visits[order] += 1
            return self._visits[order]

    def apply(self, request: ChargeRequest) -> Charge:
        """Move the money, or return the charge that moved it for the same honoured key.

        Fences are compared here, not when the request comes in: it may have been on its way for long. Raises
        `StaleFence`.
        """
        with self._lock:
            if self._provider == "fences" and request.resource is not None and request.fence is not None:
                self._raise_seen(request.resource, request.fence)
            return self._honoured(request) or self._append(request)

    def seal(self, resource: str, fence: int) -> None:
        """Refuse lower fences from now on, also those of requests that are on their way. Raises `StaleFence`."""
        with self._lock:
            self._raise_seen(resource, fence)

    def find(self, *, idempotency_key: str | None = None, order: int | None = None) -> Charge | None:
        """Return the first charge for the key or the order."""
        with self._lock:
            if idempotency_key is not None:
                return self._first(lambda charge: charge.idempotency_key == idempotency_key)
            return self._first(lambda charge: charge.order == order)

    def _honoured(self, request: ChargeRequest) -> Charge | None:
        if self._provider != "keys" or request.idempotency_key is None:
            return None
        return self._first(lambda charge: charge.idempotency_key == request.idempotency_key)

    def _raise_seen(self, resource: str, fence: int) -> None:
        seen = self._seen.get(resource, 0)
        if fence < seen:
            raise StaleFence(f"{resource} has seen fence {seen}")
        self._seen[resource] = fence

    def _append(self, request: ChargeRequest) -> Charge:
        charge = Charge(f"ch_{len(self._charges) + 1}", **asdict(request))
        os.write(self._fd, json.dumps(asdict(charge)).encode() + b"\n")
        self._charges.append(charge)
        return charge

    def _first(self, wanted: Callable[[Charge], bool]) -> Charge | None:
        return next(filter(wanted, self._charges), None)


def read_charges(file: Path) -> list[Charge]:
    """Return every charge applied so far."""
    if not file.exists():
        return []
    complete = file.read_bytes().rpartition(b"\n")[0]
    return [Charge(**json.loads(line)) for line in complete.splitlines()]


class _Server(ThreadingHTTPServer):
    request_queue_size = 128

    def __init__(self, ledger: Ledger, seed: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.ledger = ledger
        self.seed = seed

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients of this server are killed in the middle of requests, that is what it is for."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        actions = {"/charges": self._charge, "/seal": self._seal}
        action = actions.get(urlsplit(self.path).path)
        if action is None:
            self._answer(404, {"error": "POST /charges or /seal"})
            return
        try:
            action(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        except BadRequest as error:
            self._answer(400, {"error": str(error)})
        except StaleFence as error:
            self._answer(409, {"error": str(error)})

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        key, order = query.get("idempotency_key"), query.get("order", "")
        if url.path != "/charges" or not (key or order.isdigit()):
            self._answer(404, {"error": "GET /charges?idempotency_key=… or /charges?order=…"})
            return
        found = self.server.ledger.find(idempotency_key=key, order=int(order) if order.isdigit() else None)
        if found:
            self._answer(200, asdict(found))
        else:
            self._answer(404, {"error": "no such charge"})

    def _charge(self, body: bytes) -> None:
        request, ledger = ChargeRequest.from_json(body), self.server.ledger
        plan = fate(self.server.seed, request.order, ledger.visit(request.order))
        time.sleep(plan.before_seconds)
        if plan.ending == "silent before applying":
            return
        charge = ledger.apply(request)
        time.sleep(plan.after_seconds)
        if plan.ending == "answered":
            self._answer(201, asdict(charge))

    def _seal(self, body: bytes) -> None:
        resource, fence = _seal_from_json(body)
        self.server.ledger.seal(resource, fence)
        self._answer(200, {"resource": resource, "fence": fence})

    def _answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def serve(file: Path, provider: Provider, seed: int) -> None:
    """Print the URL and serve until killed."""
    with _Server(Ledger(file, provider), seed) as server, contextlib.suppress(KeyboardInterrupt):
        print(f"http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, required=True, help="where to append the charges")
    parser.add_argument("--provider", choices=["keys", "fences", "none"], default="keys", help="what it honours")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    serve(options.file, options.provider, options.seed)


if __name__ == "__main__":
    main()
