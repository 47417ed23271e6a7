"""An app that sends a task by name and cannot import it."""

from __future__ import annotations

import os

from celery import Celery

app = Celery("elsewhere", broker=os.environ["BROKER_URL"])
app.conf.beat_schedule = {
    "book": {"task": "tests.celery.shop.book", "schedule": 0.2, "args": (os.environ["ELSEWHERE_KEY"],)},
}
