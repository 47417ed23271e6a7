"""What is booked."""

from django.db import models


class Entry(models.Model):  # type: ignore[misc]  # Django is not typed
    """One booking. Nothing is unique here but its own number: a second booking of an order would show."""

    order = models.CharField(max_length=100)
    cents = models.IntegerField()

    def __str__(self) -> str:
        return f"{self.order}: {self.cents}"
