"""Ties a process to its parent: when the parent ends, by whatever means, so does the child.

`python -m examples.worker.leash PARENT_PID celery …` runs a module on the leash of the process that started it.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import select
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["command", "follow", "hold"]

_PR_SET_PDEATHSIG = 1


def hold(parent: int) -> None:
    """Let the kernel kill this process when ``parent`` ends; end at once if that has happened already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)


def follow(ancestor: int) -> None:
    """Kill this process when ``ancestor``, or a process between it and this one, ends: make, its shell, uv.

    Those may start us from a thread that ends before they do, which is when `hold` would act.
    """
    try:
        descriptors = [os.pidfd_open(pid) for pid in _between(os.getppid(), ancestor)]
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_end_with, args=(descriptors,), daemon=True).start()


def _between(pid: int, ancestor: int) -> Iterator[int]:
    while pid > 1:
        yield pid
        if pid == ancestor:
            return
        stat = Path(f"/proc/{pid}/stat").read_text()
        pid = int(stat.rpartition(")")[2].split()[1])


def _end_with(descriptors: Sequence[int]) -> None:
    select.select(descriptors, [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs ``module`` on the leash of the calling process."""
    return [sys.executable, "-m", "examples.worker.leash", str(os.getpid()), module, *arguments]


def main(argv: Sequence[str]) -> None:
    parent, module, *arguments = argv
    hold(int(parent))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
