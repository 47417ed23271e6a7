"""Holding signal handlers off where an exception would cut short what must be finished.

That is a pooled connection that changes hands, and an outcome that is being recorded.

Python runs handlers in the main thread between any two instructions, so only there anything is held. A signal sent to
the process also counts as held off only if no other thread takes it: start threads in a block of `held`, whose mask
they inherit.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Final

__all__ = ["held", "hold", "let_through"]

Mask = Iterable[int] | None

# The public wrapper turns every number into an enum, which costs ten times the call.
pthread_sigmask: Final[Callable[[int, Iterable[int]], Iterable[int]]] = import_module("_signal").pthread_sigmask

_HELD: Final = tuple(
    int(number)
    for number in (
        signal.SIGALRM,
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
    )
)


def hold() -> Mask:
    """Hold signals off and return what to give to `let_through`. Raises what a handler that was due raises."""
    if threading.get_ident() != threading.main_thread().ident:
        return None
    before = pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        pthread_sigmask(signal.SIG_BLOCK, _HELD)
    except BaseException:
        # The handler of a signal that came just before has run in that call, after it took effect.
        pthread_sigmask(signal.SIG_SETMASK, before)
        raise
    return before


def let_through(mask: Mask) -> None:
    """Let signals through as before `hold`. Raises what the handler of one that has waited raises."""
    if mask is not None:
        pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def held() -> Iterator[None]:
    """Hold signals off in the block, which one that comes just before can still prevent."""
    mask = hold()
    try:
        yield
    finally:
        let_through(mask)
