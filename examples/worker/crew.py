"""The processes of a column, each on a leash, and the hand that kills them."""

from __future__ import annotations

import os
import random
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from examples.worker import leash
from examples.worker.supervised import READY_FILE
from examples.worker.tally import Kills

__all__ = ["Crew", "DemoError", "processor"]

WORKERS = 2
POOL_PROCESSES = 2
WHOLE_WORKER_EVERY = 8
"""Every so many kills hit a whole worker: it costs seconds of CPU to start, a pool process next to nothing."""
FAILED_STARTS_MAX = 3
LOG_LINES_SHOWN = 15

_ROOT = Path(__file__).resolve().parents[2]


class DemoError(Exception):
    """The demo cannot go on. The text says what to do."""


@dataclass(slots=True)
class Member:
    """A process that is started again whenever it ends. ``pool`` is how many processes a worker keeps, 0 for beat."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    logs: Path
    pool: int = 0
    failed_starts: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.logs / f"{self.name}.log"

    @property
    def ready(self) -> bool:
        """True when it has started: a worker whose pool is killed before that gives up."""
        return not self.pool or self._ready_file.exists()

    @property
    def _ready_file(self) -> Path:
        return self.logs / f"{self.name}.ready"

    def start(self) -> None:
        self._ready_file.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                cwd=_ROOT,
                env={**os.environ, **self.environment, **self._own_environment()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _own_environment(self) -> dict[str, str]:
        # A killed worker cannot remove its temporary directory.
        return {READY_FILE: str(self._ready_file), "TMPDIR": str(self.logs)}

    def mend(self) -> None:
        """Start it again if it ended by itself. Raises `DemoError` when it never comes up."""
        if self.process is None or self.process.poll() is None:
            return
        self.failed_starts = 0 if self.pool and self.ready else self.failed_starts + 1
        if self.failed_starts > FAILED_STARTS_MAX:
            raise DemoError(f"{self.name} ends by itself, its log says:\n{_tail(self.log)}")
        self.start()

    def kill(self) -> None:
        """Kill it with all its pool processes."""
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None

    def pool_processes(self) -> list[int]:
        return pool_processes(self.process.pid) if self.process and self.ready else []


class Crew:
    """Two workers and, for the gate, beat."""

    def __init__(self, module: str, queues: str, environment: Mapping[str, str], logs: Path, *, beat: bool) -> None:
        def member(name: str, pool: int, *arguments: str) -> Member:
            command = leash.command("celery", "-A", f"examples.worker.{module}", *arguments)
            return Member(name, command, environment, logs, pool)

        names = [f"{module}{number}" for number in range(1, WORKERS + 1)]
        schedule_file = str(logs / f"{module}-beat-schedule")
        beats = [member(f"{module}-beat", 0, "beat", "-s", schedule_file, "--max-interval", "1")] if beat else []
        self._workers = [member(name, POOL_PROCESSES, *_worker_arguments(name, queues)) for name in names]
        self._members = [*self._workers, *beats]
        self.kills = Kills()

    def __enter__(self) -> Self:
        for member in self._members:
            member.start()
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            member.kill()

    @property
    def ready(self) -> bool:
        return all(worker.ready for worker in self._workers)

    def mend(self) -> None:
        for member in self._members:
            member.mend()

    def kill_one(self, rng: random.Random) -> bool:
        """Kill a pool process, or now and then a whole worker, and return whether there was one to kill."""
        # Never both workers at once: nothing would be left to watch.
        killed = self._kill_worker(rng) if self._worker_due and self.ready else self._kill_pool_process(rng)
        self.kills += killed
        return killed.total > 0

    @property
    def _worker_due(self) -> bool:
        return self.kills.total >= WHOLE_WORKER_EVERY * (self.kills.workers + 0.5)

    def _kill_worker(self, rng: random.Random) -> Kills:
        worker = rng.choice(self._workers)
        worker.kill()
        worker.start()
        return Kills(workers=1)

    def _kill_pool_process(self, rng: random.Random) -> Kills:
        candidates = sorted(pid for worker in self._workers for pid in worker.pool_processes())
        if candidates:
            with suppress(ProcessLookupError):
                os.kill(rng.choice(candidates), signal.SIGKILL)
                return Kills(pool_processes=1)
        return Kills()

    def log_tails(self) -> str:
        """Return the end of every log."""
        return "\n".join(f"{member.log.name}:\n{_tail(member.log)}" for member in self._members)


def _worker_arguments(name: str, queues: str) -> Sequence[str]:
    return (
        *("worker", "-P", "prefork", "-c", str(POOL_PROCESSES), "-Q", queues, "-n", f"{name}@%h"),
        *("--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", "WARNING"),
    )


def pool_processes(parent: int) -> list[int]:
    """Return the children of ``parent``."""
    return [pid for pid, ppid in _processes() if ppid == parent]


def _processes() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                yield int(entry.name), int(entry.joinpath("stat").read_text().rpartition(")")[2].split()[1])


@contextmanager
def processor(file: Path, provider: str, seed: int) -> Iterator[str]:
    """Run a card processor and hand out its URL."""
    arguments = ("--file", str(file), "--provider", provider, "--seed", str(seed))
    command = leash.command("examples.worker.processor", *arguments)
    process = subprocess.Popen(
        command,
        cwd=_ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield _url(process, command)
        finally:
            process.kill()


def _url(process: subprocess.Popen[str], command: Sequence[str]) -> str:
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    if not url:
        raise DemoError(f"the card processor did not start, `{shlex.join(command)}` says why above")
    return url


def _tail(log: Path) -> str:
    return "\n".join(f"  {line}" for line in log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])
