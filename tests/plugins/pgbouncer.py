"""PgBouncer in transaction mode before the embedded PostgreSQL, from the machine's package if there is one."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import psycopg
import pytest

from pgref.embedded import PostgresServer
from pgref.embedded._home import Home
from pgref.embedded._server import SHORT_DIRECTORY, Server
from pgref.embedded._supervisor import NOBODY

POOL_SIZE = 4
"""Few, so that clients take each other's server connections."""

CONFIGURATION = """\
[databases]
* = host={postgres.host} port={postgres.port} user=postgres
[pgbouncer]
listen_addr = {pooler.host}
listen_port = {pooler.port}
unix_socket_dir = {home.path}
auth_type = any
pool_mode = transaction
default_pool_size = {pool_size}
"""


class PgBouncer(Server):
    """Ends with its parent, as the embedded servers do."""

    name = "PgBouncer"
    _stop_signals: ClassVar[Sequence[signal.Signals]] = (signal.SIGTERM,)
    _socket_name = ".s.PGSQL.{port}"

    def __init__(self, program: Path, postgres: PostgresServer) -> None:
        super().__init__(port=0, settings=None, directory=SHORT_DIRECTORY)
        self._program = program
        self._postgres = postgres

    @property
    def dsn(self) -> str:
        return f"postgresql+psycopg://postgres@{self.host}:{self.port}/postgres"

    @property
    def conninfo(self) -> str:
        return f"host={self.host} port={self.port} user=postgres dbname=postgres"

    def _prepare(self, home: Home) -> None:
        if os.geteuid() == 0:
            os.chown(home.path, NOBODY, NOBODY)

    def _launch(self, home: Home) -> None:
        file = home.path / "pgbouncer.ini"
        text = CONFIGURATION.format(pooler=self, postgres=self._postgres, home=home, pool_size=POOL_SIZE)
        file.write_text(text)
        identity = "nobody" if os.geteuid() == 0 else "self"  # it refuses to run as root
        home.launch([str(self._program), str(file)], identity=identity, signals=self._stop_signals)

    def _answers(self, home: Home) -> bool:
        try:
            psycopg.connect(f"host={home.path} port={self.port} user=postgres dbname=postgres").close()
        except psycopg.OperationalError:
            return False
        return True


@pytest.fixture(scope="session")
def pgbouncer(postgres: PostgresServer) -> Iterator[PgBouncer]:
    program = shutil.which("pgbouncer", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"]))
    if program is None:
        pytest.skip("pgbouncer is not installed (Debian: apt-get install pgbouncer)")
    with PgBouncer(Path(program), postgres) as pooler:
        yield pooler
