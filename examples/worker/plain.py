"""The same two tasks as a careful user writes them on plain Celery.

Acked late, put back when the worker is lost, retried when the connection breaks, and each looks first whether its work
was done already. There is no idempotency key: typical code has none, since neither a redelivery nor a second message
carries anything stable that the user did not design, store and clean up.
"""

from __future__ import annotations

from typing import Any

from celery import Celery
from sqlalchemy import create_engine, select
from sqlalchemy.orm import Session

from examples.worker import gateway
from examples.worker.settings import Settings, celery_settings
from examples.worker.supervised import supervise
from examples.worker.tables import PlainCharge, PlainEntry

settings = Settings.from_environment()
app = Celery("plain", broker=settings.broker_url)
app.conf.update(celery_settings("plain"))
supervise()
# Made before the fork so that no pool process has to import the driver; connects only after it.
engine = create_engine(settings.dsn, pool_size=1, pool_pre_ping=True)

_RELIABLY: dict[str, Any] = {
    "acks_late": True,
    "reject_on_worker_lost": True,
    "autoretry_for": gateway.CONNECTION_ERRORS,
    "default_retry_delay": 1,
    "max_retries": 10,
}


@app.task(name="plain.charge", **_RELIABLY)
def charge(order_id: int, account_id: int, cents: int) -> None:
    with Session(engine) as session:
        if session.scalar(select(PlainCharge.id).where(PlainCharge.order_id == order_id)):
            return
    receipt = gateway.charge(settings.processor_url, order_id, cents)
    with Session(engine) as session:
        session.add(PlainCharge(order_id=order_id, charge_id=receipt["id"]))
        session.commit()


@app.task(name="plain.book", **_RELIABLY)
def book(order_id: int, account_id: int, cents: int) -> None:
    with Session(engine) as session:
        if session.scalar(select(PlainEntry.id).where(PlainEntry.order_id == order_id)):
            return
        session.add(PlainEntry(order_id=order_id, account_id=account_id, cents=cents))
        session.commit()
