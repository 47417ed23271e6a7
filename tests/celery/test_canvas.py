"""Signatures of fenced tasks in every arrangement that Celery has (FC-26, FC-28)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from celery import chain, chord, group

from pgref.contracts.effects import Granted
from pgref.postgres import Stores

pytestmark = pytest.mark.usefixtures("worker")

Entries = Callable[[str], list[int]]
WAIT: dict[str, Any] = {"timeout": 60}
ONCE = {"attempt": 1}


def test_a_chain_runs_to_its_end(shop: ModuleType, key: str, entries: Entries) -> None:
    result = chain(shop.book.si(key), shop.note.s(key), shop.note.s(key)).delay().get(**WAIT)
    assert (result, entries(key), shop.outside(key)) == (ONCE, [5], ["next", "next"])


def test_a_chain_of_fenced_tasks(shop: ModuleType, key: str, entries: Entries) -> None:
    steps = [shop.book.si(f"{key}-{n}") for n in range(3)]
    assert chain(*steps).delay().get(**WAIT) == ONCE
    assert [entries(f"{key}-{n}") for n in range(3)] == [[5]] * 3


def test_a_whole_chain_that_is_sent_twice_takes_effect_once(shop: ModuleType, key: str, entries: Entries) -> None:
    """FC-26: each copy goes on to its end, and what is fenced happens once."""
    for _ in range(2):
        assert chain(shop.book.si(key), shop.jot.si(key), shop.note.s(key)).delay().get(**WAIT) == ONCE
    assert (sorted(entries(key)), shop.outside(key)) == ([1, 5], ["next", "next"])


def test_a_group_has_the_result_of_each(shop: ModuleType, key: str, entries: Entries) -> None:
    result = group(shop.book.s(f"{key}-{n % 3}") for n in range(6)).delay()
    assert result.get(**WAIT) == [ONCE] * 6
    assert [entries(f"{key}-{n}") for n in range(3)] == [[5]] * 3


def test_a_chord_calls_back_once(shop: ModuleType, key: str, entries: Entries) -> None:
    header = [shop.book.s(f"{key}-{n}") for n in range(4)]
    assert chord(header)(shop.note.s(key)).get(**WAIT) == [ONCE] * 4
    assert shop.outside(key) == ["next"]


def test_a_chord_whose_member_has_to_come_back(shop: ModuleType, key: str, entries: Entries, gate: Stores) -> None:
    """A delivery that met another attempt keeps its place in the chord."""
    definition = shop.book.definition
    busy = definition.action(shop.book.name, definition.arguments((f"{key}-0",), {}), "other")
    granted = gate.effects.acquire(busy, 60)
    assert isinstance(granted, Granted)
    result = chord([shop.book.s(f"{key}-{n}") for n in range(3)])(shop.note.s(key))
    while not entries(f"{key}-2"):
        pass
    gate.effects.abandon(busy, granted.lease)
    assert result.get(**WAIT) == [{"attempt": 2}, ONCE, ONCE]
    assert shop.outside(key) == ["next"]


def test_a_chord_body_can_be_fenced(shop: ModuleType, key: str, entries: Entries) -> None:
    assert chord([shop.ping.s() for _ in range(2)])(shop.book.si(key)).get(**WAIT) == ONCE
    assert entries(key) == [5]


@pytest.mark.parametrize("how", ["map", "starmap", "chunks"])
def test_items_of_one_message_are_effects_of_their_own(shop: ModuleType, key: str, entries: Entries, how: str) -> None:
    """FC-28: a key each; what is asked for twice is done once."""
    keys = [f"{key}-{n % 3}" for n in range(5)]
    match how:
        case "map":
            result = shop.book.map(keys).delay().get(**WAIT)
        case "starmap":
            result = shop.book.starmap(zip(keys)).delay().get(**WAIT)
        case _:
            chunks = shop.book.chunks(zip(keys), 2).apply_async().get(**WAIT)
            result = [item for chunk in chunks for item in chunk]
    assert result == [ONCE] * 5
    assert [entries(f"{key}-{n}") for n in range(3)] == [[5]] * 3


def test_an_item_that_fails_redoes_no_other(shop: ModuleType, key: str, entries: Entries) -> None:
    """FC-28: the message is sent again; items that are done are not."""
    items = [[f"{key}-0", "return"], [f"{key}-1", "error"], [f"{key}-2", "return"]]
    for _ in range(2):
        with pytest.raises(ValueError, match="the body failed"):
            shop.book.starmap(items).delay().get(**WAIT)
    assert [entries(f"{key}-{n}") for n in range(3)] == [[5], [], []]


def test_links_are_followed(shop: ModuleType, key: str, entries: Entries) -> None:
    shop.book.apply_async((key,), link=shop.note.s(key)).get(**WAIT)
    while shop.outside(key) != ["next"]:
        pass
    assert entries(key) == [5]


def test_links_of_errors_are_followed_once(shop: ModuleType, key: str, entries: Entries) -> None:
    result = shop.book.apply_async((key, "error"), link_error=shop.note.si(None, key))
    with pytest.raises(ValueError, match="the body failed"):
        result.get(**WAIT)
    while shop.outside(key) != ["next"]:
        pass
    assert entries(key) == []


def test_a_retried_task_keeps_its_links(shop: ModuleType, key: str, entries: Entries) -> None:
    """FC-17: three runs, one effect, and the chain goes on."""
    assert chain(shop.book.s(key, "retry"), shop.note.s(key)).delay().get(**WAIT) == {"attempt": 3}
    assert (entries(key), shop.outside(key)) == ([5], ["next"])


def test_signatures_can_be_partial_cloned_and_immutable(shop: ModuleType, key: str, entries: Entries) -> None:
    partial = shop.book.s(cents=7)
    assert partial.clone((key,)).delay().get(**WAIT) == ONCE
    assert shop.book.s(key).clone(kwargs={"cents": 7}).delay().get(**WAIT) == ONCE
    assert shop.book.si(key, cents=7).set(countdown=0).delay().get(**WAIT) == ONCE
    assert entries(key) == [7]


def test_a_task_can_be_replaced_by_a_fenced_one(shop: ModuleType, key: str, entries: Entries) -> None:
    assert chain(shop.stand_in.s(key), shop.note.s(key)).delay().get(**WAIT) == ONCE
    assert (entries(key), shop.outside(key)) == ([5], ["next"])
