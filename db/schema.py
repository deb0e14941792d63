"""Bringing a database to the schema of ``db.models``.

- An empty database is created from the models.
- One of an older revision is upgraded by the Alembic migrations that it lacks.
- A nullable column that ``results`` lacks is added: null is what a metric has that was not measured.
- Any other column that is missing needs a migration, and the error names it.

Views are dropped before migrations and created from the models afterwards, so no migration contains one. A change of
the *query* of a view that leaves its columns as they are needs an empty migration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, TableClause, delete, text

from db.error_messages import another_or_anew, create_again, damaged
from db.errors import ForeignStoreError, StoreError, StoreSchemaError
from db.models import CONTENT, VIEWS, ingested, metadata, results, schema_revision, summary
from workloads.lazy import lazy_imports

if TYPE_CHECKING:
    from db.connect import Store

with lazy_imports(__name__):
    from alembic import command, config

MIGRATIONS = Path(__file__).with_name("migrations")

_TABLES = (*CONTENT, ingested)

UNRELEASED = ("0001", "0002", "0003", "0004")
"""Revisions of development versions, which the first migration brings to the first released schema."""

_NAMES = {
    "sqlite": "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') ORDER BY name",
    "postgresql": "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"
    " UNION SELECT viewname FROM pg_views WHERE schemaname = current_schema() ORDER BY 1",
}


@dataclass(frozen=True, slots=True)
class _Schema:
    """The schema that a database has."""

    revision: str | None = None
    """None: the database is empty."""
    missing: list[tuple[str, str]] = field(default_factory=list)
    """(table or view, column) of the models that it lacks; found out at the newest revision only."""


def revisions() -> list[str]:
    """Return every revision, oldest first, from the names of the files: importing Alembic takes 0.1 s."""
    return sorted(path.name.partition("_")[0] for path in (MIGRATIONS / "versions").glob("[0-9]*_*.py"))


def revision(store: Store) -> str | None:
    """Return the revision of a database's schema; None when it is empty. Raises what :func:`ensure_current` raises."""
    with store.read() as connection:
        return _inspect(store, connection).revision


def ensure_current(store: Store) -> bool:
    """Create or upgrade the schema of a database; return whether the database was empty.

    Raises what :func:`db.connect.open_store` raises; the database is then as it was.
    """
    newest = revisions()[-1]
    with store.read() as connection:
        found = _inspect(store, connection)
    if found == _Schema(newest):
        return False
    if found.revision not in (None, *UNRELEASED, *revisions()):
        raise ForeignStoreError(
            f"written by a newer version of orchestrate (schema {found.revision}, this one knows up to {newest})",
            where=store.database,
            hint="pip install --upgrade orchestrate-hpc",
        )
    if store.read_only:
        state = "is empty" if found.revision is None else f"has the older schema {found.revision}"
        if found.missing:
            state = "has no column {1} in {0}".format(*found.missing[0])
        raise StoreError(f"the database {state}", where=store.database, hint="orchestrate collect")
    with store.write() as connection:
        # Again, now with the write lock: of several processes only the first one creates or upgrades.
        found = _inspect(store, connection)
        if found.revision is None:
            metadata.create_all(connection)
            connection.execute(schema_revision.insert().values(version_num=newest))
            _create_views(connection)
            return True
        if found != _Schema(newest):
            _upgrade(store, connection, found.revision)
    return False


def _inspect(store: Store, connection: Connection) -> _Schema:
    # Names before the revision: the other way round, tables that another command creates in between look foreign.
    names = {str(name) for name in connection.execute(text(_NAMES[connection.dialect.name])).scalars()}
    if not names:
        return _Schema()
    if schema_revision.name not in names:
        raise ForeignStoreError(
            f"another program's database; left as it is (its tables: {', '.join(sorted(names)[:5])})",
            where=store.database,
            hint=another_or_anew(store.database),
        )
    found = connection.execute(text(f"SELECT version_num FROM {schema_revision.name}")).scalars().all()  # noqa: S608
    if len(found) != 1:
        raise damaged(store.database, f"{schema_revision.name} has {len(found)} rows and must have one, its revision")
    if found[0] != revisions()[-1]:
        return _Schema(found[0])
    if lacking := sorted({table.name for table in _TABLES}.union(VIEWS) - names):
        raise damaged(store.database, f"it lacks {', '.join(lacking)}")
    return _Schema(found[0], _missing_columns(connection, (*_TABLES, summary)))


def _missing_columns(connection: Connection, tables: Sequence[TableClause]) -> list[tuple[str, str]]:
    found = {table.name: _columns(connection, table.name) for table in tables}
    return [(t.name, c.name) for t in tables for c in t.c if c.name not in found[t.name]]


def _columns(connection: Connection, table: str) -> set[str]:
    """Return the columns of a table or view; a store open for reading denies SQLite's ``pragma_table_info()``."""
    return set(connection.exec_driver_sql(f"SELECT * FROM {table} LIMIT 0").keys())  # noqa: S608


def _upgrade(store: Store, connection: Connection, found: str) -> None:
    for view in VIEWS:
        connection.execute(text(f"DROP VIEW IF EXISTS {view}"))
    if found in UNRELEASED:
        connection.execute(schema_revision.delete())
    if found != revisions()[-1]:
        _run_migrations(connection)
    columns = _columns(connection, results.name)
    added = [column for column in results.c if column.nullable and column.name not in columns]
    for column in added:
        kind = column.type.compile(connection.dialect)
        connection.execute(text(f'ALTER TABLE results ADD COLUMN "{column.name}" {kind}'))
    if added:
        # Results that were ingested without the column may have its value: the next collect reads them again.
        connection.execute(delete(ingested).where(ingested.c.path.endswith("result.json")))
    for table, name in _missing_columns(connection, _TABLES):
        raise StoreSchemaError(
            f"{table} has no column {name}, which the model declares",
            where=store.database,
            why="the schema is of the newest revision, and its migrations do not add the column",
            hint=f"add a migration in db/migrations/versions, or {create_again(store.database)}",
        )
    _create_views(connection)


def _run_migrations(connection: Connection) -> None:
    options = config.Config()
    # Alembic's options are those of configparser, which reads % as the start of a placeholder.
    options.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    options.set_main_option("path_separator", "os")
    options.attributes["connection"] = connection
    command.upgrade(options, "head")


def _create_views(connection: Connection) -> None:
    for name, query in VIEWS.items():
        connection.execute(text(f"CREATE VIEW {name} AS {query}"))
