"""What an OpenTelemetry SDK gets to see of deliveries, sweeps and the backlog."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from celery_integration import EffectUncertain, otel, signals
from celery_integration.process import Gate
from pgref.errors import Unavailable
from tests.backlog.doubt import Backlog, harmless, unasked


class Seen:
    """What the SDK was told."""

    def __init__(self) -> None:
        self.spans = InMemorySpanExporter()
        self.reader = InMemoryMetricReader()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        trace.set_tracer_provider(provider)
        metrics.set_meter_provider(MeterProvider([self.reader]))

    def attributes(self, call: Any) -> dict[str, Any]:
        """Return the attributes of a span around ``call``."""
        with trace.get_tracer("test").start_as_current_span("task"):
            call()
        return dict(self.spans.get_finished_spans()[-1].attributes or {})

    def figures(self) -> dict[tuple[str, frozenset[tuple[str, Any]]], Any]:
        data = self.reader.get_metrics_data()
        assert data is not None
        return {
            (metric.name, frozenset((point.attributes or {}).items())): getattr(point, "value", None)
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
        }


@pytest.fixture(scope="module")
def sdk() -> Seen:
    return Seen()


@pytest.fixture
def seen(sdk: Seen) -> Iterator[Seen]:
    otel.instrument()
    yield sdk
    for signal in (signals.effect_answered, signals.lease_lost, signals.swept, signals.effects_removed):
        signal.disconnect(dispatch_uid=otel.UID)


def labelled(name: str, **labels: Any) -> tuple[str, frozenset[tuple[str, Any]]]:
    return name, frozenset(labels.items())


def test_the_span_of_a_task_says_what_came_of_it(seen: Seen, app: Celery, gate: Gate) -> None:
    task = app.tasks[harmless.name]
    first = seen.attributes(lambda: task("a"))
    assert first == {"pgref.answer": "done", "pgref.key": "sweep safe:a", "pgref.fence": 1, "pgref.attempt": 1}
    assert seen.attributes(lambda: task("a")) == {"pgref.answer": "replayed", "pgref.key": "sweep safe:a"}


def test_keys_can_be_left_out(seen: Seen, app: Celery, gate: Gate) -> None:
    otel.instrument(keys=False)
    assert "pgref.key" not in seen.attributes(lambda: app.tasks[harmless.name]("confidential"))


def test_deliveries_and_sweeps_are_counted(seen: Seen, app: Celery, backlog: Backlog) -> None:
    done = labelled("pgref.answers", task=harmless.name, answer="done")
    before = seen.figures().get(done, 0) if seen.reader.get_metrics_data() else 0
    otel.instrument()  # once more, and nothing counts twice
    app.tasks[harmless.name]("counted")
    backlog.uncertain(unasked, "b")
    with pytest.raises(EffectUncertain):
        app.tasks[unasked.name]("b")
    signals.lease_lost.send(sender=None, key="a")
    signals.effects_removed.send(sender=app, count=3)
    backlog.swept()
    figures = seen.figures()
    assert figures[done] == before + 1
    assert figures[labelled("pgref.answers", task=unasked.name, answer="uncertain")] >= 1
    assert figures[labelled("pgref.leases.lost")] == 1
    assert figures[labelled("pgref.removed")] == 3
    assert labelled("pgref.sweep.duration") in figures
    assert labelled("pgref.swept", what="parked") in figures


def test_the_backlog_is_observed(
    seen: Seen, app: Celery, gate: Gate, backlog: Backlog, monkeypatch: pytest.MonkeyPatch
) -> None:
    otel.observe_backlog(app)
    backlog.uncertain(unasked, "a")
    backlog.swept()
    parked = labelled("pgref.effects", state="parked", task="sweep unasked", reason="test")
    assert seen.figures()[parked] == 1
    assert seen.figures()[labelled("pgref.sweep.late")] == 0

    def away() -> None:
        raise Unavailable("away")

    monkeypatch.setattr(gate, "effects", SimpleNamespace(tallies=away, now=away))
    assert not {"pgref.effects", "pgref.sweep.late"} & {name for name, _ in seen.figures()}
