"""A short temporary directory that belongs to one server, and the supervised process in it."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pgref.embedded import _supervisor
from pgref.embedded._errors import ServerFailed

_PREFIX = "pgref-embedded-"
_SOCKET_PATH_BYTES_MAX = 107
_STOP_SECONDS_MAX = 60.0


def require_short(root: Path, socket_name: str) -> None:
    """Raise ``ValueError`` if a unix socket below ``root`` would have too long a path."""
    length, limit = len(os.fsencode(root / f"{_PREFIX}12345678" / socket_name)), _SOCKET_PATH_BYTES_MAX
    if length > limit:
        raise ValueError(f"directory {root} is too long: a socket path in it has {length} bytes, the limit is {limit}")


class Home:
    """Directory, lock and process. The lock tells a live directory from one left by a killed process."""

    def __init__(self, root: Path) -> None:
        _remove_abandoned(root)
        self.path, self._lock = _create(root)
        self.log = self.path / "log"
        self.pid: int | None = None
        self._owner = os.getpid()
        self._supervisor: subprocess.Popen[bytes] | None = None

    def launch(self, command: Sequence[str], *, identity: str, signals: Sequence[signal.Signals]) -> None:
        """Start ``command`` under a supervisor; ``signals`` are those that stop it, the gentlest first."""
        self._let_go()
        numbers = ",".join(str(int(number)) for number in signals)
        script = [sys.executable, "-I", "-S", _supervisor.__file__, str(os.getpid()), str(self.path), identity, numbers]
        with self.log.open("ab") as log:
            self._supervisor = subprocess.Popen(
                [*script, *command],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.path,
                env={**os.environ, "LC_ALL": "C"},
                pass_fds=[self._lock],  # the server holds it too: its directory stays while it runs
                start_new_session=True,
            )
        self.pid = self._read_pid(self._supervisor)

    def _read_pid(self, supervisor: subprocess.Popen[bytes]) -> int:
        assert supervisor.stdout is not None
        with supervisor.stdout as report:
            line = report.readline()
        if not line:
            raise ServerFailed.with_log("the supervisor did not start", self.log_text())
        return int(line)

    def ended_within(self, seconds: float) -> int | None:
        """Return the exit status, or None if the process still runs after ``seconds``."""
        if self._supervisor is None:
            return 0
        with suppress(subprocess.TimeoutExpired):
            return self._supervisor.wait(seconds)
        return None

    @property
    def running(self) -> bool:
        return self._supervisor is not None and self._supervisor.poll() is None

    def stop(self, number: signal.Signals) -> None:
        """Send the signal and wait until the server and its children are gone. Nothing, in a fork of the owner."""
        if self._supervisor is None or os.getpid() != self._owner:
            return
        assert self._supervisor.stdin is not None
        with suppress(BrokenPipeError):
            self._supervisor.stdin.write(bytes([number]))
        self._supervisor.wait(_STOP_SECONDS_MAX)
        self._let_go()

    def _let_go(self) -> None:
        if self._supervisor is not None and self._supervisor.stdin is not None:
            self._supervisor.stdin.close()
        self._supervisor = self.pid = None

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def close(self, number: signal.Signals) -> None:
        """Stop and remove everything, once. Nothing, in a fork of the owner."""
        if os.getpid() == self._owner:
            self.stop(number)
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)


def _create(root: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        with suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():  # another process may have taken it for abandoned before it was locked
                return path, lock
            os.close(lock)


def _remove_abandoned(root: Path) -> None:
    for path in root.glob(f"{_PREFIX}*"):
        with suppress(OSError), _locked(path):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)
