"""What a decorator was told: the policy of a task, its function and probe, and one call of it."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol
from uuid import UUID

import psycopg

from celery_integration.effect import Applied, Effect, NotApplied, Unknown
from celery_integration.errors import ConfigurationError
from pgref.contracts.effects import Action, RetrySafety
from pgref.contracts.sinks import FencedSink
from pgref.errors import InvalidArgument
from pgref.keys import fingerprint, valid_instance, valid_key, valid_limit, valid_ttl

if TYPE_CHECKING:
    from celery import Task

__all__ = ["Call", "Definition", "Name", "Policy", "Sink", "TransactionSink", "Verdict", "without_effect"]

Name = str | Callable[..., str]
Verdict = Applied | NotApplied | Unknown


class TransactionSink(Protocol):
    """A transaction of another library's on the gate's database, which carries body and completion."""

    def open(self) -> AbstractContextManager[psycopg.Connection[Any]]:
        """Begin, and commit at the end of the block; roll back if it raises. READ COMMITTED."""


Sink = Literal["database", "external"] | FencedSink[Any] | TransactionSink


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The options of one fenced task. Raises `InvalidArgument` or `ConfigurationError`, naming the option."""

    key: Name | None = None
    resource: Name | None = None
    scope: str | None = None
    sink: Sink = "database"
    retry_safety: RetrySafety | None = None
    lease_seconds: float | None = None
    not_applied: tuple[type[BaseException], ...] = ()
    single_commit: bool = False
    max_attempts: int | None = None
    settle_seconds: float | None = None
    trust_late_results: bool = False

    def __post_init__(self) -> None:
        self._check_sink()
        if self.lease_seconds is not None:
            valid_ttl(self.lease_seconds, "lease_seconds")
        if self.settle_seconds is not None:
            valid_ttl(self.settle_seconds, "settle_seconds")
        valid_instance(self.trust_late_results, bool, "trust_late_results")
        if self.max_attempts is not None:
            valid_limit(self.max_attempts, "max_attempts")
        if self.scope is not None:
            valid_key(self.scope, "scope")
        if not all(isinstance(cls, type) and issubclass(cls, BaseException) for cls in self.not_applied):
            raise InvalidArgument("not_applied must hold exception classes")

    def _check_sink(self) -> None:
        if (
            self.sink not in ("database", "external")
            and not hasattr(self.sink, "write_fenced")
            and not self.in_transaction
        ):
            raise InvalidArgument(f"sink must be 'database', 'external' or a fenced sink, not {self.sink!r}")
        if self.in_transaction and self.retry_safety is RetrySafety.UNSAFE:
            raise ConfigurationError("retry_safety='unsafe' contradicts a database sink: not done means not applied")
        if self.in_transaction and self.not_applied:
            raise ConfigurationError("not_applied is for sink='external': any exception undoes a database effect")
        if self.in_transaction and (self.settle_seconds, self.trust_late_results) != (None, False):
            raise ConfigurationError(
                "settle_seconds and trust_late_results are not for a database sink: nobody is asked"
            )
        valid_instance(self.single_commit, bool, "single_commit")
        if self.single_commit and self.sink != "database":
            raise ConfigurationError("single_commit is for sink='database': another sink commits by itself")
        if self.single_commit and (self.lease_seconds, self.max_attempts) != (None, None):
            raise ConfigurationError("single_commit has no lease, and leaves no attempts to count")

    @property
    def in_transaction(self) -> bool:
        """Whether the body's own transaction carries the completion."""
        return self.sink == "database" or hasattr(self.sink, "open")

    @property
    def safety(self) -> RetrySafety:
        """A database effect that is not done was not applied; an external one is unsafe unless the user says safe."""
        if self.in_transaction:
            return RetrySafety.SAFE
        return self.retry_safety or RetrySafety.UNSAFE


class Definition:
    """A decorated function with its policy and probe."""

    def __init__(self, function: Callable[..., Any], policy: Policy) -> None:
        self.function = function
        self.policy = policy
        self.probe: Callable[..., Verdict] | None = None
        self.signature = without_effect(function)
        for option in ("key", "resource"):
            _check_template(option, getattr(policy, option), self.signature)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the arguments by name with defaults applied, or None if they do not fit the signature."""
        try:
            return self.arguments(args, kwargs)
        except TypeError:
            return None

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """As `bind`, but raise the TypeError that calling the function would raise."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def action(self, task_name: str, arguments: dict[str, Any], task_id: str, payload: str | None = None) -> Action:
        """Return the action that these arguments mean: the same in caller and worker. Raises `InvalidArgument`."""
        own = task_id if self.policy.key is None else _fill("key", self.policy.key, arguments)
        key = f"{self.policy.scope or task_name}:{own}"
        resource = key if self.policy.resource is None else _fill("resource", self.policy.resource, arguments)
        return Action(key, resource, fingerprint(arguments), self.policy.safety, payload)


@dataclass(frozen=True)
class Call:
    """One invocation: its task, its action, its arguments."""

    task: Task[Any, Any]
    definition: Definition
    action: Action
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    lease_seconds: float

    @property
    def worker(self) -> str:
        """Who runs it, for the history."""
        return str(self.task.request.hostname or "direct call")

    def run(self, effect: Effect) -> Any:
        return self.definition.function(effect, *self.args, **self.kwargs)


def without_effect(function: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if not parameters or parameters[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        raise ConfigurationError(f"{function.__qualname__} must take the effect as its first argument")
    return signature.replace(parameters=parameters[1:])


def _check_template(option: str, name: Name | None, signature: inspect.Signature) -> None:
    if name is None or callable(name):
        return
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"{option} must be a template such as 'order:{{order_id}}', or a function")
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(name) if field is not None]
    except ValueError as error:
        raise InvalidArgument(f"{option} {name!r} is not a template: {error}") from None
    for field in fields:
        argument = field.split(".")[0].split("[")[0]
        if argument not in signature.parameters:
            known = ", ".join(signature.parameters) or "none"
            raise InvalidArgument(f"{option} {name!r} names {argument!r}, which is not an argument (those: {known})")


class _Strict(string.Formatter):
    """Fills a template with values whose text is the same in every process."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, bool) or not isinstance(value, (str, int, UUID)):
            raise InvalidArgument(f"only str, int and UUID can be part of a key, not {type(value).__name__}")
        text: str = super().format_field(value, format_spec)
        return text

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        if conversion:
            raise InvalidArgument("conversions such as !r cannot be part of a key")
        return value


def _fill(option: str, name: Name, arguments: Mapping[str, Any]) -> str:
    try:
        text = name(**arguments) if callable(name) else _Strict().vformat(name, (), arguments)
    except InvalidArgument as error:
        raise InvalidArgument(f"{option} {name!r}: {error}") from None
    except (LookupError, AttributeError, TypeError) as error:
        raise InvalidArgument(f"{option} {name!r} does not fit the arguments: {error}") from error
    return valid_key(text, option)
