"""Two stores that must not be told apart: each question goes to both, and their answers are compared."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from pgref.contracts.effects import EffectStore
from pgref.errors import PgrefError

__all__ = ["Pair", "Raised", "comparable"]

_UNORDERED = {"claim_backlog", "claim_due", "evidence", "tallies"}


class Raised(tuple[type[PgrefError], tuple[tuple[str, Any], ...]]):
    """An error as callers may tell it: its class and the attributes that the class documents."""

    __slots__ = ()


def comparable(error: PgrefError) -> Raised:
    """Return what is promised of ``error``; its text is not."""
    names = {name for cls in type(error).__mro__ for name in inspect.get_annotations(cls)}
    return Raised((type(error), tuple((name, getattr(error, name)) for name in sorted(names))))


class Pair:
    """The model and the subject."""

    def __init__(self, model: EffectStore, subject: EffectStore) -> None:
        self.model = model
        self.subject = subject

    def ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Return the one answer of both stores, a `Raised` if they refuse."""
        expected = _answer(self.model, method, arguments, options)
        found = _answer(self.subject, method, arguments, options)
        assert found == expected, f"{method}{arguments}{options}: {found} is not the model's {expected}"
        return expected

    def compare(self, keys: Iterable[str]) -> None:
        """Check that all that can be seen of ``keys`` is the same."""
        for key in keys:
            for method in ("lookup", "history", "evidence"):
                self.ask(method, key)
        self.ask("backlog", 1000)
        self.ask("tallies")


def _answer(store: EffectStore, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    try:
        answer = getattr(store, method)(*arguments, **options)
    except PgrefError as error:
        return comparable(error)
    if isinstance(answer, list):
        answer = [comparable(item) if isinstance(item, PgrefError) else item for item in answer]
        return sorted(answer, key=repr) if method in _UNORDERED else answer
    return answer
