"""Whatever is passed to a public function: a documented error or an answer, and nothing left open or held (G24)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from celery_integration.results import dump_result, load_result
from pgref import errors
from pgref.contracts.effects import Action, EffectRecord, EffectStore, Granted, Lease, ReconcileClaim, Resolution
from pgref.errors import InvalidArgument, PgrefError
from pgref.keys import BATCH_MAX, TTL_SECONDS_MAX, fingerprint, idempotency_key
from pgref.memory import MemoryEffectStore, MemorySink
from pgref.postgres import Stores, drop_schema, ensure_schema, migration_sql, new_schema, verify_schema
from tests.property.hostile import VALUES

TTL = 60.0
LARGE = 64 * 2**20


@dataclass
class Stage:
    """A store with one live lease, and an action that nobody has asked for."""

    store: EffectStore
    sink: Any
    action: Action
    lease: Lease
    fresh: Action

    @classmethod
    def set_up(cls, store: EffectStore, sink: Any) -> Stage:
        action, fresh = (Action(f"{name} {uuid4()}", str(uuid4()), payload="p") for name in ("key", "fresh"))
        outcome = store.acquire(action, TTL)
        assert isinstance(outcome, Granted)
        return cls(store, sink, action, outcome.lease, fresh)

    def seen(self) -> list[EffectRecord | None]:
        return [self.store.lookup(self.action.key), self.store.lookup(self.fresh.key)]


Slot = Callable[[Stage, Any], object]


def _action(**fields: Any) -> Slot:
    """Return a call with an action that has ``None`` for the value to be tried."""
    (name,) = fields
    return lambda stage, value: stage.store.acquire(replace(stage.fresh, **{name: value}), TTL)


def _lease(name: str) -> Slot:
    return lambda stage, value: stage.store.complete(stage.action, replace(stage.lease, **{name: value}), "r")


def _resolution(name: str) -> Slot:
    return lambda stage, value: stage.store.resolve_uncertain(
        stage.action, replace(Resolution(applied=name == "result"), **{name: value})
    )


def _backlog(name: str) -> Slot:
    return lambda stage, value: stage.store.backlog(1, **{name: value})


def _no_claim(stage: Stage) -> ReconcileClaim:
    return ReconcileClaim(stage.action.key, stage.action.resource, 1, stage.lease.holder, stage.lease.expires_at)


SLOTS: dict[str, Slot] = {
    "Action.key": lambda stage, value: stage.store.acquire(Action(value, stage.fresh.resource), TTL),
    **{f"Action.{name}": _action(**{name: None}) for name in ("resource", "fingerprint", "retry_safety", "payload")},
    **{f"Lease.{name}": _lease(name) for name in ("resource", "fence", "holder", "expires_at")},
    **{f"Resolution.{name}": _resolution(name) for name in ("applied", "result", "by", "why", "force_retryable")},
    "acquire.action": lambda stage, value: stage.store.acquire(value, TTL),
    "acquire.ttl": lambda stage, value: stage.store.acquire(stage.fresh, value),
    "acquire.holder": lambda stage, value: stage.store.acquire(stage.fresh, TTL, holder=value),
    "acquire_many.actions": lambda stage, value: stage.store.acquire_many(value, TTL),
    "acquire_many.action": lambda stage, value: stage.store.acquire_many([stage.fresh, value], TTL),
    "acquire_many.ttl": lambda stage, value: stage.store.acquire_many([stage.fresh], value),
    "acquire_many.holders": lambda stage, value: stage.store.acquire_many([stage.fresh], TTL, holders=value),
    "acquire_many.holder": lambda stage, value: stage.store.acquire_many([stage.fresh], TTL, holders=[value]),
    "complete.action": lambda stage, value: stage.store.complete(value, stage.lease),
    "complete.lease": lambda stage, value: stage.store.complete(stage.action, value),
    "complete.result": lambda stage, value: stage.store.complete(stage.action, stage.lease, value),
    "complete_many.completions": lambda stage, value: stage.store.complete_many(value),
    "complete_many.completion": lambda stage, value: stage.store.complete_many([value]),
    "complete_many.action": lambda stage, value: stage.store.complete_many([(value, stage.lease, None)]),
    "complete_many.lease": lambda stage, value: stage.store.complete_many([(stage.action, value, None)]),
    "complete_many.result": lambda stage, value: stage.store.complete_many([(stage.action, stage.lease, value)]),
    "renew.action": lambda stage, value: stage.store.renew(value, stage.lease, TTL),
    "renew.lease": lambda stage, value: stage.store.renew(stage.action, value, TTL),
    "renew.ttl": lambda stage, value: stage.store.renew(stage.action, stage.lease, value),
    "renew_many.leases": lambda stage, value: stage.store.renew_many(value, TTL),
    "renew_many.pair": lambda stage, value: stage.store.renew_many([(stage.action, stage.lease), value], TTL),
    "renew_many.action": lambda stage, value: stage.store.renew_many([(value, stage.lease)], TTL),
    "renew_many.lease": lambda stage, value: stage.store.renew_many([(stage.action, value)], TTL),
    "renew_many.ttl": lambda stage, value: stage.store.renew_many([(stage.action, stage.lease)], value),
    "mark_uncertain.action": lambda stage, value: stage.store.mark_uncertain(value, stage.lease, "why"),
    "mark_uncertain.lease": lambda stage, value: stage.store.mark_uncertain(stage.action, value, "why"),
    "mark_uncertain.reason": lambda stage, value: stage.store.mark_uncertain(stage.action, stage.lease, value),
    "mark_uncertain.by": lambda stage, value: stage.store.mark_uncertain(stage.action, stage.lease, "", by=value),
    "release.action": lambda stage, value: stage.store.release(value, stage.lease),
    "release.lease": lambda stage, value: stage.store.release(stage.action, value),
    "abandon.action": lambda stage, value: stage.store.abandon(value, stage.lease),
    "abandon.lease": lambda stage, value: stage.store.abandon(stage.action, value),
    "abandon.due_in": lambda stage, value: stage.store.abandon(stage.action, stage.lease, due_in_seconds=value),
    "begin_reconcile.action": lambda stage, value: stage.store.begin_reconcile(value, TTL),
    "begin_reconcile.ttl": lambda stage, value: stage.store.begin_reconcile(stage.action, value),
    "begin_reconcile.holder": lambda stage, value: stage.store.begin_reconcile(stage.action, TTL, holder=value),
    "begin_reconcile.early": lambda stage, value: stage.store.begin_reconcile(stage.action, TTL, early=value),
    "resolve_uncertain.action": lambda stage, value: stage.store.resolve_uncertain(value, Resolution(applied=True)),
    "resolve_uncertain.resolution": lambda stage, value: stage.store.resolve_uncertain(stage.action, value),
    "resolve_uncertain.claim": lambda stage, value: stage.store.resolve_uncertain(
        stage.action, Resolution(applied=True), claim=value
    ),
    "raise_fences.floor": lambda stage, value: stage.store.raise_fences(_not_the_last(value)),
    "raise_fences.by": lambda stage, value: stage.store.raise_fences(1, by=value),
    "raise_fences.why": lambda stage, value: stage.store.raise_fences(1, why=value),
    "retain.older_than": lambda stage, value: stage.store.retain(value, 1),
    "retain.limit": lambda stage, value: stage.store.retain(TTL, value),
    "lookup.key": lambda stage, value: stage.store.lookup(value),
    "history.key": lambda stage, value: stage.store.history(value),
    "evidence.key": lambda stage, value: stage.store.evidence(value),
    "expire_intents.limit": lambda stage, value: stage.store.expire_intents(value),
    "backlog.limit": lambda stage, value: stage.store.backlog(value),
    **{f"backlog.{name}": _backlog(name) for name in ("prefix", "reason", "older_than_seconds", "parked", "after")},
    "claim_backlog.limit": lambda stage, value: stage.store.claim_backlog(value, TTL),
    "claim_backlog.ttl": lambda stage, value: stage.store.claim_backlog(1, value),
    "claim_backlog.holder": lambda stage, value: stage.store.claim_backlog(1, TTL, holder=value),
    "defer_reconcile.claim": lambda stage, value: stage.store.defer_reconcile(value, TTL),
    "defer_reconcile.seconds": lambda stage, value: stage.store.defer_reconcile(_no_claim(stage), value),
    "defer_reconcile.note": lambda stage, value: stage.store.defer_reconcile(_no_claim(stage), TTL, note=value),
    "defer_reconcile.by": lambda stage, value: stage.store.defer_reconcile(_no_claim(stage), TTL, by=value),
    "renew_running.attempts": lambda stage, value: stage.store.renew_running(value, TTL),
    "renew_running.attempt": lambda stage, value: stage.store.renew_running([value], TTL),
    "renew_running.key": lambda stage, value: stage.store.renew_running([(value, 1)], TTL),
    "renew_running.fence": lambda stage, value: stage.store.renew_running([(stage.action.key, value)], TTL),
    "renew_running.ttl": lambda stage, value: stage.store.renew_running([], value),
    "claim_due.limit": lambda stage, value: stage.store.claim_due(value, TTL),
    "claim_due.again_after": lambda stage, value: stage.store.claim_due(1, value),
    "sink.write_fenced.resource": lambda stage, value: stage.sink.write_fenced(value, 2**63 - 1, lambda _: None),
    "sink.write_fenced.fence": lambda stage, value: stage.sink.write_fenced(str(uuid4()), value, lambda _: None),
    "sink.write_fenced.write": lambda stage, value: stage.sink.write_fenced(str(uuid4()), 1, _no_type(value)),
    "sink.seal.resource": lambda stage, value: stage.sink.seal(value, 2**63 - 1),
    "sink.seal.fence": lambda stage, value: stage.sink.seal(str(uuid4()), value),
    "sink.seen_fence.resource": lambda stage, value: stage.sink.seen_fence(value),
}


DOCUMENTED = {"answer", *errors.__all__}


def _not_the_last(floor: Any) -> Any:
    """Raising the floor to the greatest fence would be the end of this store."""
    return 5 if type(floor) is int and 1 <= floor < 2**63 else floor


def _no_type(write: Any) -> Any:
    """What a callable does when it is called is its own affair."""
    return 5 if callable(write) else write


def test_there_are_enough_values() -> None:
    """About ten thousand values are tried on each store."""
    assert len(SLOTS) * len(VALUES) > 8_000


@pytest.fixture(autouse=True)
def _nothing_left_open(engine: sa.Engine) -> Iterator[None]:
    yield
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    with engine.connect() as connection:
        statement = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%' AND datname = :name"
        assert connection.execute(sa.text(statement), {"name": engine.url.database}).scalar_one() == 0


@pytest.mark.parametrize("slot", SLOTS)
def test_bad_arguments_are_refused_alike(slot: str, stores: Stores) -> None:
    """G24: any value of any argument: an answer or a documented error, the same from memory and from PostgreSQL."""
    memory = list(_verdicts(SLOTS[slot], MemoryEffectStore(), MemorySink()))
    postgres = list(_verdicts(SLOTS[slot], stores.effects, stores.sinks))
    assert postgres == memory
    assert {verdict for _, verdict in memory} <= DOCUMENTED


def _verdicts(slot: Slot, store: EffectStore, sink: Any) -> Iterator[tuple[int, str]]:
    """Yield for each value how the call ended. What is refused as an argument has changed nothing."""
    stage = Stage.set_up(store, sink)
    before = stage.seen()
    for number, value in enumerate(VALUES):
        verdict = _verdict(slot, stage, value)
        after = stage.seen()
        if after != before:
            assert verdict == "answer"
            stage = Stage.set_up(store, sink)
            after = stage.seen()
        before = after
        yield number, verdict


def _verdict(slot: Slot, stage: Stage, value: Any) -> str:
    try:
        slot(stage, value)
        return "answer"
    except PgrefError as error:
        return type(error).__name__
    except Exception as error:
        return f"{type(error).__name__} for a {type(value).__name__}: {error}"


def test_completion_within_a_transaction(stores: Stores) -> None:
    """G24: refused before anything is sent, so the caller's transaction lives on."""
    stage = Stage.set_up(stores.effects, stores.sinks)
    with stores.engine.begin() as connection:
        for value in VALUES:
            for arguments in _wrong(stage, value):
                with pytest.raises(InvalidArgument):
                    stores.effects.complete_within(connection, *arguments)
        assert connection.execute(sa.text("SELECT 1")).scalar_one() == 1


