"""Names and numbers that stores accept, request fingerprints and stable idempotency keys."""

from __future__ import annotations

import hashlib
import json
import math
import numbers
import uuid
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from enum import Enum
from typing import Any, TypeVar

from pgref.errors import InvalidArgument

__all__ = [
    "BATCH_MAX",
    "FENCE_MAX",
    "KEY_BYTES_MAX",
    "LIMIT_MAX",
    "TTL_SECONDS_MAX",
    "fingerprint",
    "idempotency_key",
    "show_keys",
    "shown",
    "valid_batch",
    "valid_callable",
    "valid_fence",
    "valid_instance",
    "valid_key",
    "valid_limit",
    "valid_sequence",
    "valid_text",
    "valid_ttl",
]

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)
C = TypeVar("C", bound=Callable[..., Any])

BATCH_MAX = 1000
HASH_CHARACTERS = 12
"""Most actions that one call takes."""
KEY_BYTES_MAX = 512
FENCE_MAX = 2**63 - 1
LIMIT_MAX = 100_000
TTL_SECONDS_MAX = 366 * 24 * 3600.0

_hashed = False
_IDEMPOTENCY_NAMESPACE = uuid.UUID("6f1c1f0e-0d1f-5b9f-9a3b-3d8f6a0c7e21")


def valid_key(value: object, argument: str) -> str:
    """Return ``value`` if it can be a key or a resource, else raise `InvalidArgument` naming ``argument`` (G24)."""
    text = valid_text(value, argument)
    size = len(text.encode())
    if not text or size > KEY_BYTES_MAX:
        raise InvalidArgument(f"{argument} must be 1 to {KEY_BYTES_MAX} bytes of UTF-8, not {size}")
    return text


def valid_text(value: object, argument: str) -> str:
    """Return ``value`` if PostgreSQL can store it as text, else raise `InvalidArgument`."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{argument} must be a str, not {type(value).__name__}")
    if "\0" in value:
        raise InvalidArgument(f"{argument} must not contain NUL")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{argument} must not contain lone surrogates") from None
    return value


def valid_ttl(value: object, argument: str = "ttl_seconds") -> float:
    """Return ``value`` in seconds, at least a millisecond and at most `TTL_SECONDS_MAX`, or raise `InvalidArgument`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidArgument(f"{argument} must be a number of seconds, not {type(value).__name__}")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not 0.001 <= seconds <= TTL_SECONDS_MAX:
        raise InvalidArgument(f"{argument} must be 0.001 to {TTL_SECONDS_MAX:.0f} seconds, not {seconds}")
    return seconds


def valid_fence(value: object, argument: str = "fence", *, fence_min: int = 1) -> int:
    """Return ``value`` if it can be a fence (1 to 2⁶³-1), else raise `InvalidArgument` (G34)."""
    return _valid_int(value, argument, fence_min, FENCE_MAX)


def valid_limit(value: object, argument: str = "limit") -> int:
    """Return ``value`` if it can be a batch size (1 to `LIMIT_MAX`), else raise `InvalidArgument`."""
    return _valid_int(value, argument, 1, LIMIT_MAX)


def _valid_int(value: object, argument: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(f"{argument} must be an int, not {type(value).__name__}")
    if not low <= value <= high:
        raise InvalidArgument(f"{argument} must be {low} to {high}")
    return value


def valid_instance(value: object, cls: type[T], argument: str) -> T:
    """Return ``value`` if it is a ``cls``, else raise `InvalidArgument`."""
    if not isinstance(value, cls):
        raise InvalidArgument(f"{argument} must be a {cls.__name__}, not {type(value).__name__}")
    return value


def valid_callable(value: C, argument: str) -> C:
    """Return ``value`` if it can be called, else raise `InvalidArgument`."""
    if not callable(value):
        raise InvalidArgument(f"{argument} must be callable, not {type(value).__name__}")
    return value


def valid_sequence(values: Sequence[T], argument: str) -> Sequence[T]:
    """Return ``values`` if they are a sequence, such as a list or a tuple, else raise `InvalidArgument`."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes | bytearray):
        raise InvalidArgument(f"{argument} must be a sequence, not {type(values).__name__}")
    return values


def valid_batch(values: Sequence[H], argument: str, length: int | None = None) -> Sequence[H]:
    """Return ``values`` if they are at most `BATCH_MAX`, distinct and ``length`` many, or raise `InvalidArgument`."""
    if len(values) > BATCH_MAX:
        raise InvalidArgument(f"{argument} must be at most {BATCH_MAX}, not {len(values)}")
    if length is not None and len(values) != length:
        raise InvalidArgument(f"{argument} must be {length}, one for each action, not {len(values)}")
    if len(set(values)) != len(values):
        raise InvalidArgument(f"{argument} must be distinct")
    return values


def fingerprint(request: object) -> str:
    """Return a digest that is equal for equal requests, whatever their key order or number spelling (G9).

    Raises `InvalidArgument` for values that have no stable text.
    """
    try:
        text = json.dumps(_canonical(request), sort_keys=True, ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"request has no fingerprint: {error}") from error
    return hashlib.sha256(text.encode()).hexdigest()


def _canonical(value: Any) -> Any:  # noqa: C901  a table of types
    match value:
        case None | bool() | str():
            return value
        case Enum():
            return _canonical(value.value)
        case int():
            return {"number": str(value)}
        case float() | Decimal():
            return {"number": _number_text(Decimal(str(value)))}
        case bytes():
            return {"bytes": value.hex()}
        case uuid.UUID():
            return str(value)
        case date() | time():
            return value.isoformat()
        case Mapping():
            items = sorted(value.items(), key=lambda item: str(item[0]))
            return {"map": [[_canonical(k), _canonical(v)] for k, v in items]}
        case set() | frozenset():
            return {"set": sorted((_canonical(item) for item in value), key=repr)}
        case list() | tuple():
            return [_canonical(item) for item in value]
        case _:
            raise TypeError(f"{type(value).__name__} is not supported")


def _number_text(number: Decimal) -> str:
    if not number.is_finite():
        raise ValueError("NaN and infinity are not supported")
    text = format(number, "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def show_keys(*, hashed: bool) -> None:
    """Let `shown` write whole keys, or their hashes, from now on in this process."""
    global _hashed  # noqa: PLW0603  messages are made far from where settings are read
    _hashed = hashed


def shown(key: str) -> str:
    """Return ``key`` as it is to stand in messages and logs: quoted, or its scope and a hash of the rest."""
    if not _hashed:
        return repr(key)
    scope, colon, _ = key.partition(":")
    return f"{scope if colon else ''}{colon}#{hashlib.sha256(key.encode()).hexdigest()[:HASH_CHARACTERS]}"


def idempotency_key(key: str) -> str:
    """Return the stable key to hand to an outside provider: the same for every attempt of ``key``."""
    return str(uuid.uuid5(_IDEMPOTENCY_NAMESPACE, valid_key(key, "key")))
