"""The Django app that brings the system check."""

from django.apps import AppConfig
from django.core.checks import register

from celery_integration.django.checks import check_databases

__all__ = ["FencedTasks"]


class FencedTasks(AppConfig):  # type: ignore[misc]  # Django is not typed
    """No models, one check: `check_databases`."""

    name = "celery_integration.django"
    label = "fenced"

    def ready(self) -> None:
        register(check_databases, "fenced")
