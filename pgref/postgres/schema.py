"""The schema that holds pgref's tables and functions: make it, check it, drop it (G70, G71)."""

from __future__ import annotations

import io
import secrets
from functools import cache

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory

from pgref.errors import InvalidArgument, SchemaError
from pgref.keys import valid_text

__all__ = [
    "drop_schema",
    "ensure_schema",
    "grant_application",
    "migration_sql",
    "new_schema",
    "quoted",
    "valid_schema",
    "verify_schema",
]

NAME_BYTES_MAX = 63
_ADVISORY_LOCK = 0x70677265_66


def valid_schema(name: object) -> str:
    """Return ``name`` if PostgreSQL takes it whole as a schema name, else raise `InvalidArgument`."""
    text = _valid_name(name, "schema")
    if text.startswith("pg_") or text == "information_schema":
        raise InvalidArgument(f"schema must not be one of PostgreSQL's own: {text}")
    return text


def _valid_name(name: object, argument: str) -> str:
    text = valid_text(name, argument)
    size = len(text.encode())
    if not text or size > NAME_BYTES_MAX:
        raise InvalidArgument(f"{argument} must be 1 to {NAME_BYTES_MAX} bytes of UTF-8, not {size}")
    if set(text) & set("%:\\"):
        raise InvalidArgument(f"{argument} must not contain %, : or a backslash: {text}")
    return text


def quoted(schema: str) -> str:
    """Return the validated name as an SQL identifier."""
    return '"' + valid_schema(schema).replace('"', '""') + '"'


def quoted_role(role: object) -> str:
    """Return the validated name of a role as an SQL identifier."""
    return '"' + _valid_name(role, "role").replace('"', '""') + '"'


def ensure_schema(engine: sa.Engine, schema: str = "pgref") -> None:
    """Create or migrate the schema to this release. Idempotent, and safe when many processes call it at once.

    Touches nothing outside ``schema``. Raises `InvalidArgument` for a bad name and `SchemaError` when the schema
    is newer than this release.
    """
    name = quoted(schema)
    # Under a frozen snapshot the waiter for the lock would not see what its forerunner has made.
    with engine.execution_options(isolation_level="READ COMMITTED").begin() as connection:
        if _version(connection, schema) == _head():
            return
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _ADVISORY_LOCK})
        _refuse_newer(_version(connection, schema), schema)
        connection.exec_driver_sql(f"CREATE SCHEMA IF NOT EXISTS {name}")
        command.upgrade(_config(schema, connection), "pgref@head")


def verify_schema(engine: sa.Engine, schema: str = "pgref") -> None:
    """Raise `SchemaError` unless the schema is exactly at this release's version."""
    valid_schema(schema)
    with engine.connect() as connection:
        version = _version(connection, schema)
    if version != _head():
        raise SchemaError(f"schema {schema!r} is at {version}, this release needs {_head()}: run the migrations")


def new_schema(engine: sa.Engine, prefix: str = "pgref") -> str:
    """Create a schema with a random name and return the name."""
    name = f"{prefix}_{secrets.token_hex(8)}"
    ensure_schema(engine, name)
    return name


def grant_application(engine: sa.Engine, role: str, schema: str = "pgref") -> None:
    """Let ``role`` call the stores and read the view for monitoring, and nothing else.

    The tables stay the owner's, who alone may raise fences. Raises `InvalidArgument` for a name that is none.
    """
    name, grantee = quoted(schema), quoted_role(role)
    with engine.begin() as connection:
        rows = connection.execute(sa.text(_CONTRACT_FUNCTIONS), {"schema": schema}).scalars()
        statements = [
            f"GRANT USAGE ON SCHEMA {name} TO {grantee}",
            f"GRANT SELECT ON {name}.pgref_version, {name}.effect_overview TO {grantee}",
            *(f"GRANT EXECUTE ON FUNCTION {function} TO {grantee}" for function in rows),
        ]
        for statement in statements:
            connection.exec_driver_sql(statement)


# What the contract is made of runs with the owner's rights; helpers run with the caller's.
_CONTRACT_FUNCTIONS = """
SELECT p.oid::regprocedure::text FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
WHERE n.nspname = :schema AND p.prosecdef AND p.proname <> 'effect_raise_fences'
"""


def drop_schema(engine: sa.Engine, schema: str) -> None:
    """Drop the schema and all in it. Dropping an absent one is no error."""
    with engine.begin() as connection:
        connection.exec_driver_sql(f"DROP SCHEMA IF EXISTS {quoted(schema)} CASCADE")


def migration_sql(schema: str = "pgref") -> str:
    """Return the SQL that creates the schema from nothing, for those who run DDL by hand."""
    output = io.StringIO()
    command.upgrade(_config(schema, None, output), "pgref@head", sql=True)
    return output.getvalue()


def _config(schema: str, connection: sa.Connection | None, output: io.StringIO | None = None) -> Config:
    config = Config(output_buffer=output or io.StringIO())
    config.set_main_option("script_location", "pgref.postgres:migrations")
    config.attributes.update(schema=schema, quoted_schema=quoted(schema), connection=connection)
    return config


@cache
def _head() -> str:
    head = ScriptDirectory.from_config(_config("pgref", None)).get_current_head()
    assert head is not None
    return head


def _version(connection: sa.Connection, schema: str) -> str | None:
    if not sa.inspect(connection).has_table("pgref_version", schema=schema):
        return None
    return connection.exec_driver_sql(f"SELECT max(version_num) FROM {quoted(schema)}.pgref_version").scalar()


def _refuse_newer(version: str | None, schema: str) -> None:
    known = {script.revision for script in ScriptDirectory.from_config(_config(schema, None)).walk_revisions()}
    if version is not None and version not in known:
        raise SchemaError(f"schema {schema!r} is at {version}, which is newer than this release")
