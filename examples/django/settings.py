"""Settings of the project, from the environment: DATABASE_URL and BROKER_URL."""

import os

from sqlalchemy import make_url

_database = make_url(os.environ["DATABASE_URL"])

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": _database.host,
        "PORT": _database.port,
        "NAME": _database.database,
        "USER": _database.username,
        "PASSWORD": _database.password,
        "CONN_MAX_AGE": 600,
        "CONN_HEALTH_CHECKS": True,
    }
}
INSTALLED_APPS = ["celery_integration.django", "examples.django.ledger"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
SECRET_KEY = "an example needs none"  # noqa: S105
USE_TZ = True
TIME_ZONE = "UTC"

CELERY_BROKER_URL = os.environ["BROKER_URL"]
CELERY_RESULT_BACKEND = os.environ["BROKER_URL"]
# The gate lies in the database that the bodies write to: that is what lets them commit together.
CELERY_FENCED_DSN = os.environ["DATABASE_URL"]
