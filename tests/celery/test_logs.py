"""What the logs say of a delivery, and what they never say."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sqlalchemy as sa

from celery_integration import EffectUncertain
from pgref.errors import FingerprintMismatch
from pgref.keys import show_keys, shown
from tests.plugins.workers import ROOT

WAIT: dict[str, Any] = {"timeout": 60}
SECRET = "canary-password"


@contextmanager
def worker(queue: str, log: Path, environment: dict[str, str]) -> Iterator[None]:
    """Run a worker for a queue of its own, that hashes keys and has a password."""
    options = ["--pool", "prefork", "-c", "1", "-l", "INFO", "-Q", queue, "--without-gossip", "--without-mingle"]
    command = [sys.executable, "-m", "celery", "-A", "tests.celery.shop", "worker", "-n", f"{queue}@%h", *options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment, "SHOP_HASHES_KEYS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def hashed() -> Iterator[None]:
    show_keys(hashed=True)
    yield
    show_keys(hashed=False)


def with_password(dsn: str, **parts: Any) -> str:
    return sa.make_url(dsn).set(password=SECRET, **parts).render_as_string(hide_password=False)


@pytest.mark.usefixtures("hashed")
def test_neither_keys_nor_passwords_are_logged(
    shop: ModuleType, key: str, shop_environment: dict[str, str], tmp_path: Path
) -> None:
    """Whatever comes of a delivery: done, replayed, failed, refused, in doubt, its process killed."""
    canary, log = f"canary-key-{key}", tmp_path / "worker.log"
    sent: dict[str, Any] = {"queue": "canary"}
    environment = {**shop_environment, "FENCED_DSN": with_password(shop_environment["FENCED_DSN"])}
    with worker("canary", log, environment):
        for _ in range(2):
            shop.book.apply_async((canary,), **sent).get(**WAIT)
        shop.charge.apply_async((f"{canary}-killed", "kill"), **sent).get(**WAIT)
        refused: list[tuple[Any, tuple[str, ...], type[Exception]]] = [
            (shop.book, (canary, "other"), FingerprintMismatch),
            (shop.book, (f"{canary}-failed", "error"), ValueError),
            (shop.letter, (f"{canary}-doubt", "error"), ValueError),
            (shop.letter, (f"{canary}-doubt", "error"), EffectUncertain),
            (shop.book, (f"{canary}-object", "commit"), Exception),
        ]
        for task, arguments, error in refused:
            with pytest.raises(error):
                task.apply_async(arguments, **sent).get(**WAIT)
    text = log.read_text()
    assert f"{shown(f'{shop.book.name}:{canary}')}: replayed" in text
    assert f"{shown(f'{shop.charge.name}:{canary}-killed')}: replayed" in text
    assert "canary-key" not in text
    assert SECRET not in text


def test_a_database_that_is_away_is_named_without_its_password(
    shop: ModuleType, key: str, shop_environment: dict[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "worker.log"
    environment = {
        **shop_environment,
        "FENCED_DSN": with_password(shop_environment["FENCED_DSN"], host="127.0.0.1", port=1),
    }
    with worker("canary_away", log, environment):
        result = shop.book.apply_async((f"canary-key-{key}",), queue="canary_away")
        while "not reachable" not in log.read_text():
            pass
        result.revoke()
    assert SECRET not in log.read_text()
    assert "canary-key" not in log.read_text()


def test_a_record_has_fields(shop: ModuleType, key: str, caplog: pytest.LogCaptureFixture) -> None:
    """For whoever writes logs as JSON."""
    with caplog.at_level(logging.INFO, "celery_integration"):
        shop.book(key)
        shop.book(key)

    def fields(record: logging.LogRecord) -> dict[str, Any]:
        return {name: value for name, value in vars(record).items() if name.startswith("fenced_")}

    first, second = [fields(record) for record in caplog.records if hasattr(record, "fenced_answer")]
    same = {"fenced_key": repr(f"{shop.book.name}:{key}"), "fenced_task": shop.book.name}
    assert first == {**same, "fenced_answer": "done", "fenced_fence": 1, "fenced_attempt": 1}
    assert second == {**same, "fenced_answer": "replayed", "fenced_fence": None, "fenced_attempt": None}
    assert json.loads(json.dumps(first)) == first


@pytest.mark.parametrize(("key", "scope"), [("pay:7", "pay:#"), ("pay:a:b", "pay:#"), ("alone", "#"), (":x", ":#")])
@pytest.mark.usefixtures("hashed")
def test_a_hash_keeps_the_scope(key: str, scope: str) -> None:
    """The same key gives the same hash in every process."""
    assert shown(key).startswith(scope)
    assert len(shown(key)) == len(scope) + 12
    assert shown(key) == shown(key)
    assert shown(key) != shown(f"{key}x")
