"""Fenced tasks in a Django project (extra ``django``): `DjangoSink` lets ORM writes commit with their completion.

``INSTALLED_APPS = [..., "celery_integration.django"]`` adds a system check; the sink works without it.
"""

from celery_integration.django.sink import DjangoSink

__all__ = ["DjangoSink"]
