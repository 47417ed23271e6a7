"""What a body gets as its first argument, and what it or its probe can say about the outside world."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

import psycopg
import sqlalchemy as sa
from sqlalchemy.orm import Session

from celery_integration.errors import ConfigurationError
from pgref.keys import idempotency_key, shown

if TYPE_CHECKING:
    from celery import Task

    from celery_integration.leases import HeldLease
    from pgref.contracts.effects import Action

__all__ = ["Applied", "Effect", "NotApplied", "RetryLater", "Unknown", "refuse_to_end"]

_BODY = "fenced_body"


@dataclass(frozen=True, slots=True)
class Applied:
    """A probe's answer: it happened, and this is the result that the task returns."""

    result: Any = None


class NotApplied(Exception):
    """A probe's answer, or raised by an external body: it did not happen.

    ``force=True`` is the user's own word that nothing sent earlier can still arrive; it frees an unsafe key too.
    """

    def __init__(self, why: str = "", *, force: bool = False) -> None:
        super().__init__(why)
        self.force = force

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, {"force": self.force}


@dataclass(frozen=True, slots=True)
class Unknown:
    """A probe's answer: it cannot tell now; ask again later."""

    why: str = ""


class RetryLater(Exception):
    """`Effect.retry` on its way out of the body: the retry is published after the attempt is withdrawn."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options


class Effect:
    """One attempt at a side effect, or the probe's view of it."""

    def __init__(
        self,
        task: Task[Any, Any],
        action: Action,
        *,
        fence: int,
        attempt: int,
        held: HeldLease | None = None,
        late_results: Callable[[], list[Any]] = list,
    ) -> None:
        self.task = task
        """The Celery task: ``effect.task.request`` and all that ``bind=True`` would give. A probe has no request."""
        self.key = action.key
        """The key with its scope, as the store knows it."""
        self.resource = action.resource
        self.fence = fence
        """The fencing token to hand to a sink that compares. In a probe, the fence to seal the sink with."""
        self.attempt = attempt
        """How many times this key has been granted, this attempt included."""
        self.late_results = late_results
        """In a probe: call it for the results of attempts that ended well, but too late to be recorded (G17)."""
        self.started = False
        """True once `ensure_held` was called: from then on something may have gone out."""
        self._held = held
        self._connection: Any = None
        self._opened: Callable[[], sa.Connection] | None = None
        self._closing = ExitStack()
        self._session: Session | None = None

    @property
    def idempotency_key(self) -> str:
        """The key to hand to a provider that de-duplicates: the same for every attempt of this effect."""
        return idempotency_key(self.key)

    @property
    def deadline(self) -> datetime | None:
        """When the lease ends unless it is renewed, on the store's clock. None where there is no lease to lose."""
        return None if self._held is None else self._held.lease.expires_at

    @property
    def sink(self) -> Any:
        """What the task's own sink lends the body to write with: for a ``RedisSink`` its `Recorder`.

        Raises `ConfigurationError` while nothing is lent.
        """
        if self._connection is None:
            raise ConfigurationError(f"{shown(self.key)} is an external effect: no transaction is open during its body")
        return self._connection

    @property
    def connection(self) -> sa.Connection:
        """The SQLAlchemy connection whose transaction commits together with the completion.

        Raises `ConfigurationError` in an external effect outside `transaction`, and for a sink that has none.
        """
        if not isinstance(self.sink, sa.Connection):
            raise ConfigurationError(f"the sink of {shown(self.key)} lends no SQLAlchemy connection: take effect.sink")
        return self._connection  # type: ignore[no-any-return]

    @property
    def session(self) -> Session:
        """An ORM session on `connection`, flushed for you. Its ``commit`` ends a savepoint, not the transaction."""
        if self._session is None:
            session = Session(self.connection, join_transaction_mode="create_savepoint")
            self._session = self._closing.enter_context(session)
        return self._session

    @property
    def cursor(self) -> Any:
        """A psycopg cursor in the same transaction."""
        driver: Any = self.sink if isinstance(self.sink, psycopg.Connection) else self.connection.connection
        cursor: Any = driver.cursor()
        return self._closing.enter_context(cursor)

    def ensure_held(self, margin_seconds: float = 0.0) -> None:
        """Call right before something goes out: raises `LeaseLost` unless the lease holds for ``margin_seconds`` more.

        Asks the store, on the store's clock, and renews the lease on the way.
        """
        if self._held is not None:
            self._held.ensure(margin_seconds)
        self.started = True

    def renew(self) -> None:
        """Renew the lease now. It is renewed for you while the body runs, unless the body holds the interpreter.

        Raises `LeaseLost`, or `Unavailable`.
        """
        if self._held is not None:
            self._held.ensure(0.0)

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """Write down, from an external body, what shall commit with the completion, or not at all.

            charged = gateway.charge(cents, idempotency_key=effect.idempotency_key)
            with effect.transaction():
                effect.session.add(Receipt(charged.id))
            return charged.id

        The transaction stays open until the body has ended: open it when the outside call is over. Raises
        `ConfigurationError` in a body that has a transaction of its own.
        """
        if self._opened is None:
            raise ConfigurationError(f"the body of {shown(self.key)} has its transaction: take effect.session")
        connection = self._opened()
        self.bind(connection)
        try:
            yield connection
            self.flush()
        finally:
            self.unbind()

    def retry(self, **options: Any) -> NoReturn:
        """End this attempt and let Celery retry the task; ``options`` are those of ``Task.retry``.

        The retry is published after the attempt has been withdrawn, so it does not meet its own lease.
        """
        raise RetryLater(options)

    def opens(self, opened: Callable[[], sa.Connection] | None) -> None:
        """Say how `transaction` gets its connection."""
        self._opened = opened

    def bind(self, connection: Any) -> None:
        """Give the body the open transaction, or what its sink lends. The body cannot end a transaction."""
        self._connection = connection
        if isinstance(connection, sa.Connection):
            connection.info[_BODY] = self.key
        elif isinstance(connection, psycopg.Connection):
            vars(connection).update(commit=self._refuse_to_end, rollback=self._refuse_to_end)

    def flush(self) -> None:
        """Write out what the session still holds, and close what the body opened."""
        session, self._session = self._session, None
        if session is not None:
            session.commit()
        self._closing.close()

    def unbind(self) -> None:
        """Take the transaction back."""
        connection, self._connection = self._connection, None
        if isinstance(connection, sa.Connection):
            connection.info.pop(_BODY, None)
        elif isinstance(connection, psycopg.Connection):
            del connection.commit, connection.rollback

    def _refuse_to_end(self) -> NoReturn:
        raise _refusal(self.key)


def refuse_to_end(connection: sa.Connection) -> None:
    """Raise `ConfigurationError` if the transaction that is about to end is that of a body which runs."""
    if connection.invalidated:
        return  # the transaction has ended with its connection
    key = connection.info.get(_BODY)
    if key is not None:
        raise _refusal(key)


def _refusal(key: str) -> ConfigurationError:
    return ConfigurationError(
        f"the body of {shown(key)} must not end the transaction: it commits with the completion; "
        "use a savepoint (connection.begin_nested()) for a part that may fail"
    )
