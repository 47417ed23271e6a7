"""`celery fenced …`: what whoever is on call sees and does, and the exit codes that scripts go by."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner, Result

from celery_integration import NotApplied, Unknown, schedule
from celery_integration.cli import fenced
from celery_integration.cli.output import age, printable
from celery_integration.process import Gate
from pgref.clock import ManualClock
from pgref.contracts.effects import Action, Granted, State
from pgref.errors import Unavailable
from pgref.postgres import migration_sql
from tests.backlog.doubt import LEASE, PAUSE, Backlog, action_of, asked, booked, harmless, risky, unasked, verdicts

ROOT = Path(__file__).parents[2]
WHO = ("--by", "ann", "--why", "seen in the ledger")

Run = Callable[..., Result]


@pytest.fixture
def run(app: Celery, gate: Gate) -> Run:
    def run(*arguments: str, says: str | None = None, code: int = 0) -> Result:
        result = CliRunner().invoke(fenced, arguments, obj=SimpleNamespace(app=app), input=says)
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return run


def columns(text: str) -> list[list[str]]:
    """Return the cells of a plain table."""
    return [[cell for cell in line.split("  ") if cell] for line in text.splitlines() if line]


# Looking


def test_status_of_nothing(run: Run) -> None:
    assert run("status", "--check").output == "nothing is in flight, in doubt or due\n"
    assert json.loads(run("status", "--json").output)["tallies"] == []


def test_status_counts_by_state_task_and_reason(run: Run, backlog: Backlog, clock: ManualClock) -> None:
    backlog.uncertain(risky, "a", "b")
    backlog.uncertain(unasked, "c")
    backlog.swept()
    backlog.uncertain(risky, "d", "e")
    clock.tick(90)
    backlog.granted(booked, "running")
    rows = [[cell.strip() for cell in row] for row in columns(run("status", "--check", code=3).output)]
    assert ["in_flight", "sweep database", "1", "0s"] in rows
    assert ["parked", "sweep unasked", "1", "1m 30s", "test"] in rows
    assert ["uncertain", "sweep", "2", "1m 30s", "test"] in rows
    assert rows[-1] == ["waiting for a sweep for 1m 30s"]
    told = json.loads(run("status", "--json").output)
    assert told["sweep_late_seconds"] == 90
    assert {tally["kind"] for tally in told["tallies"]} == {"in_flight", "parked", "uncertain"}


def test_the_backlog_is_listed_and_filtered(run: Run, backlog: Backlog, clock: ManualClock) -> None:
    verdicts["b"] = Unknown("the ledger is late")
    backlog.uncertain(unasked, "a")
    backlog.uncertain(risky, "b")
    backlog.swept()
    clock.tick(2 * 3600)
    backlog.uncertain(risky, "c")

    def listed(*options: str) -> list[str]:
        return [record["key"] for record in json.loads(run("backlog", "--json", *options).output)]

    assert listed() == ["sweep unasked:a", "sweep:b", "sweep:c"]
    assert listed("--task", risky.name) == ["sweep:b", "sweep:c"]
    assert listed("--prefix", "sweep u") == ["sweep unasked:a"]
    assert listed("--reason", "test", "--older-than", "1h") == ["sweep unasked:a", "sweep:b"]
    assert listed("--parked") == ["sweep unasked:a"]
    assert listed("--waiting", "--older-than", "90m") == ["sweep:b"]
    assert listed("--limit", "2") == ["sweep unasked:a", "sweep:b"]
    assert listed("--limit", "2", "--after", "sweep:b") == ["sweep:c"]
    assert listed("--older-than", "1d") == []
    text = run("backlog", "--check", "--limit", "2", code=3).output
    assert "the ledger is late" in text
    assert "a person's" in text
    assert "--after 'sweep:b'" in text
    assert run("backlog", "--check", "--older-than", "1d").output == "nothing is in doubt\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--older-than", "soon"), "is not a time span"),
        (("--limit", "0"), "0 is not in the range"),
        (("--task", "nobody"), "is no fenced task; those are"),
        (("--task", "a", "--prefix", "b"), "exclude one another"),
        (("--after", "x" * 513), "512 bytes"),
    ],
)
def test_a_bad_option_is_named(run: Run, options: tuple[str, ...], said: str) -> None:
    assert said in run("backlog", *options, code=2).output


def test_show_tells_all_but_what_is_confidential(run: Run, backlog: Backlog) -> None:
    verdicts["a"] = Unknown("the ledger is late")
    backlog.uncertain(risky, "a")
    backlog.swept()
    text = run("show", "sweep:a").output
    assert "the ledger is late" in text
    assert "marked" in text
    told = json.loads(run("show", "sweep:a", "--json").output)
    assert (told["state"], told["task"], told["looks"]) == ("uncertain", risky.name, 1)
    assert not {"args", "kwargs", "result", "payload"} & told.keys()
    assert [entry["event"] for entry in told["history"]] == ["marked"]
    assert json.loads(run("show", "sweep:a", "--json", "--arguments").output)["args"] == ["a"]


def test_evidence_is_shown(run: Run, backlog: Backlog, gate: Gate) -> None:
    action, granted = backlog.granted(harmless, "late")
    gate.effects.mark_uncertain(action, granted.lease, "silent")
    run("resolve", action.key, "--not-applied", "--yes", *WHO)
    gate.effects.complete_many([(action, granted.lease, '"secret"')])
    assert "too late" in run("show", action.key).output
    assert "secret" not in run("show", action.key).output
    [late] = json.loads(run("show", action.key, "--json", "--arguments").output)["evidence"]
    assert late["result"] == '"secret"'


def test_a_key_that_is_not_known(run: Run) -> None:
    for command in (("show",), ("resolve", "--applied", *WHO)):
        assert "is not known" in run(*command, "nobody", code=4).output


def test_a_key_cannot_play_tricks_on_a_terminal(run: Run, gate: Gate) -> None:
    action = Action("evil\x1b[2J\u202e", "evil")
    granted = gate.effects.acquire(action, LEASE)
    assert isinstance(granted, Granted)
    gate.effects.mark_uncertain(action, granted.lease, "line\nbreak \x07")
    for command in (("backlog",), ("show", action.key), ("status",)):
        assert not set("\x1b\x07\u202e") & set(run(*command).output)


# Settling


def test_applied_ends_the_doubt(run: Run, backlog: Backlog) -> None:
    backlog.uncertain(risky, "a")
    text = run("resolve", "sweep:a", "--applied", "--result", '"ch_1"', *WHO, says="y\n").output
    assert 'its task returns "ch_1"' in text
    record = backlog.record(risky, "a")
    assert (record.state, record.result) == (State.DONE, '"ch_1"')
    last = backlog.gate.effects.history(record.key)[-1]
    assert (last.by, last.why) == ("ann", "seen in the ledger")


def test_nothing_is_done_unless_it_is_confirmed(run: Run, backlog: Backlog) -> None:
    backlog.uncertain(risky, "a")
    run("resolve", "sweep:a", "--applied", *WHO, says="n\n", code=1)
    assert backlog.record(risky, "a").state is State.UNCERTAIN


def test_not_applied_sends_it_again(run: Run, backlog: Backlog) -> None:
    backlog.uncertain(harmless, "a")
    text = run("resolve", "sweep safe:a", "--not-applied", *WHO, says="y\n").output
    assert "its message is sent" in text
    assert backlog.swept().dispatched == 1
    assert asked["a"] == 0


def test_what_is_not_safe_needs_force(run: Run, backlog: Backlog) -> None:
    """G20. A refusal leaves it where it was."""
    backlog.uncertain(unasked, "a")
    backlog.swept()
    assert "--force" in run("resolve", "sweep unasked:a", "--not-applied", "--yes", *WHO, code=7).output
    assert backlog.record(unasked, "a").parked
    run("resolve", "sweep unasked:a", "--not-applied", "--force", "--yes", *WHO)
    assert backlog.record(unasked, "a").state is State.FREE


@pytest.mark.parametrize("first", ["--applied", "--not-applied"])
def test_the_first_ruling_stands(run: Run, backlog: Backlog, first: str) -> None:
    """G19: the same again changes nothing, and the contrary is refused."""
    backlog.uncertain(harmless, "a")
    key = "sweep safe:a"
    for _ in range(2):
        run("resolve", key, first, "--yes", *WHO)
    [other] = {"--applied", "--not-applied"} - {first}
    before = backlog.record(harmless, "a")
    assert "nothing was changed" in run("resolve", key, other, "--yes", *WHO, code=6).output
    assert backlog.record(harmless, "a") == before
    if first == "--applied":
        run("resolve", key, "--applied", "--result", "1", "--yes", *WHO, code=6)


def test_what_is_in_flight_cannot_be_ruled_on(run: Run, backlog: Backlog, clock: ManualClock) -> None:
    """G19. Once its lease has ended it can, before any sweep."""
    backlog.granted(harmless, "a")
    for word in ("--applied", "--not-applied"):
        assert "in_flight" in run("resolve", "sweep safe:a", word, "--yes", *WHO, code=8).output
    clock.tick(LEASE)
    run("resolve", "sweep safe:a", "--not-applied", "--yes", *WHO)


def test_what_a_reconciler_looks_into_is_not_freed_meanwhile(run: Run, backlog: Backlog, gate: Gate) -> None:
    """G18. That it happened can be said at any time."""
    backlog.uncertain(harmless, "a")
    gate.effects.claim_backlog(1, PAUSE)
    assert "right now" in run("resolve", "sweep safe:a", "--not-applied", "--yes", *WHO, code=5).output
    run("resolve", "sweep safe:a", "--applied", "--yes", *WHO)


def test_what_cannot_be_shut_out_of_its_sink_is_not_freed(
    run: Run, backlog: Backlog, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G27: what was sent could still arrive."""
    backlog.uncertain(harmless, "a")
    monkeypatch.setattr("celery_integration.cli.operate.shut_out", lambda *_: "ConnectionError: away")
    assert "cannot be sealed" in run("resolve", "sweep safe:a", "--not-applied", "--yes", *WHO, code=1).output
    record = backlog.record(harmless, "a")
    assert (record.state, record.next_look_at) == (State.UNCERTAIN, clock.now() + timedelta(seconds=PAUSE))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--not-applied", "--result", "1"), "--result is for --applied"),
        (("--applied", "--result", "{"), "--result is not JSON"),
        (("--applied", "--force"), "--force is for --not-applied"),
        ((), "--applied or --not-applied"),
    ],
)
def test_a_ruling_that_contradicts_itself(run: Run, options: tuple[str, ...], said: str) -> None:
    assert said in run("resolve", "a", *options, *WHO, code=2).output


