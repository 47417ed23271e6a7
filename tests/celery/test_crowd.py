"""Many keys, each delivered many times at once (FC-01, FC-44)."""

from __future__ import annotations

import os
import random
from collections import Counter
from types import ModuleType

import pytest
import sqlalchemy as sa

from pgref.postgres import Stores

KEYS = int(os.environ.get("PGREF_CROWD", "50"))
COPIES = 10


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("name", ["book", "jot"])
def test_every_caller_gets_the_result_of_one_effect(shop: ModuleType, key: str, gate: Stores, name: str) -> None:
    """G7: whatever a copy meets, it ends with the stored result. No delivery becomes more than one message."""
    deliveries = [f"{key}-{n}" for n in range(KEYS)] * COPIES
    random.Random(7).shuffle(deliveries)
    results = [getattr(shop, name).delay(one) for one in deliveries]
    assert [result.get(timeout=600) for result in results] == [{"attempt": 1}] * len(deliveries)
    with gate.engine.connect() as connection:
        entries = connection.execute(sa.select(shop.entry.c.key).where(shop.entry.c.key.startswith(key))).scalars()
        assert Counter(entries) == dict.fromkeys(deliveries, 1)
