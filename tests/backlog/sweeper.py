"""A process that sweeps until nothing is left: ``sweeper.py DSN LEDGER HANGS_AT``. Its nth probe hangs; 0: none."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from celery import Celery

from celery_integration import Applied, Effect, fenced_task, install
from celery_integration.process import gate_of
from celery_integration.sweep import sweep

CLAIM_SECONDS = 5.0


@fenced_task(name="sweeper.asked", key="{key}", scope="asked", sink="external")
def asked(effect: Effect, key: str) -> None: ...


def main(dsn: str, ledger: Path, hangs_at: int) -> None:
    numbers: Iterator[int] = count(1)

    def probe(effect: Effect, key: str) -> Applied:
        with ledger.open("a") as file:
            file.write(f"{key}\n")
        if next(numbers) == hangs_at:
            ledger.with_suffix(f".{os.getpid()}").write_text(key)
            threading.Event().wait()
        return Applied(os.getpid())

    asked.probe(probe)
    app = Celery("sweeper", broker="memory://")
    install(app, dsn=dsn, reconcile_seconds=CLAIM_SECONDS, probe_seconds=CLAIM_SECONDS)
    app.finalize()
    effects = gate_of(app).effects
    while effects.backlog(1):
        sweep(app)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
