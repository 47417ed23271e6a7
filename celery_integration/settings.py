"""The ``fenced_*`` settings of an app, read once into one frozen value."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from celery import Celery

from celery_integration.errors import ConfigurationError
from pgref.errors import InvalidArgument
from pgref.keys import valid_instance, valid_limit, valid_ttl

__all__ = ["Settings", "install"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Each field is the setting ``fenced_<field>`` of ``app.conf``.

    ``dsn`` can also come from the environment: from ``FENCED_DSN``, or from the file that ``FENCED_DSN_FILE`` names.
    """

    dsn: str
    """SQLAlchemy URL of the database that holds the gate (and the data of database effects)."""
    schema: str = "pgref"
    """Schema of pgref's own tables."""
    lease_seconds: float = 60.0
    """Lease of a task that names none. Renewed at a third of it while the body runs."""
    comeback_seconds_max: float = 5.0
    """A delivery that met another attempt comes back after that attempt's time left, but at the latest after this."""
    reconcile_seconds: float = 60.0
    """How long a reconciler may look into one key before another may; also the pause between its first two looks."""
    probe_seconds: float | None = None
    """After this time a probe is taken to have no answer. A third of ``reconcile_seconds`` if not set, which it must
    not exceed."""
    redispatch_seconds: float = 60.0
    """A dispatched key that no worker has taken up after this time is dispatched again."""
    sweep_seconds: float = 30.0
    """Period of ``fenced.sweep`` on beat, and how long one goes on while there is something to do."""
    sweep_batch_max: int = 500
    """Keys that a sweep expires, claims or dispatches at once."""
    dispatch_seconds: float = 5.0
    """Period of ``fenced.dispatch`` on beat, which sends what was accepted or is free and wanted."""
    renew_seconds: float | None = None
    """Period of ``fenced.renew`` on beat. A quarter of ``lease_seconds`` if not set; it cannot keep leases of less than
    twice its period."""
    retain_seconds: float = 3600.0
    """Period of ``fenced.retain`` on beat."""
    retention_seconds: float | None = None
    """How long an effect that is done is remembered; a copy of its message that comes later runs again. For ever if not
    set."""
    max_attempts: int = 100
    """A key that was granted so often runs no more and waits for a person, whose *not applied* allows as many again."""
    hash_keys: bool = False
    """Let messages and logs have a hash of each key, after its scope, in place of the key. That is short and tells the
    curious little; few possible keys can still be guessed from it."""
    result_bytes_max: int = 1024 * 1024
    """A larger serialised result is replaced by a marker; the effect stays done."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith(("_seconds", "_seconds_max")) and (value, field.default) != (None, None):
                valid_ttl(value, f"fenced_{field.name}")
        if self.probe_seconds is not None and self.probe_seconds > self.reconcile_seconds:
            raise InvalidArgument("fenced_probe_seconds must not exceed fenced_reconcile_seconds")
        valid_limit(self.sweep_batch_max, "fenced_sweep_batch_max")
        valid_limit(self.max_attempts, "fenced_max_attempts")
        valid_instance(self.hash_keys, bool, "fenced_hash_keys")
        if type(self.result_bytes_max) is not int or self.result_bytes_max < 1:
            raise InvalidArgument("fenced_result_bytes_max must be an int of at least 1")

    @property
    def renew_period_seconds(self) -> float:
        """Period of ``fenced.renew`` on beat."""
        return self.lease_seconds / 4 if self.renew_seconds is None else self.renew_seconds

    @property
    def probe_limit_seconds(self) -> float:
        """After this time a probe is taken to have no answer."""
        return self.reconcile_seconds / 3 if self.probe_seconds is None else self.probe_seconds

    @classmethod
    def of(cls, app: Celery) -> Settings:
        """Read the settings of ``app``. Raises `ConfigurationError` without a database and `InvalidArgument`."""
        given = {field.name: app.conf.get(f"fenced_{field.name}") for field in fields(cls)}
        given["dsn"] = given["dsn"] or os.environ.get("FENCED_DSN") or _dsn_from_file()
        if not given["dsn"]:
            raise ConfigurationError(
                "no database: call install(app, dsn=…), or set fenced_dsn, FENCED_DSN or FENCED_DSN_FILE"
            )
        return cls(**{name: value for name, value in given.items() if value is not None})


def _dsn_from_file() -> str | None:
    """Return what the file holds in which a container is given its secret."""
    path = os.environ.get("FENCED_DSN_FILE")
    if not path:
        return None
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"FENCED_DSN_FILE: {path} cannot be read: {type(error).__name__}") from error


def install(app: Celery, **settings: Any) -> None:
    """Set ``fenced_*`` settings on ``app``, by the names of `Settings` without the prefix, and check them.

    ``dsn`` may be left to ``app.conf.fenced_dsn``, or in the environment to ``FENCED_DSN`` or ``FENCED_DSN_FILE``.
    Connects to nothing. Raises `ConfigurationError` without a database and `InvalidArgument` for a bad value.
    """
    known = {field.name for field in fields(Settings)}
    for name, value in settings.items():
        if name not in known:
            raise InvalidArgument(f"install() has no setting {name!r}; known are {', '.join(sorted(known))}")
        app.conf[f"fenced_{name}"] = value
    Settings.of(app)
