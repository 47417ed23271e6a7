"""What Prometheus is told: by a real worker's processes, by the database, and when that is away."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from celery_integration import EffectUncertain
from celery_integration.prometheus import BacklogCollector, registry
from celery_integration.sweep import sweep
from pgref.contracts.effects import Granted
from pgref.errors import FingerprintMismatch, Unavailable
from pgref.postgres import Stores
from tests.plugins.workers import ROOT, Worker

MONITORING = ROOT / "examples" / "monitoring"
PAGE = ROOT / "docs" / "reference" / "metrics.md"
WAIT: dict[str, Any] = {"timeout": 60}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
Scrape = Callable[[], Samples]


def labelled(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


@pytest.fixture
def scrape(worker: Worker) -> Iterator[Scrape]:
    """Ask the server that `celery fenced metrics` runs beside the worker."""
    command = [sys.executable, "-m", "celery", "-A", "tests.celery.shop", "fenced", "metrics", "--port", "0"]
    with subprocess.Popen(command, env=worker.environment, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().removeprefix("serving ").strip()

        def scrape() -> Samples:
            with urllib.request.urlopen(url) as response:
                families = text_string_to_metric_families(response.read().decode())
                return {labelled(s.name, **s.labels): s.value for family in families for s in family.samples}

        yield scrape
        process.terminate()


def test_what_a_workers_processes_count(shop: ModuleType, key: str, scrape: Scrape) -> None:
    """Each delivery by what came of it, over all processes; sweeps by what they did."""
    before = scrape()
    assert [shop.book.delay(key).get(**WAIT) for _ in range(3)] == [{"attempt": 1}] * 3
    with pytest.raises(ValueError, match="the body failed"):
        shop.book.delay(f"{key} fails", "error").get(**WAIT)
    for error in (ValueError, EffectUncertain, EffectUncertain):
        with pytest.raises(error):
            shop.letter.delay(f"{key} letter", "error").get(**WAIT)
    with pytest.raises(FingerprintMismatch):
        shop.book.delay(key, "other").get(**WAIT)
    after = scrape()

    def grown(task: Any, answer: str) -> float:
        sample = labelled("pgref_answers_total", task=task.name, answer=answer)
        return after.get(sample, 0) - before.get(sample, 0)

    assert grown(shop.book, "done") == 1
    assert grown(shop.book, "replayed") == 2
    assert grown(shop.book, "withdrawn") == 1
    assert grown(shop.book, "refused") == 1
    assert grown(shop.letter, "marked") == 1
    assert grown(shop.letter, "uncertain") == 2
    assert after[labelled("pgref_up")] == 1
    while scrape()[labelled("pgref_sweep_seconds_count")] == 0:
        pass


def test_the_backlog_is_read_when_it_is_asked_for(shop: ModuleType, key: str, gate: Stores) -> None:
    """By state, task, and the class of its reason, whose text is not a label."""
    for number in range(2):
        action = shop.letter.definition.action(shop.letter.name, {"key": f"{key}{number}", "how": "return"}, "id")
        granted = gate.effects.acquire(action, 60)
        assert isinstance(granted, Granted)
        gate.effects.mark_uncertain(action, granted.lease, f"Oddity: {number}")
    sweep(shop.app)
    served = registry(shop.app)
    labels = {"state": "parked", "task": shop.letter.name, "reason": "Oddity"}
    assert served.get_sample_value("pgref_effects", labels) == 2
    oldest = served.get_sample_value("pgref_oldest_seconds", labels)
    assert oldest is not None
    assert oldest > 0


def test_a_database_that_is_away(shop: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is a figure, not a failed scrape."""
    from celery_integration.process import gate_of

    def away() -> None:
        raise Unavailable("away")

    monkeypatch.setattr(gate_of(shop.app), "effects", SimpleNamespace(now=away))
    [up] = BacklogCollector(shop.app).collect()
    assert [(sample.name, sample.value) for sample in up.samples] == [("pgref_up", 0)]


def test_without_a_shared_directory_only_the_backlog_is_served(
    worker: Worker, shop_environment: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "celery", "-A", "tests.celery.shop", "fenced", "metrics", "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "PROMETHEUS_MULTIPROC_DIR"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "only the backlog" in process.stderr.readline()
        url = process.stdout.readline().removeprefix("serving ").strip()
        with urllib.request.urlopen(url) as response:
            text = response.read().decode()
        process.terminate()
    assert "pgref_up 1.0" in text
    assert "pgref_answers" not in text


@pytest.mark.parametrize("path", [*sorted(MONITORING.iterdir()), PAGE], ids=lambda path: path.name)
def test_every_metric_in_the_examples_exists(path: Path, scrape: Scrape, shop: ModuleType, key: str) -> None:
    """Rules and dashboards ask for nothing that is not there."""
    shop.letter.delay(key, "error").get(propagate=False, **WAIT)
    while not scrape().get(labelled("pgref_sweep_seconds_count")):
        pass
    served = {name.removesuffix("_count") for name, _ in scrape()} | {name for name, _ in scrape()}
    asked = set(re.findall(r"\bpgref_\w+", path.read_text()))
    assert asked
    assert asked <= served
