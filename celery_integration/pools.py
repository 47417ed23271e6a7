"""Which worker pools fenced tasks run in, looked at before a worker takes its first task."""

from __future__ import annotations

import sys
from typing import Any

from celery.signals import worker_init
from psycopg import waiting

from celery_integration.errors import ConfigurationError

__all__ = ["check_pool"]


def check_pool(pool: Any) -> None:
    """Raise `ConfigurationError` if fenced tasks cannot run in ``pool``: a pool class, or its name.

    Under gevent psycopg must be imported after the process was patched. Else each wait for the database stops all
    greenlets, those that renew leases too.
    """
    name = str(pool) if isinstance(pool, str) else str(pool.__module__)
    match name.rpartition(".")[2].partition(":")[0]:
        case "eventlet":
            raise ConfigurationError(
                "fenced tasks do not run under eventlet: start the worker with --pool gevent, threads, prefork or solo"
            )
        case "gevent" if not _psycopg_gives_way():
            raise ConfigurationError(
                "psycopg was imported before gevent patched the process: start the worker with `--pool gevent`, not "
                "with worker_pool in the settings or -Pgevent, or call gevent.monkey.patch_all() before other imports"
            )


def _psycopg_gives_way() -> bool:
    monkey = sys.modules.get("gevent.monkey")
    patched = monkey is not None and all(map(monkey.is_module_patched, ("select", "socket", "threading")))
    return patched and waiting.wait is not getattr(waiting, "wait_c", None)


@worker_init.connect(weak=False)
def _refuse_pool(sender: Any, **_: Any) -> None:
    try:
        check_pool(sender.pool_cls)
    except ConfigurationError as error:
        raise SystemExit(str(error)) from error  # any other exception would only be logged
