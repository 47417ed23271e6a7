"""``python -m pgref.embedded``: both servers until Ctrl-C or SIGTERM; their addresses as lines for a shell or .env."""

from __future__ import annotations

import signal
import sys

from pgref.embedded import EmbeddedError, PostgresServer, ValkeyServer


def main() -> int:
    """Return 0 when told to end, 1 when a server cannot be started."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        with PostgresServer() as postgres, ValkeyServer() as valkey:
            print(f"FENCED_DSN={postgres.dsn}\nBROKER_URL={valkey.url}", flush=True)
            while True:
                signal.pause()
    except EmbeddedError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
