"""What can go wrong with an embedded server; every message is one line."""

from __future__ import annotations

__all__ = ["EmbeddedError", "MissingBinary", "ServerFailed"]

_TAIL_LINES = 8
_TAIL_CHARACTERS = 800


class EmbeddedError(RuntimeError):
    """Root of the errors of ``pgref.embedded``."""


class MissingBinary(EmbeddedError):
    """A server's program is not on this machine; the message says what to install."""

    @classmethod
    def of(cls, product: str, programs: str, *, debian: str, looked_in: str) -> MissingBinary:
        """Return the error for one product."""
        return cls(
            f"{product} not found: no {programs} in {looked_in}; install it with: "
            f"pip install 'pgref[embedded]' (or on Debian: apt-get install {debian})"
        )


class ServerFailed(EmbeddedError):
    """A server did not start, or is not running; the message ends with the last lines of its log."""

    @classmethod
    def with_log(cls, what: str, log: str) -> ServerFailed:
        """Return the error with ``what`` and the tail of ``log``, in one line."""
        tail = " | ".join(line.strip() for line in log.splitlines()[-_TAIL_LINES:])
        return cls(f"{what}: {tail[-_TAIL_CHARACTERS:] or 'its log is empty'}")
