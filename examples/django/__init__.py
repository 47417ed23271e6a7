"""A Django project whose ORM writes commit together with the completion of their task."""

from examples.django.celery import app

__all__ = ["app"]
