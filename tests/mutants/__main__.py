"""``python -m tests.mutants [-j N] [names...]``: apply each seeded bug to a copy and see that its tests go red."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
NEEDED = ("pgref", "celery_integration", "tests", "pyproject.toml")
PACKAGES = ("pgref", "celery_integration")
TIMEOUT_SECONDS = 120
UNMUTATED_TIMEOUT_SECONDS = 900
GRACE_SECONDS = 30
PASSED, FAILED = 0, 1


@dataclass(frozen=True)
class Verdict:
    """What became of a mutation: ``by`` is the first failing test, or why there is none."""

    mutation: Mutation
    caught: bool
    by: str
    seconds: float


@dataclass(frozen=True)
class Run:
    """``code`` is pytest's, None after a timeout."""

    code: int | None
    output: str

    def first_failure(self) -> str | None:
        """Return the first test that failed. One that only met an error, as in a fixture, has judged nothing."""
        failures = [line for line in self.output.splitlines() if line.startswith("FAILED ")]
        return failures[0].removeprefix("FAILED ").split(" - ")[0] if failures else None

    def last_line(self) -> str:
        """Return the line in which pytest sums up."""
        return (self.output.strip().splitlines() or ["no output"])[-1]


class Copy:
    """A copy of what the tests need, in which they run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {**os.environ, "PYTHONPATH": str(directory)}
        for name in NEEDED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, directory)

    def apply(self, mutation: Mutation) -> bool:
        """Seed the bug. Return whether there was one place for it."""
        path = self.directory / mutation.file
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        return text.count(mutation.old) == 1

    def must_win(self) -> None:
        """Check that this copy is imported, and not what is installed."""
        code = f"import {', '.join(PACKAGES)}; print({', '.join(f'{name}.__file__' for name in PACKAGES)}, sep='\\n')"
        command = [sys.executable, "-P", "-c", code]
        told = subprocess.run(command, env=self.environment, check=True, capture_output=True, text=True).stdout
        assert all(Path(file).is_relative_to(self.directory) for file in told.splitlines()), told

    def test(self, selectors: Sequence[str], timeout_seconds: float) -> Run:
        """Run the tests until the first failure."""
        options = ["-x", "-q", "-p", "no:cacheprovider", "--color=no"]
        with subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *selectors],
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=timeout_seconds)
            except subprocess.TimeoutExpired:
                return Run(None, _stopped(process))
        return Run(process.returncode, output)


def _stopped(process: subprocess.Popen[str]) -> str:
    """Let pytest stop its servers, and return what it has said."""
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=GRACE_SECONDS)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


@contextmanager
def copied() -> Iterator[Copy]:
    """Make a copy for the time of the block."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        yield Copy(Path(directory).resolve())


def check_unmutated(mutations: Sequence[Mutation]) -> None:
    """Check that the tests are green without a bug."""
    selectors = sorted({selector for mutation in mutations for selector in mutation.killed_by})
    with copied() as copy:
        copy.must_win()
        run = copy.test(selectors, UNMUTATED_TIMEOUT_SECONDS)
    if run.code != PASSED:
        raise SystemExit(f"{run.output}\nnot green without a mutation")


def judged(mutation: Mutation) -> Verdict:
    """Run the tests of a mutation."""
    started = time.monotonic()
    with copied() as copy:
        if copy.apply(mutation):
            caught, by = judgement(copy.test(mutation.killed_by, TIMEOUT_SECONDS))
        else:
            caught, by = False, f"ERROR: its old text does not occur once in {mutation.file}"
    return Verdict(mutation, caught, by, time.monotonic() - started)


def judgement(run: Run) -> tuple[bool, str]:
    """Return whether a run has caught its mutation, and by what."""
    if run.code is None:
        return True, f"no end within {TIMEOUT_SECONDS} s"
    if run.code == PASSED:
        return False, "SURVIVED"
    first = run.first_failure()
    if run.code == FAILED and first is not None:
        return True, first
    return False, f"ERROR: pytest ended with {run.code}: {run.last_line()}"


def chosen(names: Sequence[str]) -> list[Mutation]:
    """Return the mutations of these names, all without any."""
    known = {mutation.name for mutation in MUTATIONS}
    if unknown := sorted(set(names) - known):
        raise SystemExit(f"unknown: {', '.join(unknown)}; known are:\n" + "\n".join(sorted(known)))
    return [mutation for mutation in MUTATIONS if not names or mutation.name in names]


def main() -> int:
    """Print the table. Return 1 if a mutation was not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("-j", "--jobs", type=int, default=2, help="mutations tried at once (default: 2)")
    parser.add_argument("names", nargs="*", help="mutations to try (default: all)")
    arguments = parser.parse_args()
    mutations = chosen(arguments.names)
    check_unmutated(mutations)
    width = max(len(mutation.name) for mutation in mutations)
    print(f"{'mutation':{width}}  {'':4}  {'seconds':>7}  caught by")
    caught = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for verdict in pool.map(judged, mutations):
            caught += verdict.caught
            mutation = verdict.mutation
            print(f"{mutation.name:{width}}  {mutation.guarantee:4}  {verdict.seconds:7.1f}  {verdict.by}", flush=True)
    print(f"{caught} of {len(mutations)} caught")
    return 0 if caught == len(mutations) else 1


if __name__ == "__main__":
    sys.exit(main())
