"""What is ordered, and in which order its messages are delivered: pure, the same for the same seed."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["TASKS", "Delivery", "Order", "deliveries", "place"]

TASKS = ("charge", "book")
ORDERS_PER_ACCOUNT = 4
SECOND_COPY_LATER_MAX = 0.1


@dataclass(frozen=True, slots=True)
class Order:
    """One purchase: to be charged once and booked once."""

    id: int
    account_id: int
    cents: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """One publication of a message. ``position`` is its place in the run, from 0 to 1."""

    position: float
    task: str
    order: Order
    message_id: str


def place(orders: int, seed: int) -> list[Order]:
    """Return ``orders`` orders that share accounts, so that some contend."""
    rng = random.Random(f"orders:{seed}")
    accounts = max(1, orders // ORDERS_PER_ACCOUNT)
    return [
        Order(number, rng.randrange(1, accounts + 1), rng.randrange(100, 20_000)) for number in range(1, orders + 1)
    ]


def deliveries(orders: Sequence[Order], seed: int) -> list[Delivery]:
    """Return every message twice under one message id, half of the second copies at once and half of them later."""
    rng = random.Random(f"deliveries:{seed}")
    copies = [copy for index, order in enumerate(orders) for copy in _copies(index / len(orders), order, rng)]
    return sorted(copies, key=lambda delivery: delivery.position)


def _copies(position: float, order: Order, rng: random.Random) -> Iterator[Delivery]:
    for task in TASKS:
        message_id = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        later = rng.choice((0.0, rng.uniform(0, SECOND_COPY_LATER_MAX)))
        yield Delivery(position, task, order, message_id)
        yield Delivery(min(1.0, position + later), task, order, message_id)
