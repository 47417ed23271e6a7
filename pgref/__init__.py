"""A side-effect gate on PostgreSQL: contracts, errors and clocks. Importing this loads no driver."""

from pgref import clock, contracts, errors, keys

__all__ = ["clock", "contracts", "errors", "keys"]
