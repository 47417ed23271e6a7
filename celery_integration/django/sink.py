"""The sink of Django's own connection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from django.db import DEFAULT_DB_ALIAS, OperationalError, connections, transaction

from celery_integration.errors import ConfigurationError
from pgref.errors import Unavailable

__all__ = ["DjangoSink"]


@dataclass(frozen=True, slots=True)
class DjangoSink:
    """The transaction of ``connections[using]``, for ``fenced_task(sink=DjangoSink())``.

    What the body writes through the ORM, on that alias, commits together with the completion, or not at all. The alias
    must be a connection of psycopg 3 to the gate's database.
    """

    using: str = DEFAULT_DB_ALIAS

    @contextmanager
    def open(self) -> Iterator[psycopg.Connection[Any]]:
        """Begin, lend the psycopg connection, and commit at the end of the block; roll back if it raises.

        ``atomic`` blocks inside are savepoints. Functions given to ``transaction.on_commit`` run after the commit; what
        one of them raises is raised from here when everything is committed.

        Raises `ConfigurationError` inside another ``atomic`` block (that of ``ATOMIC_REQUESTS`` and of Django's
        ``TestCase`` too), without autocommit, on anything but psycopg 3, and above READ COMMITTED, where the renewal of
        the lease would make its own completion fail; `Unavailable` when the database is away; and Django's
        ``TransactionManagementError`` when something in the block asked for a rollback but raised nothing.
        """
        connection = connections[self.using]
        with ExitStack() as stack:
            try:
                self._prepare(connection)
                stack.enter_context(transaction.atomic(using=self.using, durable=True))
                self._demand_read_committed(connection)
            except OperationalError as error:
                raise Unavailable(f"Django's database {self.using!r} is away: {error}") from error
            yield connection.connection
            # Django would roll back without a word, and the effect would pass for done.
            connection.validate_no_broken_transaction()

    def _prepare(self, connection: Any) -> None:
        """Open the connection, anew if Django finds it broken or older than ``CONN_MAX_AGE``."""
        if connection.in_atomic_block:
            raise ConfigurationError(
                f"a transaction of Django's database {self.using!r} is open already, so the effect could not commit: "
                "call the task by transaction.on_commit(), and test it in a TransactionTestCase, not in a TestCase"
            )
        # Asked first, since the next step would throw away what somebody has left uncommitted.
        if not connection.get_autocommit():
            raise ConfigurationError(f"autocommit of Django's database {self.using!r} must be on when the task begins")
        connection.close_if_unusable_or_obsolete()
        connection.ensure_connection()
        if not isinstance(connection.connection, psycopg.Connection):
            raise ConfigurationError(f"Django's database {self.using!r} must be a PostgreSQL under psycopg 3")

    def _demand_read_committed(self, connection: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SHOW transaction_isolation")
            (level,) = cursor.fetchone()
        if level != "read committed":
            raise ConfigurationError(f"Django's database {self.using!r} must be READ COMMITTED, not {level.upper()}")
