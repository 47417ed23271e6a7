"""Live progress: one line that is written over on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from shutil import get_terminal_size
from typing import TextIO

__all__ = ["Progress"]

LINE_EVERY_SECONDS = 5.0


class Progress:
    """Writes to ``stream``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._due = 0.0
        self._shown = False

    def show(self, line: str) -> None:
        """Show ``line`` now, or drop it where the last one has just been written."""
        if self._live:
            self._over(line)
        elif time.monotonic() >= self._due:
            self._due = time.monotonic() + LINE_EVERY_SECONDS
            self.say(line)

    def say(self, line: str) -> None:
        """Write ``line`` to stay."""
        if self._shown:
            self._over("")
            self._shown = False
        print(line, file=self._stream, flush=True)

    def _over(self, line: str) -> None:
        width = get_terminal_size().columns - 1
        print(f"\r{line[:width]:<{width}}\r", end="", file=self._stream, flush=True)
        self._shown = bool(line)
