"""Ties a process to its parent: when the parent ends, by whatever means, so does the child.

`python -m examples.worker.leash PARENT_PID celery …` runs a module on the leash of the process that started it.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Sequence

__all__ = ["command", "hold"]

_PR_SET_PDEATHSIG = 1


def hold(parent: int) -> None:
    """Let the kernel kill this process when ``parent`` ends; end at once if that has happened already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)


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
