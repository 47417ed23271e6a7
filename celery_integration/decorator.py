"""`fenced_task`: options become a frozen policy, checked where they are given; the function becomes a task."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar, overload

import psycopg
import sqlalchemy as sa
from celery import Task, shared_task
from celery.exceptions import Reject
from celery.local import Proxy
from sqlalchemy.orm import Session

from celery_integration.definition import Definition, Name, Policy, Sink, Verdict, without_effect
from celery_integration.effect import Effect
from celery_integration.errors import ConfigurationError
from celery_integration.task import FencedTask
from pgref.contracts.effects import RetrySafety
from pgref.errors import InvalidArgument, PgrefError

__all__ = ["FencedFunction", "fenced_task"]

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")


class AsyncResult(Protocol[R_co]):
    """What `delay` hands out: Celery's ``AsyncResult``, typed by the function's own result."""

    id: str

    def get(self, timeout: float | None = ..., propagate: bool = ..., **options: Any) -> R_co: ...
    def ready(self) -> bool: ...
    def successful(self) -> bool: ...
    @property
    def state(self) -> str: ...


class FencedFunction(Proxy, Generic[P, R_co]):  # type: ignore[type-arg]  # no subscript at run time
    # What the decorator leaves in place of the function: the Celery task of the current app, and `probe`.
    __doc__ = property(lambda self: self.definition.function.__doc__)
    definition: Definition

    if TYPE_CHECKING:
        name: str

        def __getattr__(self, attribute: str) -> Any: ...

    def __init__(self, definition: Definition, task: Callable[[], Any]) -> None:
        super().__init__(task)
        object.__setattr__(self, "definition", definition)

    def probe(self, function: Callable[Concatenate[Effect, P], Verdict]) -> Callable[Concatenate[Effect, P], Verdict]:
        """Register what is asked before an uncertain effect is ever run again. Takes the task's own arguments."""
        definition: Definition = object.__getattribute__(self, "definition")
        if definition.policy.in_transaction:
            raise ConfigurationError("a database effect needs no probe: not done means not applied")
        if without_effect(function).parameters.keys() != definition.signature.parameters.keys():
            raise ConfigurationError(
                f"{function.__qualname__} must take the arguments of {definition.function.__qualname__}"
            )
        definition.probe = function
        return function

    def apply_async(
        self, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> AsyncResult[R_co]:
        """As ``Task.apply_async``. Raises `InvalidArgument` if no key can be made from the arguments."""
        result: AsyncResult[R_co] = self._get_current_object().apply_async(args, kwargs, **options)
        return result

    def accept(
        self, session: Session | sa.Connection | psycopg.Connection[Any], *args: P.args, **kwargs: P.kwargs
    ) -> str:
        """Want the effect as of the commit of your own transaction; a rollback leaves nothing. Return the task id.

        The intent to run is a row in the gate's schema, so the transaction must be on the gate's database;
        ``fenced.sweep`` sends the message once it is committed, and again until a worker has taken it up. A key that is
        known already is not wanted twice. Raises `FingerprintMismatch`, or `InvalidArgument` if no key can be made or
        the arguments are not JSON.
        """
        task: FencedTask = self._get_current_object()
        return task.accept(session, args, kwargs)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        result: R_co = self._get_current_object()(*args, **kwargs)
        return result

    def delay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R_co]:
        """As ``Task.delay``. Raises `InvalidArgument` if no key can be made from the arguments."""
        result: AsyncResult[R_co] = self._get_current_object().delay(*args, **kwargs)
        return result


