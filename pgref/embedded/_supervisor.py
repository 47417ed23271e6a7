"""A process between ours and the server, so that the server ends when ours does, however ours ends.

Run as a script: ``_supervisor.py PARENT_PID HOME IDENTITY SIGNALS PROGRAM ARGUMENT...``. It prints the server's pid and
waits for one byte on stdin, the number of the signal to stop the server with. End of file without a byte, or another
parent, means that our process is gone: then HOME is removed too. The exit status is the server's, if it ends by itself.

It is a process, not PR_SET_PDEATHSIG on the server, because that signal is sent when the *thread* that forked ends.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

NOBODY = 65534
_PARENT_GONE = 0
_PARENT_CHECK_SECONDS = 0.5
_STOP_SECONDS_PER_SIGNAL = 10.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _CLONE_NEWUSER = 1, 36, 0x10000000


def main() -> int:
    parent, home, identity, numbers, *command = sys.argv[1:]
    signals = [int(number) for number in numbers.split(",")]
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # so that children of a killed server become ours and can be ended
    children = Children()
    server = children.spawn(command, identity, signals[0])
    print(server, flush=True)  # noqa: T201 — this is the protocol
    asked = _wait_for_order(children, server, int(parent))
    if asked is not None:
        children.end(server, [asked, *signals] if asked else signals)
    children.end_orphans()
    if asked == _PARENT_GONE:
        shutil.rmtree(home, ignore_errors=True)
    return _exit_code(children.statuses.get(server, 0)) if asked is None else 0


def _wait_for_order(children: Children, server: int, parent: int) -> int | None:
    """Return the signal to send, ``_PARENT_GONE``, or None when the server has ended by itself."""
    while True:
        ordered = children.wait(_PARENT_CHECK_SECONDS, also=[0])
        if ordered:
            return (os.read(0, 1) or b"\0")[0]
        # A fork of our process may hold the pipe open beyond the death of ours: hence the look at the parent.
        if os.getppid() != parent:
            return _PARENT_GONE
        if server in children.statuses:
            return None


class Children:
    """Everything below this process, by wait status once ended."""

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        self._woken, writer = os.pipe()
        os.set_blocking(writer, False)
        os.set_blocking(self._woken, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def spawn(self, command: list[str], identity: str, parent_death_signal: int) -> int:
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become(command, identity, parent_death_signal, supervisor)
        return pid

    def wait(self, seconds: float, also: list[int]) -> list[int]:
        """Wait for an ended child or input on ``also``; the readable ones of ``also``."""
        readable = select.select([self._woken, *also], [], [], seconds)[0]
        with suppress(BlockingIOError):
            os.read(self._woken, 4096)
        self._reap()
        return [fd for fd in readable if fd in also]

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self.statuses[ended[0]] = ended[1]

    def end(self, pid: int, signals: list[int]) -> None:
        for number in [*signals, signal.SIGKILL]:
            if pid not in self.statuses:
                os.kill(pid, number)
                self._wait_for_end(pid)

    def _wait_for_end(self, pid: int) -> None:
        deadline = time.monotonic() + _STOP_SECONDS_PER_SIGNAL
        while pid not in self.statuses and (left := deadline - time.monotonic()) > 0:
            self.wait(left, also=[])

    def end_orphans(self) -> None:
        me = os.getpid()
        with suppress(FileNotFoundError, ProcessLookupError):
            for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)


def _become(command: list[str], identity: str, parent_death_signal: int, supervisor: int) -> NoReturn:
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        os.setsid()
        _take(identity)
        _prctl(_PR_SET_PDEATHSIG, parent_death_signal)  # after the change of user, which would clear it
        if os.getppid() == supervisor:
            os.execv(command[0], command)  # noqa: S606
    except OSError as error:
        os.write(2, f"cannot run {command[0]}: {error}\n".encode())
    os._exit(127)


def _take(identity: str) -> None:
    """PostgreSQL refuses to run as root: become nobody, or, if nobody cannot reach the files, look like nobody."""
    if identity == "nobody":
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    elif identity == "namespace":
        _enter_user_namespace()


def _enter_user_namespace() -> None:
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUSER) != 0:
        why = "PostgreSQL refuses to run as root, user nobody cannot reach it, and user namespaces are not allowed"
        raise OSError(ctypes.get_errno(), why)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{NOBODY} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{NOBODY} {group} 1")


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
