"""Tasks that the tests call: each records what it did where duplicates would show."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import redis
import sqlalchemy as sa
from celery import Celery, Task, shared_task
from celery.exceptions import Reject
from celery.signals import before_task_publish

import celery_integration.errors
import pgref.errors
from celery_integration import Applied, Effect, FencedTask, NotApplied, Unknown, fenced_task, install, schedule
from celery_integration.prometheus import instrument
from pgref.contracts.effects import Granted, Resolution
from pgref.errors import OutcomeUnknown
from pgref.redis import Recorder, RedisSink

T = TypeVar("T")

app = Celery("shop", broker=os.environ["BROKER_URL"], backend=os.environ["BROKER_URL"], set_as_current=True)
app.conf.update(
    broker_transport_options={
        "visibility_timeout": 4,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        # A worker that is killed while it restores must not keep the next one from restoring.
        "unacked_mutex_expire": 2,
    },
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
    fenced_sweep_seconds=1,
)
install(
    app,
    lease_seconds=2,
    comeback_seconds_max=0.5,
    reconcile_seconds=1,
    probe_seconds=1,
    redispatch_seconds=1,
    hash_keys="SHOP_HASHES_KEYS" in os.environ,
)
schedule(app)
instrument()

metadata = sa.MetaData()
entry = sa.Table("entry", metadata, sa.Column("key", sa.Text, index=True), sa.Column("cents", sa.Integer))
LEDGER = Path(os.environ["SHOP_LEDGER"])


HUGE_CHARACTERS = 64 * 1024 * 1024


class AwkwardError(Exception):
    """Pickles, and cannot be unpickled."""

    def __init__(self, first: str, second: int) -> None:
        super().__init__(first)
        self.second = second


@before_task_publish.connect(weak=False)
def _count(sender: str, body: Any, headers: dict[str, Any], **_: Any) -> None:
    args = body[0]
    if args and isinstance(args[0], str):
        with (LEDGER / f"sent {args[0]}").open("a") as ledger:
            ledger.write(f"{headers['id']}\n")


def sent(key: str) -> list[str]:
    """The ids of all messages that were sent for a key, by callers and by workers, one for each message."""
    return outside(f"sent {key}")


def messages() -> int:
    """How many messages the broker still holds."""
    return int(redis_client.llen("celery")) + int(redis_client.hlen("unacked"))


def outside(key: str) -> list[str]:
    """What the outside world has seen under ``key``."""
    path = LEDGER / key
    return path.read_text().split() if path.exists() else []


def _apply_outside(effect: Effect, key: str) -> None:
    with (LEDGER / key).open("a") as ledger:
        ledger.write(f"{effect.fence}\n")


def _end(effect: Effect, how: str) -> Any:
    """End a body in one of the ways in which bodies end."""
    match how:
        case "return":
            return {"attempt": effect.attempt}
        case "error":
            raise ValueError("the body failed")
        case "retry":
            if effect.attempt < 3:
                effect.retry(countdown=0)
            return {"attempt": effect.attempt}
        case "kill":
            if effect.attempt == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return {"attempt": effect.attempt}
        case "exit":
            if effect.attempt == 1:
                sys.exit(3)
            return {"attempt": effect.attempt}
        case "memory":
            raise MemoryError
        case "unpicklable":
            raise AwkwardError("awkward", 2)
        case "unpicklable cause":
            raise ValueError("awkward") from AwkwardError("awkward", 2)
        case "huge":
            return "x" * HUGE_CHARACTERS
        case "long":
            _wait_for_renewals(effect, 10)
            return {"attempt": effect.attempt}
        case "hang":
            threading.Event().wait()
        case "object":
            return object()
        case "commit":
            effect.connection.commit()
        case "renew":
            _wait_for_renewals(effect, 6)
            return {"attempt": effect.attempt}
    raise AssertionError(how)


def _wait_for_renewals(effect: Effect, count: int) -> None:
    from celery_integration.process import gate_of

    seen: set[datetime] = set()
    while len(seen) <= count:
        record = gate_of(app).effects.lookup(effect.key)
        assert record is not None
        seen.add(record.expires_at)
        threading.Event().wait(0.02)


@shared_task
def ping() -> str:
    return "pong"


@shared_task
def note(value: Any, key: str) -> Any:
    with (LEDGER / key).open("a") as ledger:
        ledger.write("next\n")
    return value


@fenced_task(key="{key}")
def book(effect: Effect, key: str, how: str = "return", cents: int = 5) -> Any:
    """Book one entry."""
    effect.session.execute(sa.insert(entry).values(key=key, cents=cents))
    return _end(effect, how)


@fenced_task(key="{key}", resource="account:{account}")
def transfer(effect: Effect, key: str, account: str, how: str = "return") -> Any:
    effect.session.execute(sa.insert(entry).values(key=account, cents=1))
    return _end(effect, how)


@fenced_task(key="{key}", sink="external", retry_safety="safe", not_applied=(LookupError,))
def charge(effect: Effect, key: str, how: str = "return") -> Any:
    effect.ensure_held(0.5)
    if how == "declined":
        raise LookupError("declined")
    if how == "not_applied":
        raise NotApplied("the provider said so")
    if how == "before":
        if effect.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        how = "return"
    _apply_outside(effect, key)
    return _end(effect, how)


@charge.probe
def charge_probe(effect: Effect, key: str, how: str = "return") -> Applied | NotApplied:
    seen = outside(key)
    return Applied({"probed": len(seen)}) if seen else NotApplied()


@fenced_task(key="{key}", sink="external")
def letter(effect: Effect, key: str, how: str = "return") -> Any:
    """Nobody can be asked, and sending it again is not harmless."""
    _apply_outside(effect, key)
    return _end(effect, how)


@fenced_task(key="{key}", sink="external")
def parcel(effect: Effect, key: str, verdict: str = "unknown") -> Any:
    """Not harmless to send again; the probe answers what it is told."""
    _apply_outside(effect, key)
    raise ConnectionError("no answer")


@parcel.probe
def parcel_probe(effect: Effect, key: str, verdict: str = "unknown") -> Applied | NotApplied | Unknown:
    match verdict:
        case "not_applied":
            return NotApplied()
        case "force":
            return Applied("second look") if effect.fence > 2 else NotApplied(force=True)
        case "broken":
            raise RuntimeError("the probe is broken")
    return Unknown("no idea")


@fenced_task(key="{key}", sink="external", retry_safety="safe")
def overtaken(effect: Effect, key: str) -> Any:
    """Safe only as long as a probe's answer is about the attempt that it was asked about."""
    _apply_outside(effect, key)
    raise ConnectionError("no answer")


