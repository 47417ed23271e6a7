"""The pure parts of the demo, its card processor and its leash. The demo as a whole is an acceptance test."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from examples.worker import demo, leash
from examples.worker.column import Pace
from examples.worker.load import TASKS, deliveries, place
from examples.worker.processor import BadRequest, ChargeRequest, Ledger, Provider, fate, read_charges
from examples.worker.progress import Progress
from examples.worker.settings import Settings
from examples.worker.tally import Kills, Left, Result, Tally, order_of, table, tally, verdict, wrong

CLEAN = tally([1, 2], [1, 2], [2, 1], [])
DIRTY = tally([1, 2], [1, 2, 2], [1, 2], [])


def result(counts: Tally, title: str = "fenced") -> Result:
    return Result(title, counts, Kills(20, 3), (), 31.4, 0)


class TestOptions:
    def test_defaults(self) -> None:
        assert demo.parse([]) == demo.Options(orders=200, kill_every=1.0, seed=1, provider="keys", keep=False)

    def test_all(self) -> None:
        argv = ["--orders", "1000", "--kill-every", "0.5", "--seed", "7", "--provider", "none", "--keep"]
        assert demo.parse(argv) == demo.Options(1000, 0.5, 7, "none", keep=True)

    @pytest.mark.parametrize(
        ("argv", "says"),
        [
            (["--orders", "0"], "must be 1 to 100000, not 0"),
            (["--orders", "many"], "must be a number, not 'many'"),
            (["--kill-every", "0"], "must be more than 0 and at most 3600 seconds, not 0"),
            (["--kill-every", "nan"], "must be more than 0"),
            (["--provider", "some"], "invalid choice"),
        ],
    )
    def test_a_bad_value_is_refused_with_its_limit(
        self, argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as exit_:
            demo.parse(argv)
        assert exit_.value.code == 2
        assert says in capsys.readouterr().err


class TestSettings:
    def test_survive_the_environment(self) -> None:
        settings = Settings("redis://x/0", "postgresql+psycopg://y", "http://z", "none")
        assert Settings.from_environment(settings.to_environment()) == settings

    def test_a_missing_one_is_named(self) -> None:
        with pytest.raises(SystemExit, match="set FENCED_DSN to the DSN of PostgreSQL"):
            Settings.from_environment({"BROKER_URL": "redis://x/0"})


class TestLoad:
    def test_every_message_is_delivered_twice_under_one_id(self) -> None:
        plan = deliveries(place(50, seed=3), seed=3)
        assert set(Counter((d.task, d.order, d.message_id) for d in plan).values()) == {2}
        assert len(plan) == 2 * 50 * len(TASKS)

    def test_deliveries_stand_in_order(self) -> None:
        positions = [d.position for d in deliveries(place(50, seed=3), seed=3)]
        assert positions == sorted(positions)
        assert 0 <= positions[0] <= positions[-1] <= 1

    def test_the_seed_decides(self) -> None:
        assert place(9, seed=1) == place(9, seed=1) != place(9, seed=2)

    @pytest.mark.parametrize("orders", [1, 3, 200])
    def test_accounts_are_shared(self, orders: int) -> None:
        assert {o.account_id for o in place(orders, seed=1)} <= set(range(1, max(1, orders // 4) + 1))


class TestPace:
    def test_at_least_twenty_kills_fit_into_the_placing(self) -> None:
        assert Pace.of(200, 1.0).placing_seconds >= 20

    def test_rare_kills_do_not_make_it_endless(self) -> None:
        assert Pace.of(1, 3600.0).chaos_seconds_max < 60


class TestTally:
    def test_all_well(self) -> None:
        assert (CLEAN.orders, CLEAN.charges, CLEAN.bookings, CLEAN.uncertain) == (2, 2, 2, 0)
        assert (CLEAN.duplicates, CLEAN.lost) == (0, 0)

    def test_each_one_too_many_is_a_duplicate(self) -> None:
        counts = tally([1, 2], [1, 1, 1, 2], [1, 2, 2], [])
        assert (counts.duplicate_charges, counts.duplicate_bookings, counts.duplicates) == (2, 1, 3)

    def test_a_duplicate_does_not_make_up_for_a_loss(self) -> None:
        counts = tally([1, 2], [1, 1], [1, 2], [])
        assert (counts.charges, counts.duplicate_charges, counts.lost_charges) == (2, 1, 1)

    def test_what_is_left_uncertain_is_not_lost_for_its_own_task_only(self) -> None:
        counts = tally([1], [], [], [Left("shop.charge:order:1", "lease expired")])
        assert (counts.lost_charges, counts.lost_bookings, counts.uncertain) == (0, 1, 1)

    def test_order_of_a_key(self) -> None:
        assert (order_of("shop.charge:order:12"), order_of("shop.charge:refund")) == (12, None)

    def test_wrong_orders_are_named(self) -> None:
        left = [Left("shop.book:order:3", "lease expired")]
        assert wrong([1, 2, 3], [1, 1, 2, 3], [1], left) == [
            "order 1: charge took place 2 times",
            "order 2: book is lost",
        ]


class TestVerdict:
    def test_a_duplicate_or_a_loss_under_the_gate_fails(self) -> None:
        for bad in (DIRTY, tally([1], [], [1], [])):
            code, sentence = verdict(result(bad), result(DIRTY))
            assert code == 1
            assert sentence.startswith("FAILED")

    def test_an_unharmed_plain_column_means_too_gentle(self) -> None:
        code, sentence = verdict(result(CLEAN), result(CLEAN))
        assert code == 0
        assert "too gentle" in sentence

    def test_what_waits_for_a_person_is_said_and_no_failure(self) -> None:
        code, sentence = verdict(result(replace(CLEAN, uncertain=4)), result(DIRTY))
        assert code == 0
        assert "4 wait for a person" in sentence

    def test_well(self) -> None:
        assert verdict(result(CLEAN), result(DIRTY)) == (0, "Everything took place exactly once under the gate")

    def test_the_table_holds_both_columns(self) -> None:
        lines = table([result(CLEAN), result(DIRTY, "plain Celery")]).splitlines()
        assert lines[0].split(maxsplit=1) == ["fenced", "plain Celery"]
        rows = {line[:30].strip(): line[30:].split("  ") for line in lines[2:]}
        assert list(filter(None, rows["duplicates"])) == ["0", "1 (1 charges, 0 bookings)"]
        assert len({len(line) for line in lines}) == 1


class TestLedger:
    REQUEST = ChargeRequest(order=7, cents=300, idempotency_key="k", fence=1)

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        return tmp_path / "charges.jsonl"

    @pytest.mark.parametrize(("provider", "applied"), [("keys", 1), ("none", 8)])
    def test_one_key_at_once_from_many_sides(self, file: Path, provider: Provider, applied: int) -> None:
        ledger, barrier = Ledger(file, provider), threading.Barrier(8)

        def post(_: int) -> str:
            barrier.wait()
            return ledger.apply(self.REQUEST).id

        with ThreadPoolExecutor(8) as pool:
            answers = set(pool.map(post, range(8)))
        assert len(read_charges(file)) == len(answers) == applied

    def test_without_a_key_every_request_is_applied(self, file: Path) -> None:
        ledger = Ledger(file, "keys")
        for _ in range(2):
            ledger.apply(ChargeRequest(order=7, cents=300))
        assert [charge.order for charge in read_charges(file)] == [7, 7]

    def test_looks_up_by_key_and_by_order(self, file: Path) -> None:
        ledger = Ledger(file, "none")
        charge = ledger.apply(self.REQUEST)
        assert ledger.find(idempotency_key="k") == ledger.find(order=7) == charge
        assert ledger.find(idempotency_key="other") is ledger.find(order=8) is None

    def test_a_half_written_line_is_not_read(self, file: Path) -> None:
        Ledger(file, "keys").apply(self.REQUEST)
        with file.open("ab") as half:
            half.write(b'{"id": "ch')
        assert len(read_charges(file)) == 1

    @pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"order": 1, "cents": 0}', b'{"order": "1", "cents": 5}'])
    def test_a_bad_request_is_refused(self, body: bytes) -> None:
        with pytest.raises(BadRequest):
            ChargeRequest.from_json(body)


class TestFate:
    def test_the_seed_decides(self) -> None:
        assert fate(1, 7, 1) == fate(1, 7, 1)
        assert len({fate(1, 7, 1), fate(2, 7, 1), fate(1, 8, 1), fate(1, 7, 2)}) == 4

    def test_some_answers_are_lost_on_both_sides_of_the_charge(self) -> None:
        endings = Counter(fate(1, order, 1).ending for order in range(2000))
        assert 0.06 < endings["silent after applying"] / 2000 < 0.10
        assert 0.02 < endings["silent before applying"] / 2000 < 0.06

    def test_delays_stay_within_their_limits(self) -> None:
        totals = [f.before_seconds + f.after_seconds for f in (fate(1, order, 1) for order in range(500))]
        assert 0.02 <= min(totals) <= max(totals) <= 0.2001


class TestProgress:
    def test_a_terminal_gets_one_line_written_over(self) -> None:
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        stream = Terminal()
        progress = Progress(stream)
        progress.show("1 s")
        progress.show("2 s")
        progress.say("done")
        assert stream.getvalue().count("\n") == 1
        assert stream.getvalue().endswith("\rdone\n")

    def test_a_file_gets_a_line_now_and_then(self) -> None:
        stream = io.StringIO()
        progress = Progress(stream)
        progress.show("1 s")
        progress.show("1.1 s")
        assert stream.getvalue() == "1 s\n"


class TestLeash:
    PARENT = """
import subprocess, sys
from examples.worker import leash
subprocess.Popen(leash.command("child_of_the_test", "x"), cwd=sys.argv[1], start_new_session=True)
sys.stdin.read()
"""

    def test_a_child_ends_with_its_killed_parent(self, tmp_path: Path) -> None:
        """The child holds the write end of a pipe: the read end sees its start and its end."""
        (tmp_path / "child_of_the_test.py").write_text(
            "import sys, threading\nprint('up', flush=True)\nthreading.Event().wait()\n"
        )
        root = Path(leash.__file__).parents[2]
        with subprocess.Popen(
            [sys.executable, "-c", self.PARENT, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(root)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as parent:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"up\n"
            parent.send_signal(signal.SIGKILL)
            assert parent.stdout.read() == b""

    def test_a_child_that_lost_its_parent_before_it_was_tied_ends_at_once(self) -> None:
        command = leash.command("this", "x")
        command[3] = "1" if os.getpid() != 1 else "2"
        assert subprocess.run(command, check=False, cwd=Path(leash.__file__).parents[2]).returncode == 1