def _wrong(stage: Stage, value: Any) -> Iterator[tuple[Any, ...]]:
    if not isinstance(value, Action):
        yield value, stage.lease
    if not isinstance(value, Lease):
        yield stage.action, value
    if value is not None and not isinstance(value, str):
        yield stage.action, stage.lease, value


def test_large_values_are_kept_whole(engine: sa.Engine, schema: str) -> None:
    """G1, G24: 64 MB of result; a key or a fingerprint of that size is refused."""
    stores = Stores.open(engine, schema=schema, settle_seconds=300)
    stage, large = Stage.set_up(stores.effects, stores.sinks), "é" * (LARGE // 2)
    assert stores.effects.complete(stage.action, stage.lease, large) == large
    record = stores.effects.lookup(stage.action.key)
    assert record is not None
    assert record.result == large
    for field in ("key", "resource", "fingerprint"):
        with pytest.raises(InvalidArgument, match=field):
            replace(stage.fresh, **{field: large})  # type: ignore[arg-type]


def test_batches_over_the_limit(stores: Stores) -> None:
    """G24: a batch over BATCH_MAX is refused whole and nothing of it is granted or done."""
    actions = [Action(f"{uuid4()}", f"{uuid4()}") for _ in range(BATCH_MAX + 1)]
    for store in (stores.effects, MemoryEffectStore()):
        with pytest.raises(InvalidArgument):
            store.acquire_many(actions, TTL)
        assert store.lookup(actions[0].key) is None
        outcomes = store.acquire_many(actions[1:], TTL)
        granted = [outcome for outcome in outcomes if isinstance(outcome, Granted)]
        assert len(granted) == BATCH_MAX
        completions = [(action, g.lease, None) for action, g in zip(actions[1:], granted, strict=True)]
        with pytest.raises(InvalidArgument):
            store.complete_many([*completions, completions[0]])
        assert not any(store.complete_many(completions))


# The rest of the public face


def _accepts(function: Callable[..., object], *arguments: Any, **options: Any) -> bool:
    """Return whether the call was accepted. Anything but a documented error goes through."""
    try:
        function(*arguments, **options)
    except PgrefError:
        return False
    return True


DSNS = [
    *(
        "",
        "x",
        "://",
        "postgresql://",
        "postgresql://h:port/db",
        "postgresql://h:99999999/db",
        "sqlite://",
        "mysql://h/db",
    ),
    *(
        "postgresql+asyncpg://h/db",
        "postgresql://[::1",
        "postgresql://h/db?connect_timeout=soon",
        "postgresql://h/db?x=\0",
    ),
    *(
        "postgresql://h/db?prepare_threshold=-1",
        "host=localhost dbname=x",
        "postgresql://u:p%00@h/d",
        "postgresql://%zz@h/d",
    ),
]


def test_sources_of_stores() -> None:
    """G24: any value as an engine or a DSN: stores that connect at first use, or `InvalidArgument`."""
    accepted = [source for source in [*VALUES, *DSNS] if _accepts(Stores.open, source)]
    assert "postgresql://" in accepted
    assert all(isinstance(source, str) and source.startswith("postgresql") for source in accepted)


def test_settle_seconds(engine: sa.Engine) -> None:
    """G24, G26: a number of seconds or `InvalidArgument`."""
    accepted = [value for value in VALUES if _accepts(Stores.open, engine, settle_seconds=value)]
    assert accepted
    assert all(isinstance(value, int | float | Fraction) and 0.001 <= value <= TTL_SECONDS_MAX for value in accepted)


def test_names_of_schemas(engine: sa.Engine) -> None:
    """G24, G70: any value as the name of a schema: `InvalidArgument` before anything is sent, or a name."""
    refused = [value for value in VALUES if not _accepts(Stores.open, engine, schema=value)]
    assert all(isinstance(value, str) for value in VALUES if not any(value is other for other in refused))
    for value in refused:
        for function in (ensure_schema, verify_schema, drop_schema):
            with pytest.raises(InvalidArgument):
                function(engine, value)
        with pytest.raises(InvalidArgument):
            migration_sql(value)


UNUSUAL_NAMES = ['with "quotes"', "x" * 63, "é" * 31, "'; DROP SCHEMA public; --", "SELECT", "a b\tc", "$$"]


@pytest.mark.parametrize("name", UNUSUAL_NAMES)
def test_unusual_schemas_work(engine: sa.Engine, name: str) -> None:
    """G70: the name is quoted everywhere."""
    stores = Stores.open(engine, schema=name)
    stores.ensure_schema()
    stage = Stage.set_up(stores.effects, stores.sinks)
    stores.effects.complete(stage.action, stage.lease, "r")
    stores.sinks.seal("r", 7)
    assert stores.sinks.seen_fence("r") == 7
    drop_schema(engine, name)


def test_schema_names_one_byte_too_long(engine: sa.Engine) -> None:
    """G70: PostgreSQL would cut it off, so that two names meant one schema."""
    for name in ("x" * 64, "é" * 31 + "xx"):
        with pytest.raises(InvalidArgument, match="63 bytes"):
            ensure_schema(engine, name)
    with pytest.raises(InvalidArgument):
        new_schema(engine, prefix="x" * 60)


def test_fingerprints_and_idempotency_keys() -> None:
    """G9, G24: any value: a text that can be stored, or `InvalidArgument`."""
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for value in [*VALUES, deep, {"a": {1: deep}}, [float("nan")]]:
        if _accepts(fingerprint, value):
            assert len(fingerprint(value)) == 64
        _accepts(idempotency_key, value)


class Untold(Exception):
    """An error that cannot even be told."""

    def __str__(self) -> str:
        raise ValueError


class Unwilling:
    def __json__(self) -> str:
        raise Untold


def _nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def test_any_result_of_a_task_can_be_stored() -> None:
    """G24: a result that cannot be kept becomes a marker, so that the effect is done all the same."""
    large = ["x" * LARGE, b"x" * 2**20, _nested(1, 100_000), {"a": _nested({}, 100_000)}]
    unusual = [Unwilling(), {"a": object()}, {("a", 1): 2}, [float("nan")], {"a": Untold()}]
    for value in [*VALUES, *([value] for value in VALUES), *unusual, *large]:
        text, told = dump_result("key", value, 100_000)
        assert len(text) <= 100_000
        assert Action("key", "r", payload=text).payload == text
        assert (load_result(text) is None) == (told is None)