@overtaken.probe
def overtaken_probe(effect: Effect, key: str) -> NotApplied:
    """Answer after somebody else has ruled, and a later attempt has become uncertain in its turn."""
    from celery_integration.process import gate_of

    effects = gate_of(app).effects
    record = effects.lookup(effect.key)
    assert record is not None
    effects.resolve_uncertain(record.action, Resolution(applied=False, by="a person", why="asked by phone"))
    granted = effects.acquire(record.action, 60)
    assert isinstance(granted, Granted)
    _apply_outside(effect, key)
    effects.mark_uncertain(record.action, granted.lease, "no answer")
    return NotApplied()


@fenced_task(key="{key}", sink="external", retry_safety="safe", soft_time_limit=1)
def slow_charge(effect: Effect, key: str, how: str = "hang") -> Any:
    _apply_outside(effect, key)
    return _end(effect, how)


@fenced_task(key="{key}", soft_time_limit=1)
def slow_book(effect: Effect, key: str, how: str = "hang") -> Any:
    effect.session.execute(sa.insert(entry).values(key=key, cents=1))
    return _end(effect, how)


@fenced_task(key="{key}", autoretry_for=(Exception,), retry_backoff=False, default_retry_delay=0, max_retries=3)
def eager_beaver(effect: Effect, key: str, how: str = "return") -> Any:
    effect.session.execute(sa.insert(entry).values(key=key, cents=1))
    if how == "flaky" and effect.attempt < 3:
        raise ValueError("flaky")
    return _end(effect, "return" if how == "flaky" else how)


@fenced_task
def by_task_id(effect: Effect, key: str) -> Any:
    effect.session.execute(sa.insert(entry).values(key=key, cents=1))
    return {"attempt": effect.attempt}


@fenced_task(key="{key}", single_commit=True)
def jot(effect: Effect, key: str, how: str = "return") -> Any:
    """A short effect in one commit. What it was attempted is nowhere on record."""
    effect.session.execute(sa.insert(entry).values(key=key, cents=1))
    if how == "retry" and effect.task.request.retries < 2:
        effect.retry(countdown=0)
    return _end(effect, "return" if how == "retry" else how)


@fenced_task(key="{key}", sink="external", retry_safety="safe")
def receipt(effect: Effect, key: str, how: str = "return") -> Any:
    """Something outside, and what is written down of it."""
    _apply_outside(effect, key)
    with effect.transaction():
        effect.session.execute(sa.insert(entry).values(key=key, cents=1))
    if how == "twice":
        with effect.transaction() as connection:
            connection.execute(sa.insert(entry).values(key=key, cents=2))
    return _end(effect, "return" if how == "twice" else how)


@receipt.probe
def receipt_probe(effect: Effect, key: str, how: str = "return") -> Applied | NotApplied:
    return Applied({"probed": len(outside(key))}) if outside(key) else NotApplied()


@fenced_task(key="{key}", max_attempts=2)
def stubborn(effect: Effect, key: str, how: str = "error") -> Any:
    with (LEDGER / key).open("a") as ledger:
        ledger.write(f"{effect.attempt}\n")
    return _end(effect, "return" if how == "third" and effect.attempt > 2 else "error")


@fenced_task(key="{key}", max_attempts=2)
def doomed(effect: Effect, key: str) -> Any:
    """Kills its process, every time."""
    with (LEDGER / key).open("a") as ledger:
        ledger.write(f"{effect.attempt}\n")
    os.kill(os.getpid(), signal.SIGKILL)


