"""On an older PostgreSQL than the one that the tests start: what Debian 12 has, if it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from pgref.embedded import PostgresServer
from tests.contract import test_effects_postgres, test_sinks_postgres

MAJOR = 15
BINARIES = Path(f"/usr/lib/postgresql/{MAJOR}/bin")


@pytest.fixture(scope="module")
def engine() -> Iterator[sa.Engine]:
    """In this module every other fixture uses the older server."""
    if not (BINARIES / "initdb").exists():
        pytest.skip(f"PostgreSQL {MAJOR} is not in {BINARIES} (Debian 12: apt-get install postgresql-{MAJOR})")
    with PostgresServer(binaries=BINARIES, settings={"fsync": "off"}) as server:
        engine = sa.create_engine(server.dsn)
        yield engine
        engine.dispose()


class TestEffectsOnOlderPostgres(test_effects_postgres.TestPostgresEffectStore):
    """The SQL functions need nothing newer."""


class TestSinksOnOlderPostgres(test_sinks_postgres.TestPostgresSink):
    """Nor does the fence."""


def test_it_is_older(engine: sa.Engine) -> None:
    with engine.connect() as connection:
        assert connection.dialect.server_version_info is not None
        assert connection.dialect.server_version_info[0] == MAJOR
