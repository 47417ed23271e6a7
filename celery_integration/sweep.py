"""What beat does again and again: expire, settle, dispatch, remove."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from celery import Celery
from kombu.exceptions import OperationalError

from celery_integration.delivery import signature_of
from celery_integration.process import Gate, gate_of
from celery_integration.reconcile import Step, Todo, call_of, carry_out, plan, store_time
from celery_integration.results import told
from celery_integration.signals import effects_removed, swept
from pgref.contracts.effects import EffectRecord, ReconcileClaim
from pgref.errors import NotUncertain, OutcomeUnknown, ReconcileTaken, Unavailable
from pgref.keys import shown

__all__ = ["Swept", "dispatch", "retain", "sweep"]

logger = logging.getLogger(__name__)

GROUP_MAX = 64


@dataclass(frozen=True, slots=True)
class Swept:
    """What one sweep did, in keys."""

    expired: int
    settled: int
    put_off: int
    parked: int
    dispatched: int


def sweep(app: Celery, *, by: str = "") -> Swept:
    """Expire what is overdue, settle what can be settled, dispatch what is free and still wanted.

    Goes on until nothing is left or ``fenced_sweep_seconds`` are over. Any number of sweeps can run at once: each key
    is looked at by one of them. ``by`` says in the history who swept. Raises `Unavailable` if the database is away;
    nothing is lost by that.
    """
    gate = gate_of(app)
    started_at = time.monotonic()
    sweeper = _Sweep(app, gate, by or f"sweep on {socket.gethostname()}", gate.settings.sweep_seconds)
    sweeper.expire()
    sweeper.settle_all()
    sweeper.dispatch()
    done = Swept(**sweeper.counts)
    swept.send(sender=app, swept=done, seconds=time.monotonic() - started_at)
    return done


def dispatch(app: Celery) -> int:
    """Send the messages of what is free and wanted, as `sweep` does; return how many.

    Goes on until nothing is due or ``fenced_dispatch_seconds`` are over.
    """
    gate = gate_of(app)
    sweeper = _Sweep(app, gate, "", gate.settings.dispatch_seconds)
    sweeper.dispatch()
    return sweeper.counts["dispatched"]


def retain(app: Celery) -> int:
    """Remove what has been done for longer than ``fenced_retention_seconds``, if that is set; return how many keys.

    Goes on until nothing is left or ``fenced_retain_seconds`` are over.
    """
    gate = gate_of(app)
    removed = _Sweep(app, gate, "", gate.settings.retain_seconds).retain()
    effects_removed.send(sender=app, count=removed)
    return removed


class _Sweep:
    """One run over what waits, until nothing is left or its time is over."""

    def __init__(self, app: Celery, gate: Gate, by: str, seconds: float) -> None:
        self.app, self.gate, self.by = app, gate, by
        self.ends_at = time.monotonic() + seconds
        self.counts = {field.name: 0 for field in fields(Swept)}

    def expire(self) -> None:
        self.counts["expired"] = self._in_batches(self.gate.effects.expire_intents)

    def dispatch(self) -> None:
        batch = self.gate.settings.sweep_batch_max
        while self._time_left():
            due = self.gate.effects.claim_due(batch, self.gate.settings.redispatch_seconds)
            try:
                for record in due:
                    self.counts["dispatched"] += _dispatched(self.app, record)
            except OperationalError as error:
                logger.warning("the broker is away; what is due comes again later: %s", error)
                return
            if len(due) < batch:
                return

    def retain(self) -> int:
        horizon_seconds = self.gate.settings.retention_seconds
        if horizon_seconds is None:
            return 0
        return self._in_batches(lambda batch: self.gate.effects.retain(horizon_seconds, batch))

    def _in_batches(self, take: Callable[[int], int]) -> int:
        """Take batches until one is not full or the time is over; return how many keys that were."""
        batch, total = self.gate.settings.sweep_batch_max, 0
        while self._time_left():
            taken = take(batch)
            total += taken
            if taken < batch:
                break
        return total

    def _time_left(self) -> bool:
        return time.monotonic() < self.ends_at

    def settle_all(self) -> None:
        """Claim groups that grow while they are quickly settled, so that no claim ends before its turn."""
        size, size_max = 1, min(GROUP_MAX, self.gate.settings.sweep_batch_max)
        ttl = self.gate.settings.reconcile_seconds
        while self._time_left():
            started_at = time.monotonic()
            claimed = self.gate.effects.claim_backlog(size, ttl)
            for record, claim in claimed:
                if time.monotonic() - started_at > ttl / 2:
                    break  # the rest comes again when its claims have ended
                self._settle(record, claim)
            if len(claimed) < size:
                break
            quick = time.monotonic() - started_at < ttl / 10
            size = min(2 * size, size_max) if quick else 1

    def _settle(self, record: EffectRecord, claim: ReconcileClaim) -> None:
        pause_seconds = self.gate.settings.reconcile_seconds
        call = call_of(self.app, self.gate, record)
        [todo] = plan(
            [(record, None if call is None else call.definition)], store_time(self.gate, claim), pause_seconds
        )
        try:
            found = carry_out(self.gate, call, todo, claim, self.by)
        except (Unavailable, OutcomeUnknown):
            raise
        except (ReconcileTaken, NotUncertain):
            return  # somebody else settled it meanwhile
        except Exception as error:
            logger.exception("cannot settle %s now", shown(record.key))
            found = replace(todo, step=Step.WAIT)
            self.gate.effects.defer_reconcile(claim, pause_seconds, note=told(error), by=self.by)
        match found:
            case Todo(step=step):
                self.counts["parked" if step is Step.PARK else "put_off"] += 1
            case _:
                self.counts["settled"] += 1


def _dispatched(app: Celery, record: EffectRecord) -> bool:
    assert record.payload is not None
    try:
        signature_of(app, record.payload).apply_async()
    except OperationalError:
        raise
    except Exception:
        logger.exception("cannot dispatch %s now", shown(record.key))
        return False
    logger.info("dispatched %s again", shown(record.key))
    return True