class Wall(RedisSink):
    """A sink whose answer can get lost."""

    lost = False

    def write_fenced(self, resource: str, fence: int, write: Callable[[Recorder], T]) -> T:
        answer = super().write_fenced(resource, fence, write)
        if self.lost:
            raise OutcomeUnknown("the answer was lost")
        return answer


redis_client = redis.Redis.from_url(os.environ["BROKER_URL"])
wall = Wall(redis_client, prefix="shop:")


@fenced_task(key="{key}", resource="wall:{key}", sink=wall, retry_safety="safe")
def paint(effect: Effect, key: str, how: str = "return") -> Any:
    effect.sink.rpush(f"shop:{{wall:{key}}}:coats", effect.fence)
    return _end(effect, how)


@paint.probe
def paint_probe(effect: Effect, key: str, how: str = "return") -> Applied | NotApplied:
    coats = redis_client.lrange(f"shop:{{wall:{key}}}:coats", 0, -1)
    return Applied({"probed": len(coats)}) if coats else NotApplied()


@fenced_task(key="{key}")
def misplaced(effect: Effect, key: str) -> None:
    with effect.transaction():
        pass


@shared_task(bind=True)
def stand_in(self: Any, key: str) -> Any:
    return self.replace(book.s(key))


@fenced_task(key="{key}", time_limit=1)
def hard_book(effect: Effect, key: str) -> Any:
    effect.session.execute(sa.insert(entry).values(key=key, cents=5))
    return _end(effect, "hang" if effect.attempt == 1 else "return")


@fenced_task(key="{key}", sink="external", time_limit=1)
def hard_charge(effect: Effect, key: str) -> Any:
    _apply_outside(effect, key)
    return _end(effect, "hang")


@hard_charge.probe
def hard_charge_probe(effect: Effect, key: str) -> Applied | NotApplied:
    return Applied({"probed": len(outside(key))}) if outside(key) else NotApplied()


@fenced_task(key="{key}", sink="external", lease_seconds=4)
def grip(effect: Effect, key: str) -> Any:
    """Hold the interpreter until something can be read from a pipe: its process renews nothing meanwhile."""
    _apply_outside(effect, key)
    pipe = os.open(LEDGER / f"pipe {key}", os.O_RDWR)
    ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)
    return {"attempt": effect.attempt}


@fenced_task(key="{key}")
def whereabouts(effect: Effect, key: str) -> tuple[int, int]:
    """Return the process and its session on the database."""
    effect.session.execute(sa.insert(entry).values(key=key, cents=1))
    return os.getpid(), effect.session.execute(sa.text("SELECT pg_backend_pid()")).scalar_one()


if "SHOP_OPENED_IN_THE_PARENT" in os.environ:
    from celery_integration.process import gate_of

    # Several connections at once, as a busy import would leave them in the pool.
    with gate_of(app).stores.database.raw(), gate_of(app).stores.database.raw():
        gate_of(app).effects.lookup("warm")


@fenced_task(key="{key}", sink="external", autoretry_for=(Exception,), default_retry_delay=0, max_retries=3)
def eager_letter(effect: Effect, key: str, how: str = "error") -> Any:
    _apply_outside(effect, key)
    return _end(effect, how)


@fenced_task(key="{key}", sink="external", retry_safety="safe")
def stalled(effect: Effect, key: str) -> Any:
    """Somebody takes it for lost, and rules that it did not happen, while it does."""
    from celery_integration.process import gate_of

    effects = gate_of(app).effects
    record = effects.lookup(effect.key)
    assert record is not None
    assert effect._held is not None
    effects.mark_uncertain(record.action, effect._held.lease, "no sign of life")
    effects.resolve_uncertain(record.action, Resolution(applied=False, by="ann", why="not in the ledger"))
    _apply_outside(effect, key)
    return {"attempt": effect.attempt}


class Audited(Task):  # type: ignore[type-arg]
    """A class of the user's, with a hook."""

    abstract = True

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        with (LEDGER / f"audit {args[0]}").open("a") as ledger:
            ledger.write("ok\n")


class AuditedFencedTask(FencedTask):
    """The same for a class that is made for fenced tasks."""

    abstract = True
    on_success = Audited.on_success


@fenced_task(key="{key}", base=Audited)
def audited(effect: Effect, key: str) -> Any:
    effect.session.execute(sa.insert(entry).values(key=key, cents=5))
    return _end(effect, "return")


@fenced_task(key="{key}", base=AuditedFencedTask, scope="audited")
def audited_as_well(effect: Effect, key: str) -> Any:
    effect.session.execute(sa.insert(entry).values(key=key, cents=5))
    return _end(effect, "return")


@shared_task(bind=True, max_retries=1)
def raise_ours(self: Any, name: str, how: str) -> None:
    error = getattr(celery_integration.errors, name, None) or getattr(pgref.errors, name)
    match how:
        case "plain":
            raise error("ours", key="k")
        case "rejected":
            raise Reject(error("ours", key="k"), requeue=False)
        case "retried":
            raise self.retry(exc=error("ours", key="k"), countdown=0)
