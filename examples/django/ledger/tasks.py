"""The fenced task of the app."""

from celery_integration import Effect, fenced_task
from celery_integration.django import DjangoSink
from examples.django.ledger.models import Entry


@fenced_task(key="order:{order}", sink=DjangoSink())
def book(effect: Effect, order: str, cents: int) -> dict[str, int]:
    """Book an order: entry and completion are one commit, however often the message is delivered."""
    Entry.objects.create(order=order, cents=cents)
    return {"booked": cents, "attempt": effect.attempt}
