"""The store: SQLAlchemy models, migrations, ingest, queries, statistics. Login side only; imports no framework."""
