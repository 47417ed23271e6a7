"""Runs the migrations in the schema named by the configuration, then creates the SQL functions anew."""

from importlib.resources import files
from typing import Any

from alembic import context
from sqlalchemy import Connection

config = context.config
schema: str = config.attributes["schema"]
quoted: str = config.attributes["quoted_schema"]


def run() -> None:
    with context.begin_transaction():
        context.execute(f"SET LOCAL search_path TO {quoted}, pg_temp")
        context.run_migrations()
        for source in sorted(files("pgref.postgres").joinpath("sql").iterdir(), key=lambda path: path.name):
            context.execute(source.read_text(encoding="utf-8"))
        context.execute(f"REVOKE ALL ON ALL FUNCTIONS IN SCHEMA {quoted} FROM PUBLIC")


connection: Connection | None = config.attributes.get("connection")
options: dict[str, Any] = {
    "version_table": "pgref_version",
    "version_table_schema": schema,
    "transactional_ddl": True,
}
if connection is None:
    context.configure(dialect_name="postgresql", as_sql=True, literal_binds=True, **options)
    context.execute(f"CREATE SCHEMA IF NOT EXISTS {quoted}")
else:
    context.configure(connection=connection, **options)
run()
