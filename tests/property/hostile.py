"""Values that nobody should pass, and some that are only unusual: for each argument of each public function."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from random import Random
from typing import Any, NoReturn
from uuid import UUID

from pgref.contracts.effects import Action, Lease, Resolution, RetrySafety, State

__all__ = ["VALUES"]

DRAWN_OF_EACH_KIND = 15
MEGABYTE = 2**20
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


class Prickly:
    """Everything that one can ask of it fails."""

    def _refuse(self, *_: object) -> NoReturn:
        raise RuntimeError("do not touch")

    __eq__ = __hash__ = __str__ = __repr__ = __bool__ = __len__ = __iter__ = __float__ = _refuse


class Text(str):
    __slots__ = ()


class Number(IntEnum):
    ONE = 1


def _loop() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


_TEXTS = [
    *(
        "",
        " ",
        "a",
        "a b",
        "\0",
        "a\0b",
        "\ud800",
        "x\udfffx",
        "\U0001f600",
        "\N{COMBINING ACUTE ACCENT}",
        "\N{BYTE ORDER MARK}",
    ),
    *("x" * 512, "x" * 513, "é" * 256, "é" * 256 + "x", "\N{SNOWMAN}" * 171, "x" * 2 * MEGABYTE, "\0" * MEGABYTE),
    *(
        "'; DROP TABLE effect_action; --",
        '"',
        "'",
        "%s",
        "%(a)s",
        ":x",
        "\\",
        "$1",
        "{}",
        "NaN",
        "safe",
        "1",
        "NULL",
        "\r\n",
    ),
    Text("a subclass"),
]
_NUMBERS = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        1000,
        1001,
        100_001,
        2**31,
        2**63 - 1,
        2**63,
        2**64,
        -(2**63) - 1,
        10**400,
        Number.ONE,
    ),
    *(0.0, -0.0, 0.0005, 0.001, 5e-324, 1.5, -1.5, 1e308, 31_622_400.5, float("nan"), float("inf"), float("-inf")),
    *(Decimal(5), Decimal("NaN"), Decimal("sNaN"), Decimal("Infinity"), Fraction(1, 3), Fraction(10**400), 1j),
]
_OBJECTS = [
    *(
        b"",
        b"a",
        bytearray(b"a"),
        memoryview(b"a"),
        [],
        [1],
        (),
        (1, 2),
        (1, 2, 3),
        {},
        {"a": 1},
        set(),
        frozenset({1}),
    ),
    *(
        range(3),
        range(2000),
        [None] * 1001,
        ["a", "a"],
        _loop(),
        iter([]),
        (value for value in [0]),
        object(),
        object,
        Ellipsis,
        NotImplemented,
    ),
    *(UUID(int=0), UUID(int=2**128 - 1), str(UUID(int=1)), NOON, NOON.replace(tzinfo=None), NOON.date(), timedelta(1)),
    *(
        RetrySafety.SAFE,
        State.DONE,
        Action("a", "r"),
        Lease("r", 1, UUID(int=1), NOON),
        Resolution(applied=False),
        Prickly(),
    ),
]


def _drawn(random: Random) -> Iterator[Any]:
    for _ in range(DRAWN_OF_EACH_KIND):
        yield "".join(chr(random.randrange(0x110000)) for _ in range(random.randrange(1, 300)))
        yield "".join(chr(random.randrange(0x180)) for _ in range(random.randrange(1, 20)))
        yield random.getrandbits(random.randrange(1, 200)) * random.choice([1, -1])
        yield struct.unpack("d", random.randbytes(8))[0]


VALUES: list[Any] = [*_TEXTS, *_NUMBERS, *_OBJECTS, *_drawn(Random(20300101))]
