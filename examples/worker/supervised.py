"""What a worker owes to the demo that starts and kills it: to end with it, and to say when it is ready."""

from __future__ import annotations

import os
from pathlib import Path

from celery.signals import worker_process_init, worker_ready

from examples.worker import leash

__all__ = ["READY_FILE", "supervise"]

READY_FILE = "DEMO_READY_FILE"


def supervise() -> None:
    """Call at import in the worker's main process."""
    worker = os.getpid()

    def tie(**_: object) -> None:
        leash.hold(worker)  # a fork does not inherit it

    def announce(**_: object) -> None:
        if file := os.environ.get(READY_FILE):
            Path(file).write_text(str(worker))

    worker_process_init.connect(tie, weak=False)
    worker_ready.connect(announce, weak=False)