def test_who_and_why_must_be_said(run: Run) -> None:
    assert "--by" in run("resolve", "a", "--applied", "--why", "x", code=2).output
    assert "--why" in run("resolve", "a", "--applied", "--by", "x", code=2).output


def test_a_sweep_by_hand(run: Run, backlog: Backlog) -> None:
    verdicts["b"] = NotApplied()
    backlog.uncertain(risky, "a", "b")
    assert json.loads(run("sweep", "--json").output) == {
        "expired": 0,
        "settled": 1,
        "put_off": 1,
        "parked": 0,
        "dispatched": 0,
    }
    assert ["settled", "0"] in [[cell.strip() for cell in row] for row in columns(run("sweep").output)]


def test_the_database_is_away(run: Run, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> None:
        raise Unavailable("the database is away")

    monkeypatch.setattr(gate, "effects", SimpleNamespace(tallies=away, now=away))
    assert run("status", code=1).output == "Error: Unavailable: the database is away\n"


# The doctor


def findings(run: Run, code: int = 0) -> dict[str, tuple[str, str]]:
    told = json.loads(run("doctor", "--json", code=code).output)
    return {finding["subject"]: (finding["verdict"], finding["text"]) for finding in told}


@pytest.fixture
def scheduled(app: Celery, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Celery:
    """The app with all that the doctor looks for; no worker answers, so the wait for one is short."""
    monkeypatch.setattr("celery_integration.cli.doctor.WORKERS_SECONDS", 0.05)
    gate.stores.ensure_schema()
    app.conf.beat_schedule = {}
    schedule(app)
    return app


def test_what_the_doctor_finds_well(run: Run, scheduled: Celery) -> None:
    found = findings(run)
    for subject in ("database", "schema", "sweep", "backlog", "broker", "beat"):
        assert found[subject][0] == "ok", found[subject]
    assert found["clock"][0] == "warning"  # the test's stands still
    assert found["role"] == ("warning", "postgres is a superuser: nothing is forbidden to it; see grant_application")
    assert found["workers"][0] == "warning"
    assert "no probe" in found[f"task {unasked.name}"][1]
    assert "ok" in run("doctor").output


def test_a_sweep_that_does_not_come_is_a_fault(
    run: Run, scheduled: Celery, backlog: Backlog, clock: ManualClock
) -> None:
    backlog.granted(booked, "silent")
    clock.tick(LEASE + 91)
    assert findings(run, code=9)["sweep"][0] == "fault"
    backlog.swept()
    assert findings(run)["sweep"][0] == "ok"


def test_what_is_parked_is_a_warning(run: Run, scheduled: Celery, backlog: Backlog) -> None:
    backlog.uncertain(unasked, "a")
    backlog.swept()
    verdict, text = findings(run)["backlog"]
    assert (verdict, text.split(",")[0]) == ("warning", "1 in doubt")


@pytest.mark.parametrize(
    ("setting", "value", "subject", "verdict"),
    [
        ("beat_schedule", {}, "beat", "fault"),
        ("worker_pool", "eventlet", "pool", "fault"),
        ("broker_url", "redis://127.0.0.1:1/0", "broker", "fault"),
    ],
)
def test_what_is_at_fault(
    run: Run, scheduled: Celery, monkeypatch: pytest.MonkeyPatch, setting: str, value: Any, subject: str, verdict: str
) -> None:
    monkeypatch.setitem(scheduled.conf, setting, value)
    assert findings(run, code=9)[subject][0] == verdict


def test_settings_that_contradict_one_another(run: Run, scheduled: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scheduled.conf, "broker_url", "redis://127.0.0.1:1/0")
    monkeypatch.setitem(scheduled.conf, "broker_transport_options", {"visibility_timeout": 50})
    monkeypatch.setattr(scheduled.tasks[risky.name], "time_limit", 100)
    monkeypatch.setattr(scheduled.tasks[harmless.name], "acks_late", False)
    found = findings(run, code=9)
    assert "visibility_timeout = 50 s" in found[f"task {risky.name}"][1]
    assert found[f"task {harmless.name}"][0] == "fault"


@pytest.mark.parametrize(("kept", "verdict"), [(None, "ok"), (50, "fault"), (51, "ok")])
def test_what_is_forgotten_must_not_come_again(
    run: Run, scheduled: Celery, gate: Gate, monkeypatch: pytest.MonkeyPatch, kept: float | None, verdict: str
) -> None:
    """FC-43: a copy that comes after its effect was removed runs it again."""
    monkeypatch.setitem(scheduled.conf, "broker_url", "redis://127.0.0.1:1/0")
    monkeypatch.setitem(scheduled.conf, "broker_transport_options", {"visibility_timeout": 50})
    monkeypatch.setattr(gate, "settings", replace(gate.settings, retention_seconds=kept))
    assert findings(run, code=9)["retention"][0] == verdict


def test_the_schema_is_missing(run: Run, scheduled: Celery, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise Unavailable("no schema")

    monkeypatch.setattr("celery_integration.cli.doctor.verify_schema", missing)
    assert findings(run, code=9)["database"] == ("fault", "Unavailable: no schema")


# As a command


def test_migrate_prints_its_statements(run: Run) -> None:
    assert run("migrate", "--sql").output.strip() == migration_sql().strip()


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0s"), (59.9, "59s"), (60, "1m 0s"), (3661, "1h 1m"), (90_000, "1d 1h")]
)
def test_ages(seconds: float, text: str) -> None:
    assert age(seconds) == text


def test_printable() -> None:
    assert printable("a\x1b[31m\nü") == "a\\x1b[31m\\nü"
    assert printable(None) == ""


def test_celery_knows_the_command(app: Celery, gate: Gate, tmp_path: Path) -> None:
    """In a process of its own, as it is typed: migrate, status, and a doctor that finds no beat."""
    tmp_path.joinpath("somebodys.py").write_text(
        "from celery import Celery\nfrom celery_integration import install\n"
        "app = Celery('somebodys', broker='memory://')\ninstall(app)\n"
    )
    environment = {**os.environ, "FENCED_DSN": gate.settings.dsn, "PYTHONPATH": f"{tmp_path}:{ROOT}"}

    def typed(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "celery", "-A", "somebodys", "fenced", *words]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    migrated = typed("migrate")
    assert (migrated.returncode, migrated.stdout) == (0, "schema pgref is up to date\n"), migrated.stderr
    assert json.loads(typed("status", "--json").stdout)["tallies"] == []
    doctor = typed("doctor", "--json")
    found = {finding["subject"]: finding["verdict"] for finding in json.loads(doctor.stdout)}
    assert (doctor.returncode, found["beat"], found["clock"]) == (9, "fault", "ok")
    assert typed("show", "nobody").returncode == 4


def test_actions_are_those_of_the_tasks(app: Celery) -> None:
    assert action_of(app, risky, "a").key == "sweep:a"
