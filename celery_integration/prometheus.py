"""Metrics for Prometheus: what workers do, counted in their processes, and the backlog, read when it is asked for.

Needs the extra ``prometheus``. ``instrument()`` in the app's module counts, ``celery -A app fenced metrics`` serves.
So that it can serve what workers count, set ``PROMETHEUS_MULTIPROC_DIR`` for it and for them to one directory, which is
to be emptied before they start.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from celery import Celery
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from celery_integration import signals
from celery_integration.process import gate_of
from celery_integration.sweep import Swept
from pgref.contracts.effects import Kind, late_seconds
from pgref.errors import PgrefError

__all__ = ["BacklogCollector", "instrument", "registry"]

own = CollectorRegistry()
answers = Counter("pgref_answers", "Deliveries, by what came of them.", ["task", "answer"], registry=own)
leases_lost = Counter("pgref_leases_lost", "Leases that were lost while their body ran.", registry=own)
sweep_seconds = Histogram("pgref_sweep_seconds", "How long sweeps take.", registry=own)
swept_keys = Counter("pgref_swept", "Keys that sweeps took up, by what they did.", ["what"], registry=own)
removed_keys = Counter("pgref_removed", "Done effects that retention removed.", registry=own)


def instrument() -> None:
    """Count in this process and in those forked from it. Safe to repeat."""
    signals.effect_answered.connect(_count_answer, weak=False, dispatch_uid="pgref.prometheus")
    signals.lease_lost.connect(_count_lost_lease, weak=False, dispatch_uid="pgref.prometheus")
    signals.swept.connect(_count_sweep, weak=False, dispatch_uid="pgref.prometheus")
    signals.effects_removed.connect(_count_removed, weak=False, dispatch_uid="pgref.prometheus")


def _count_answer(sender: Any, answer: signals.Answer, **_: Any) -> None:
    answers.labels(sender.name, answer).inc()


def _count_lost_lease(**_: Any) -> None:
    leases_lost.inc()


def _count_sweep(swept: Swept, seconds: float, **_: Any) -> None:
    sweep_seconds.observe(seconds)
    for what in Swept.__slots__:
        swept_keys.labels(what).inc(getattr(swept, what))


def _count_removed(count: int, **_: Any) -> None:
    removed_keys.inc(count)


def registry(app: Celery) -> CollectorRegistry:
    """Return what there is to serve: the backlog of ``app``, and what this process, or all that share it, counted."""
    served = CollectorRegistry()
    served.register(BacklogCollector(app))
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        MultiProcessCollector(served)  # type: ignore[no-untyped-call]
    else:
        served.register(own)
    return served


class BacklogCollector:
    """What is in doubt, due and in flight, asked of the database at each scrape."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def describe(self) -> list[Metric]:
        """Say nothing beforehand, so that the database is not asked at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges; of a database that is away only that it is."""
        up = GaugeMetricFamily("pgref_up", "Whether the database answered.")
        try:
            effects = gate_of(self._app).effects
            now, tallies = effects.now(), effects.tallies()
        except PgrefError:
            up.add_metric([], 0)
            yield up
            return
        up.add_metric([], 1)
        yield up
        labels = ["state", "task", "reason"]
        count = GaugeMetricFamily("pgref_effects", "Effects that are not done, by state.", labels=labels)
        oldest = GaugeMetricFamily("pgref_oldest_seconds", "For how long the oldest of them is so.", labels=labels)
        groups: dict[tuple[Kind, str, str], tuple[int, float]] = {}
        for tally in tallies:
            group = (tally.kind, tally.scope, tally.reason_class)
            number, age = groups.get(group, (0, 0.0))
            groups[group] = number + tally.count, max(age, (now - tally.oldest_at).total_seconds())
        for group, (number, age) in groups.items():
            count.add_metric(list(group), number)
            oldest.add_metric(list(group), age)
        yield count
        yield oldest
        late = GaugeMetricFamily("pgref_sweep_late_seconds", "For how long something has waited for a sweep.")
        late.add_metric([], late_seconds(tallies, now))
        yield late
