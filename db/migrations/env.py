"""How Alembic runs our migrations: on the connection, and in the transaction, that ``db.schema`` hands over."""

from __future__ import annotations

from alembic import context

from db.models import metadata, schema_revision

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=schema_revision.name,
    # SQLite rolls DDL back like anything else; Alembic assumes the driver's old habit of committing before it.
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
