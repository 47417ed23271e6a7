"""`fenced_task` where it stands: options, names, keys. Nothing here needs a broker or a database."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from celery import Celery, Task, shared_task

from celery_integration import ConfigurationError, Effect, FencedTask, NotApplied, fenced_task, install
from celery_integration.settings import Settings
from pgref.errors import InvalidArgument


@fenced_task(key="order:{order_id}", resource="account:{account_id}")
def pay(effect: Effect, order_id: int, account_id: str, cents: int = 100) -> int:
    """Pay an order."""
    return cents


@fenced_task
def bare(effect: Effect, a: int) -> int:
    return a


@pytest.fixture(scope="module", autouse=True)
def app() -> Celery:
    app = Celery("decorator", broker="memory://", set_as_current=False)
    app.finalize()
    app.set_current()
    return app


def action(*args: Any, **kwargs: Any) -> Any:
    definition = pay.definition
    return definition.action(pay.name, definition.arguments(args, kwargs), "task-id")


def test_the_task_has_the_name_the_docs_and_the_signature_of_its_function() -> None:
    assert pay.name == "tests.unit.test_decorator.pay"
    assert pay.__doc__ == "Pay an order."
    assert str(inspect.signature(pay)) == "(order_id: 'int', account_id: 'str', cents: 'int' = 100) -> 'int'"


def test_two_functions_under_one_decorator_are_two_tasks() -> None:
    """FC-19."""
    assert {pay.name, bare.name} == {"tests.unit.test_decorator.pay", "tests.unit.test_decorator.bare"}


def test_a_missing_argument_fails_in_the_caller() -> None:
    with pytest.raises(TypeError, match="account_id"):
        pay.apply_async((1,))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((7, "x"), {}), ((7,), {"account_id": "x"}), ((), {"account_id": "x", "order_id": 7}), ((7, "x", 100), {})],
)
def test_every_spelling_of_a_call_is_one_effect(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """FC-21."""
    assert action(*args, **kwargs) == action(7, "x", cents=100)


def test_a_key_is_scoped_by_its_task_and_a_resource_is_shared() -> None:
    assert (action(7, "x").key, action(7, "x").resource) == ("tests.unit.test_decorator.pay:order:7", "account:x")


def test_the_scope_can_be_shared_on_purpose() -> None:
    @fenced_task(key="order:{order_id}", scope="orders", name="scoped")
    def scoped(effect: Effect, order_id: int) -> None: ...

    assert scoped.definition.action("scoped", {"order_id": 7}, "id").key == "orders:order:7"


def test_without_a_key_the_task_id_is_the_key() -> None:
    made = bare.definition.action(bare.name, {"a": 1}, "task-id")
    assert made.key == made.resource == "tests.unit.test_decorator.bare:task-id"


def test_a_key_can_be_a_function_of_the_arguments() -> None:
    @fenced_task(key=lambda day, **_: f"day:{day}", name="by_function")
    def by_function(effect: Effect, day: str, n: int = 1) -> None: ...

    assert by_function.definition.action("t", {"day": "mon", "n": 1}, "id").key == "t:day:mon"


def test_the_arguments_are_the_fingerprint() -> None:
    assert action(7, "x", 100).fingerprint != action(7, "x", 101).fingerprint


@pytest.mark.parametrize("bad", [1.5, None, True, b"x", [1], object()])
def test_what_has_no_stable_text_is_refused_in_the_caller(bad: object) -> None:
    with pytest.raises(InvalidArgument, match=r"^key 'order:\{order_id\}': only str, int and UUID"):
        pay.apply_async((bad, "x"))


@pytest.mark.parametrize("bad", ["x\0", "x" * 513, "\ud800"])
def test_a_key_that_the_store_would_refuse_is_refused_in_the_caller(bad: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^(key|resource) must"):
        pay.apply_async((1, bad))


def test_a_uuid_can_be_part_of_a_key() -> None:
    assert action(UUID(int=1), "x").key == action(str(UUID(int=1)), "x").key


def test_a_template_that_names_no_argument_fails_at_import() -> None:
    with pytest.raises(InvalidArgument, match=r"^key 'order:\{order\}' names 'order', which is not an argument"):

        @fenced_task(key="order:{order}")
        def wrong(effect: Effect, order_id: int) -> None: ...


@pytest.mark.parametrize("template", ["{", "{}", "{0}", "", 7])
def test_a_bad_template_fails_at_import(template: Any) -> None:
    with pytest.raises(InvalidArgument, match="^key "):

        @fenced_task(key=template)
        def wrong(effect: Effect, order_id: int) -> None: ...


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lease_seconds": 0}, InvalidArgument, "^lease_seconds must be"),
        ({"lease_seconds": True}, InvalidArgument, "^lease_seconds must be"),
        ({"sink": "paper"}, InvalidArgument, "^sink must be"),
        ({"retry_safety": "maybe"}, InvalidArgument, "^retry_safety must be"),
        ({"retry_safety": "unsafe"}, ConfigurationError, "contradicts"),
        ({"not_applied": (ValueError,)}, ConfigurationError, "^not_applied is for"),
        ({"sink": object()}, InvalidArgument, "^sink must be"),
        ({"single_commit": 1}, InvalidArgument, "^single_commit must be"),
        ({"single_commit": True, "sink": "external"}, ConfigurationError, "^single_commit is for"),
        ({"single_commit": True, "lease_seconds": 5}, ConfigurationError, "^single_commit has no lease"),
        ({"single_commit": True, "max_attempts": 5}, ConfigurationError, "^single_commit has no lease"),
        ({"settle_seconds": 5}, ConfigurationError, "^settle_seconds and trust_late_results are not for"),
        ({"trust_late_results": True}, ConfigurationError, "^settle_seconds and trust_late_results are not for"),
        ({"sink": "external", "settle_seconds": 0}, InvalidArgument, "^settle_seconds must be"),
        ({"sink": "external", "trust_late_results": 1}, InvalidArgument, "^trust_late_results must be a bool"),
        ({"max_attempts": 0}, InvalidArgument, "^max_attempts must be"),
        ({"max_attempts": True}, InvalidArgument, "^max_attempts must be"),
        ({"sink": "external", "not_applied": ("ValueError",)}, InvalidArgument, "^not_applied must hold"),
        ({"bind": True}, ConfigurationError, "^bind is not needed"),
        ({"base": object}, ConfigurationError, "^base must be a class of tasks"),
        ({"scope": ""}, InvalidArgument, "^scope must be"),
    ],
)
def test_a_bad_option_fails_at_import(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):

        @fenced_task(**options)
        def wrong(effect: Effect) -> None: ...


def test_a_function_without_the_effect_fails_at_import() -> None:
    with pytest.raises(ConfigurationError, match="first argument"):

        @fenced_task  # type: ignore[arg-type]
        def wrong() -> None: ...


def test_a_task_under_the_decorator_fails_at_import() -> None:
    with pytest.raises(ConfigurationError, match="take the other task decorator away"):

        @fenced_task
        @shared_task
        def wrong(effect: Effect) -> None: ...


def test_a_probe_must_take_the_tasks_arguments() -> None:
    @fenced_task(sink="external", name="probed")
    def probed(effect: Effect, order_id: int) -> None: ...

    with pytest.raises(ConfigurationError, match="must take the arguments of"):

        @probed.probe  # type: ignore[arg-type]
        def wrong(effect: Effect, other: int) -> NotApplied:
            return NotApplied()


def test_a_database_effect_takes_no_probe() -> None:
    with pytest.raises(ConfigurationError, match="needs no probe"):
        bare.probe(lambda effect, a: NotApplied())


def test_without_a_database_the_setting_to_make_is_named(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FENCED_DSN", raising=False)
    with pytest.raises(ConfigurationError, match="call install"):
        install(app)


def test_the_environment_can_name_the_database(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCED_DSN", "postgresql://somewhere/db")
    assert Settings.of(app).dsn == "postgresql://somewhere/db"


def test_a_file_can_name_the_database(app: Celery, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As a secret in a file; what is set elsewhere comes first."""
    secret = tmp_path / "dsn"
    monkeypatch.delenv("FENCED_DSN", raising=False)
    monkeypatch.setenv("FENCED_DSN_FILE", str(secret))
    with pytest.raises(ConfigurationError, match="^FENCED_DSN_FILE: .*dsn cannot be read: FileNotFoundError$"):
        Settings.of(app)
    secret.write_text("postgresql://somewhere/secret\n")
    assert Settings.of(app).dsn == "postgresql://somewhere/secret"
    monkeypatch.setenv("FENCED_DSN", "postgresql://somewhere/db")
    assert Settings.of(app).dsn == "postgresql://somewhere/db"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lease_seconds": -1}, "^fenced_lease_seconds must be"),
        ({"sweep_batch_max": 0}, "^fenced_sweep_batch_max must be"),
        ({"result_bytes_max": 0}, "^fenced_result_bytes_max must be"),
        ({"probe_seconds": 0}, "^fenced_probe_seconds must be"),
        ({"probe_seconds": 11, "reconcile_seconds": 10}, "^fenced_probe_seconds must not exceed"),
        ({"renew_seconds": True}, "^fenced_renew_seconds must be"),
        ({"retention_seconds": -1}, "^fenced_retention_seconds must be"),
        ({"dispatch_seconds": float("nan")}, "^fenced_dispatch_seconds must be"),
        ({"hash_keys": "yes"}, "^fenced_hash_keys must be"),
        ({"leese_seconds": 1}, "no setting 'leese_seconds'; known are"),
    ],
)
def test_a_bad_setting_is_refused_with_its_name(settings: dict[str, Any], message: str) -> None:
    app = Celery("settings", set_as_current=False)
    with pytest.raises(InvalidArgument, match=message):
        install(app, dsn="postgresql://somewhere/db", **settings)


def test_a_base_of_the_users_stays_a_fenced_task() -> None:
    class Audited(Task):  # type: ignore[type-arg]
        abstract = True
        acks_late = False

    @fenced_task(base=Audited, name="with_base")
    def with_base(effect: Effect) -> None: ...

    task = with_base._get_current_object()
    assert isinstance(task, FencedTask)
    assert isinstance(task, Audited)
    assert task.acks_late
