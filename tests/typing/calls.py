"""Calls that a type checker must accept, and those, marked ``# wrong``, that it must refuse. Never run."""

from __future__ import annotations

from typing import assert_type

from celery.canvas import Signature
from sqlalchemy.orm import Session

from celery_integration import Applied, Effect, NotApplied, fenced_task


@fenced_task
def bare(effect: Effect, order_id: int) -> str:
    return str(order_id)


@fenced_task(key="order:{order_id}", sink="external", retry_safety="safe", max_retries=3)
def charge(effect: Effect, order_id: int, *, cents: int = 100) -> dict[str, int]:
    return {"cents": cents}


@charge.probe
def charge_probe(effect: Effect, order_id: int, *, cents: int = 100) -> Applied | NotApplied:
    return Applied({"cents": cents})


def callers(session: Session) -> None:
    assert_type(bare(1), str)
    assert_type(charge(1, cents=5), dict[str, int])
    assert_type(bare.delay(1).get(), str)
    assert_type(charge.delay(order_id=1, cents=5).get(timeout=3), dict[str, int])
    assert_type(charge.apply_async((1,), {"cents": 5}, countdown=3).get(), dict[str, int])
    assert_type(charge.accept(session, 1, cents=5), str)
    signature: Signature[dict[str, int]] = charge.s(1, cents=5)
    signature.delay()
    bare("1")  # wrong
    bare()  # wrong
    bare(1, 2)  # wrong
    charge(1, 5)  # wrong
    charge(1, cents="5")  # wrong
    bare.delay("1")  # wrong
    charge.delay(order=1)  # wrong
    charge.accept(session)  # wrong
    charge.accept("session", 1)  # wrong
    _length: int = bare.delay(1).get()  # wrong


@fenced_task  # wrong
def without_effect() -> None: ...


@fenced_task(sink="paper")  # wrong
def another_sink(effect: Effect) -> None: ...


@fenced_task(retry_safety="perhaps")  # wrong
def another_safety(effect: Effect) -> None: ...


@fenced_task(single_commit="yes")  # wrong
def another_type(effect: Effect) -> None: ...


@charge.probe  # wrong
def other_arguments(effect: Effect, order: str) -> Applied:
    return Applied()
