from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

import psycopg
from psycopg import sql

from pgref.embedded import _binaries
from pgref.embedded._errors import ServerFailed
from pgref.embedded._home import Home
from pgref.embedded._server import SHORT_DIRECTORY, Server
from pgref.embedded._supervisor import NOBODY

_INITDB_SECONDS_MAX = 120.0
_CONNECT_SECONDS_MAX = 5


class PostgresServer(Server):
    """PostgreSQL on 127.0.0.1 with superuser ``postgres``, no password, durable settings and 200 connections.

    ``binaries`` is a directory with ``postgres`` and ``initdb`` (to choose a version, 14 or later), ``port`` 0 means a
    free one, ``settings`` are added to the server's configuration (``{"fsync": "off"}``), ``directory`` holds its
    temporary directory and must be short. Raise ``MissingBinary``, and ``ValueError`` for too long a directory.
    """

    name = "PostgreSQL"
    _stop_signals: ClassVar[Sequence[signal.Signals]] = (signal.SIGINT, signal.SIGQUIT)  # fast, then immediate
    _socket_name = ".s.PGSQL.{port}"

    def __init__(
        self,
        *,
        binaries: Path | None = None,
        port: int = 0,
        settings: Mapping[str, str] | None = None,
        directory: Path = SHORT_DIRECTORY,
    ) -> None:
        super().__init__(port=port, settings=settings, directory=directory)
        self._bin = _binaries.postgres_bin(binaries)
        self._identity = _identity(self._bin / "postgres")

    @property
    def dsn(self) -> str:
        """SQLAlchemy URL of the database ``postgres``."""
        return self._dsn("postgres")

    @property
    def conninfo(self) -> str:
        """Connection string, in libpq's form, of the database ``postgres``."""
        return f"host={self.host} port={self.port} user=postgres dbname=postgres"

    def create_database(self, name: str) -> str:
        """Create an empty database and return its SQLAlchemy URL. Raise psycopg's errors."""
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self._dsn(name)

    def _dsn(self, database: str) -> str:
        return f"postgresql+psycopg://postgres@{self.host}:{self.port}/{quote(database, safe='')}"

    def _prepare(self, home: Home) -> None:
        if self._identity == "nobody":
            os.chown(home.path, NOBODY, NOBODY)
        options = ["-N", "--no-instructions", "-A", "trust", "-U", "postgres", "-E", "UTF8", "--locale=C"]
        command = [str(self._bin / "initdb"), *options, "-D", str(home.path / "data")]
        home.launch(command, identity=self._identity, signals=[signal.SIGTERM])
        if home.ended_within(_INITDB_SECONDS_MAX) != 0:
            raise ServerFailed.with_log("initdb failed", home.log_text())

    def _launch(self, home: Home) -> None:
        settings = {
            "listen_addresses": self.host,
            "port": str(self.port),
            "unix_socket_directories": str(home.path),
            "max_connections": "200",
            "recovery_init_sync_method": "syncfs",  # after a kill: 0.2 s instead of seconds
            **self._settings,
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        command = [str(self._bin / "postgres"), "-D", str(home.path / "data"), *options]
        home.launch(command, identity=self._identity, signals=self._stop_signals)

    def _answers(self, home: Home) -> bool:
        where = f"host={home.path} port={self.port} user=postgres dbname=postgres"
        try:
            psycopg.connect(where, connect_timeout=_CONNECT_SECONDS_MAX).close()
        except psycopg.OperationalError:
            return False
        return True


def _identity(program: Path) -> str:
    """Who the server runs as: we ourselves, or, since it refuses root, nobody, if nobody can reach it."""
    if os.geteuid() != 0:
        return "self"
    try:
        trial = subprocess.run(
            [program, "--version"], user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, check=False
        )
    except PermissionError:
        return "namespace"
    return "nobody" if trial.returncode == 0 else "namespace"