@overload
def fenced_task(function: Callable[Concatenate[Effect, P], R], /) -> FencedFunction[P, R]: ...
@overload
def fenced_task(
    *,
    key: Name | None = ...,
    resource: Name | None = ...,
    scope: str | None = ...,
    sink: Sink = ...,
    retry_safety: Literal["safe", "unsafe"] | RetrySafety | None = ...,
    lease_seconds: float | None = ...,
    not_applied: tuple[type[BaseException], ...] = ...,
    single_commit: bool = ...,
    max_attempts: int | None = ...,
    settle_seconds: float | None = ...,
    trust_late_results: bool = ...,
    **task_options: Any,
) -> Callable[[Callable[Concatenate[Effect, P], R]], FencedFunction[P, R]]: ...
def fenced_task(
    function: Callable[..., Any] | None = None,
    /,
    *,
    key: Name | None = None,
    resource: Name | None = None,
    scope: str | None = None,
    sink: Sink = "database",
    retry_safety: Literal["safe", "unsafe"] | RetrySafety | None = None,
    lease_seconds: float | None = None,
    not_applied: tuple[type[BaseException], ...] = (),
    single_commit: bool = False,
    max_attempts: int | None = None,
    settle_seconds: float | None = None,
    trust_late_results: bool = False,
    **task_options: Any,
) -> Any:
    """Make a Celery task that takes effect once. Works as ``shared_task``, bare or with options.

    The function's first argument is the `Effect`; callers see the rest.

    ``key`` names the effect: a template over the arguments, or a function of them. It is scoped by the task's name, or
    by ``scope``. Without a key the task id is the key: that covers redelivery and retry of one message, nothing more.
    ``resource`` names what two effects must not write at once; by default each key is its own.
    ``sink="database"``: the body's transaction commits with the completion. ``sink="external"``: no transaction is open
    during the body, completion follows it. A `FencedSink` of yours, such as ``RedisSink(client)``: what the body writes
    through ``effect.sink`` is written at its end, if no newer fence was seen; completion follows it.
    ``retry_safety="safe"``: the provider of an external effect de-duplicates by ``effect.idempotency_key``, so running
    it again is harmless. ``lease_seconds``: how long an attempt may stay silent; it is renewed while the body runs.
    ``not_applied``: exceptions of an external body that prove that nothing happened.
    ``single_commit``: judge, body and completion of a short database effect are one commit. There is no lease to renew
    and no intent to expire; a copy that arrives meanwhile is told at once, and comes back.
    ``max_attempts``: a key that was granted so often waits for a person (``fenced_max_attempts`` if not given).
    ``settle_seconds``: how long after its failure what an external effect did may still be invisible at the provider;
    its probe is not asked before. ``trust_late_results``: an attempt that ended well, but too late to be recorded, has
    taken effect; without it that is only told to the probe (``effect.late_results()``).
    All other options are Celery's own. A class of yours as ``base`` keeps its hooks and is made a `FencedTask` if it is
    none.

    Raises `InvalidArgument` or `ConfigurationError` where the decorator stands.
    """
    if function is not None:
        return _task(function, Policy(), task_options)
    policy = Policy(
        key=key,
        resource=resource,
        scope=scope,
        sink=sink,
        retry_safety=_safety(retry_safety),
        lease_seconds=lease_seconds,
        not_applied=tuple(not_applied),
        single_commit=single_commit,
        max_attempts=max_attempts,
        settle_seconds=settle_seconds,
        trust_late_results=trust_late_results,
    )
    return functools.partial(_task, policy=policy, options=task_options)


def _safety(value: str | None) -> RetrySafety | None:
    try:
        return None if value is None else RetrySafety(value)
    except ValueError:
        raise InvalidArgument(f"retry_safety must be 'safe' or 'unsafe', not {value!r}") from None


def _task(function: Callable[..., Any], policy: Policy, options: dict[str, Any]) -> FencedFunction[Any, Any]:
    if issubclass(type(function), (Proxy, Task)):
        raise ConfigurationError("fenced_task makes the task itself: take the other task decorator away")
    if options.pop("bind", False):
        raise ConfigurationError("bind is not needed: the task is effect.task")
    base = _base(options.pop("base", FencedTask))
    definition = Definition(function, policy)
    # Celery's own signals and our refusals are answers, not failures to try again.
    options["dont_autoretry_for"] = (*options.get("dont_autoretry_for", ()), PgrefError, Reject)
    share: Any = shared_task
    proxy = share(base=base, bind=True, definition=definition, **options)(_run(definition))
    return FencedFunction(definition, proxy._get_current_object)  # noqa: SLF001  what a Proxy stands for


def _base(base: Any) -> type[FencedTask]:
    if not (isinstance(base, type) and issubclass(base, Task)):
        raise ConfigurationError(f"base must be a class of tasks, not {base!r}")
    if issubclass(base, FencedTask):
        return base
    return types.new_class("FencedBase", (FencedTask, base), exec_body=lambda names: names.update(abstract=True))


def _run(definition: Definition) -> Callable[..., Any]:
    """Return the function that Celery runs: named, documented and typed as the user's, without the effect."""

    @functools.wraps(definition.function)
    def run(self: FencedTask, *args: Any, **kwargs: Any) -> Any:
        return self.run_fenced(args, kwargs)

    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [first, *definition.signature.parameters.values()]
    run.__signature__ = definition.signature.replace(parameters=_positional(parameters))  # type: ignore[attr-defined]
    names = {*definition.signature.parameters, "return"}
    run.__annotations__ = {name: hint for name, hint in run.__annotations__.items() if name in names}
    return run


def _positional(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    first, *rest = parameters
    if rest and rest[0].kind is inspect.Parameter.POSITIONAL_ONLY:
        return parameters
    return [first.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD), *rest]
