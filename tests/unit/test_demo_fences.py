"""The demo's card processor as one that compares fences and can be sealed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.worker import gateway, processor
from examples.worker.processor import BadRequest, ChargeRequest, Ledger, StaleFence, read_charges

STUCK_SECONDS = 30.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "charges.jsonl"


@pytest.fixture
def ledger(file: Path) -> Ledger:
    return Ledger(file, "fences")


def request(order: int, fence: int | None, resource: str = "account:1") -> ChargeRequest:
    return ChargeRequest(order, 300, idempotency_key="k", resource=resource, fence=fence)


def orders(file: Path) -> list[int]:
    return [charge.order for charge in read_charges(file)]


def test_a_lower_fence_is_refused(ledger: Ledger, file: Path) -> None:
    ledger.apply(request(1, 5))
    with pytest.raises(StaleFence):
        ledger.apply(request(2, 4))
    assert orders(file) == [1]


def test_equal_and_higher_fences_pass(ledger: Ledger, file: Path) -> None:
    """Keys are not honoured: only the fence keeps a second charge out."""
    for order, fence in ((1, 5), (2, 5), (3, 6)):
        ledger.apply(request(order, fence))
    assert orders(file) == [1, 2, 3]


def test_accounts_are_independent(ledger: Ledger, file: Path) -> None:
    ledger.apply(request(1, 5))
    ledger.apply(request(2, 1, "account:2"))
    assert orders(file) == [1, 2]


def test_a_seal_refuses_what_comes_after_it(ledger: Ledger, file: Path) -> None:
    ledger.seal("account:1", 5)
    with pytest.raises(StaleFence):
        ledger.apply(request(1, 4))
    with pytest.raises(StaleFence):
        ledger.seal("account:1", 4)
    ledger.apply(request(2, 5))
    assert orders(file) == [2]


def test_plain_celery_has_no_fence(ledger: Ledger, file: Path) -> None:
    ledger.seal("account:1", 5)
    ledger.apply(ChargeRequest(1, 300))
    assert orders(file) == [1]


@pytest.mark.parametrize("provider", ["keys", "none"])
def test_other_providers_compare_nothing(file: Path, provider: processor.Provider) -> None:
    ledger = Ledger(file, provider)
    ledger.seal("account:1", 5)
    ledger.apply(request(1, 4))
    assert orders(file) == [1]


@pytest.mark.parametrize("fields", ['"fence": 1', '"fence": 0, "resource": "a"', '"fence": "1", "resource": "a"'])
def test_fence_that_is_none(fields: str) -> None:
    with pytest.raises(BadRequest):
        ChargeRequest.from_json(f'{{"order": 1, "cents": 300, {fields}}}'.encode())


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Requests, once in, set the first event, and wait for the second before they are applied."""
    arrived, released = threading.Event(), threading.Event()

    def hold(_seconds: float) -> None:
        arrived.set()
        assert released.wait(STUCK_SECONDS)

    monkeypatch.setattr(processor, "time", SimpleNamespace(sleep=hold))
    monkeypatch.setattr(processor, "fate", lambda *_: processor.Fate(1.0, 0.0, "answered"))
    yield arrived, released
    released.set()


def test_a_charge_on_its_way_is_caught_by_the_seal(
    ledger: Ledger, file: Path, held: tuple[threading.Event, threading.Event]
) -> None:
    """Seal, then look: the fence is compared when the charge is applied, not when it came in."""
    arrived, released = held
    with ExitStack() as stack:
        server = stack.enter_context(processor._Server(ledger, seed=1))
        pool = stack.enter_context(ThreadPoolExecutor(2))
        pool.submit(server.serve_forever)
        stack.callback(server.shutdown)
        stack.callback(released.set)
        url = f"http://127.0.0.1:{server.server_port}"
        charging = pool.submit(gateway.charge, url, 1, 300, resource="account:1", fence=1)
        assert arrived.wait(STUCK_SECONDS)
        gateway.seal(url, "account:1", 2)
        assert gateway.find(url, order=1) is None
        released.set()
        with pytest.raises(gateway.StaleFence):
            charging.result()
    assert orders(file) == []
