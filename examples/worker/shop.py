"""The shop: two fenced tasks, one effect outside of PostgreSQL and one inside.

Run it by hand with BROKER_URL, FENCED_DSN and PROCESSOR_URL set, beat besides:
`celery -A examples.worker.shop worker -B -Q shop,upkeep`
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from celery import Celery
from sqlalchemy import insert

from celery_integration import Applied, Effect, NotApplied, fenced_task, install, schedule
from examples.worker import gateway
from examples.worker.settings import Settings, celery_settings
from examples.worker.supervised import supervise
from examples.worker.tables import Entry

LEASE_SECONDS = 3.0

settings = Settings.from_environment()
app = Celery("shop", broker=settings.broker_url)
app.conf.update(celery_settings("shop"))
app.conf.task_routes = {"fenced.*": {"queue": "upkeep"}}
# Everything is quicker than it would be in a real shop: here a worker dies every second.
install(app, dsn=settings.dsn, sweep_seconds=1, reconcile_seconds=3, probe_seconds=2, redispatch_seconds=6)
schedule(app)
supervise()

_HONOURS_KEYS = settings.provider == "keys"
_COMPARES_FENCES = settings.provider == "fences"


@fenced_task(
    name="shop.charge",
    key="order:{order_id}",
    resource="account:{account_id}",
    sink="external",
    # Safe: the processor itself drops a second charge, also one that is still on its way: one with our key, or, once
    # the probe has sealed the account, one with a lower fence than the seal's.
    retry_safety="safe" if _HONOURS_KEYS or _COMPARES_FENCES else "unsafe",
    lease_seconds=LEASE_SECONDS,
    not_applied=(gateway.StaleFence,),
)
def charge(effect: Effect, order_id: int, account_id: int, cents: int) -> dict[str, Any]:
    receipt = gateway.charge(
        settings.processor_url,
        order_id,
        cents,
        idempotency_key=effect.idempotency_key,
        resource=effect.resource,
        fence=effect.fence,
    )
    return {"charge": receipt["id"]}


@charge.probe
def charge_probe(effect: Effect, order_id: int, account_id: int, cents: int) -> Applied | NotApplied:
    if _COMPARES_FENCES:
        # Refused, it is sealed already, and higher.
        with suppress(gateway.StaleFence):
            gateway.seal(settings.processor_url, effect.resource, effect.fence)
    if _HONOURS_KEYS:
        found = gateway.find(settings.processor_url, idempotency_key=effect.idempotency_key)
    else:
        found = gateway.find(settings.processor_url, order=order_id)
    return Applied({"charge": found["id"]}) if found else NotApplied()


@fenced_task(name="shop.book", key="order:{order_id}", resource="account:{account_id}", lease_seconds=LEASE_SECONDS)
def book(effect: Effect, order_id: int, account_id: int, cents: int) -> dict[str, Any]:
    effect.session.execute(insert(Entry).values(order_id=order_id, account_id=account_id, cents=cents))
    return {"booked": cents}
