"""The Celery app of the project. Its settings are Django's, under the prefix ``CELERY_``."""

from typing import Any

from celery import Celery

from celery_integration import schedule

app = Celery("django_example")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()


@app.on_after_configure.connect
def add_sweep(sender: Celery, **_: Any) -> None:
    """Add ``fenced.sweep`` to beat, not before Django's settings are read: that is too early here."""
    schedule(sender)
