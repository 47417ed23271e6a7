"""The example's task, called, sent and run by a worker; and what Django's transactions mean for sending."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from celery import Celery
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse
from django.urls import path

from celery_integration import ConfigurationError
from celery_integration.process import Gate
from celery_integration.sweep import sweep
from pgref.contracts.effects import State
from tests.django.acts import Entries

Sent = Callable[[], int]


def state(gate: Gate, order: str) -> State | None:
    from examples.django.ledger.tasks import book

    record = gate.effects.lookup(f"{book.name}:order:{order}")
    return None if record is None else record.state


def test_the_example_books_once(key: str, entries: Entries) -> None:
    from examples.django.ledger.tasks import book

    assert book(key, 5) == book(key, 5) == {"booked": 5, "attempt": 1}
    assert entries(key) == [5]


@pytest.fixture
def eager(app: Celery) -> Iterator[None]:
    app.conf.task_always_eager = True
    yield
    app.conf.task_always_eager = False


@pytest.mark.usefixtures("eager")
def test_the_example_books_once_eagerly(key: str, entries: Entries) -> None:
    """FC-23."""
    from examples.django.ledger.tasks import book

    assert [book.delay(key, 5).get() for _ in range(2)] == [{"booked": 5, "attempt": 1}] * 2
    assert entries(key) == [5]


def test_what_is_rolled_back_is_not_sent(key: str, sent: Sent) -> None:
    """FC-30 (a)."""
    from examples.django.ledger.tasks import book

    with transaction.atomic():
        transaction.on_commit(lambda: book.delay(key, 5))
        transaction.set_rollback(True)
    assert sent() == 0


def test_what_is_committed_is_sent(key: str, sent: Sent) -> None:
    """FC-30 (c): not before the commit, so that no worker begins too early."""
    from examples.django.ledger.tasks import book

    with transaction.atomic():
        transaction.on_commit(lambda: book.delay(key, 5))
        assert sent() == 0
    assert sent() == 1


def test_an_accepted_effect_needs_no_broker_at_the_commit(
    app: Celery, gate: Gate, key: str, sent: Sent, entries: Entries
) -> None:
    """FC-30 (b): the intent is a row in Django's transaction; the sweep sends the message."""
    from examples.django.ledger.tasks import book

    with transaction.atomic():
        book.accept(connections["default"].connection, key, 5)
        assert state(gate, key) is None
    assert (state(gate, key), sent()) == (State.FREE, 0)
    sweep(app)
    assert sent() == 1
    assert book(key, 5)["booked"] == 5
    assert entries(key) == [5]


def test_an_accepted_effect_goes_with_the_rollback(app: Celery, gate: Gate, key: str, sent: Sent) -> None:
    """FC-30 (a)."""
    from examples.django.ledger.tasks import book

    with transaction.atomic():
        book.accept(connections["default"].connection, key, 5)
        transaction.set_rollback(True)
    sweep(app)
    assert (state(gate, key), sent()) == (None, 0)


def _view(request: HttpRequest) -> HttpResponse:
    from examples.django.ledger.tasks import book

    key, how = request.GET["key"], request.GET["how"]
    if how == "call":
        book(key, 5)
    transaction.on_commit(lambda: book.delay(key, 5))
    if how == "fail":
        raise ValueError("failed")
    return HttpResponse()


urlpatterns = [path("", _view)]


@pytest.fixture
def get(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], int]]:
    from django.test import Client, override_settings

    monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", True)
    with override_settings(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["testserver"]):
        yield lambda key, how: Client().get("/", {"key": key, "how": how}).status_code


def test_a_request_sends_when_it_has_committed(key: str, sent: Sent, get: Callable[[str, str], int]) -> None:
    assert get(key, "return") == 200
    assert sent() == 1


def test_a_failed_request_sends_nothing(key: str, sent: Sent, get: Callable[[str, str], int]) -> None:
    with pytest.raises(ValueError, match="failed"):
        get(key, "fail")
    assert sent() == 0


def test_a_request_cannot_run_the_task_itself(key: str, entries: Entries, get: Callable[[str, str], int]) -> None:
    with pytest.raises(ConfigurationError, match="on_commit"):
        get(key, "call")
    assert entries(key) == []
