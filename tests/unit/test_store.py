"""Opening the store: its schema, which databases it rejects, and who can write."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event, insert, inspect, select

from db import connect, models, queries, schema
from db.connect import Store, open_store
from db.errors import ForeignStoreError, StoreDamagedError, StoreError
from db.ingest import collect
from db.schema import revision, revisions
from workloads.contract import State, TrainConfig, result_fields
from workloads.errors import InputError


@pytest.fixture
def database(tmp_path: Path) -> str:
    return str(tmp_path / "results.db")


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def test_columns_match_the_fields_of_the_contract() -> None:
    """One name from the experiment file to the column; lists have tables of their own."""
    assert set(models.runs.columns.keys()) - {"run_id", "label", "experiment"} == {
        f.name for f in dataclasses.fields(TrainConfig)
    }
    assert [c.name for c in models.results.columns if c.name not in {"code_digest", "packages_digest"}] == [
        "run_id",
        "attempt",
        *(name for name in result_fields() if name not in {"run_id", "attempt", "per_class", "memory_by_rank"}),
    ]


def _sqlite_schema(path: str) -> dict[str, object]:
    """Tables with their columns, types, keys and constraints, and the text of views."""
    connection = sqlite3.connect(path)
    found: dict[str, object] = {}
    for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL"):
        columns = connection.execute(f"SELECT name, type, [notnull], pk FROM pragma_table_info('{name}')")
        keys = connection.execute(f"SELECT * FROM pragma_foreign_key_list('{name}')").fetchall()
        unique = connection.execute(f"SELECT [unique], origin FROM pragma_index_list('{name}')").fetchall()
        statement = " ".join(sql.split()) if kind != "table" else "WITHOUT ROWID" in sql
        found[name] = (kind, sorted(columns.fetchall()), keys, unique, statement)
    connection.close()
    return found


UNRELEASED_STORES = sorted((Path(__file__).parents[1] / "golden" / "stores").glob("*.sql"))
"""Databases of the development versions, as SQLite dumps them: a success, a failure, and an intent."""


def _restore(dump: Path, database: str) -> None:
    """Create a database from a dump; on PostgreSQL without its rows, whose booleans are numbers in SQLite."""
    sql = dump.read_text()
    if "postgresql" not in database:
        connection = sqlite3.connect(database)
        connection.executescript(sql)
        connection.close()
        return
    import psycopg

    sql = re.sub(r"INSERT INTO \"(?!orchestrate_revision).*\n", "", sql.replace("DOUBLE", "DOUBLE PRECISION"))
    sql = re.sub(r",\s*FOREIGN KEY\([^)]*\) REFERENCES \w+ \([^)]*\)", "", sql.replace("WITHOUT ROWID", ""))
    with psycopg.connect(database) as server:
        server.execute(sql)  # type: ignore[arg-type]


@pytest.mark.parametrize("dump", UNRELEASED_STORES, ids=lambda dump: dump.stem)
def test_a_store_of_a_development_version_is_upgraded_and_keeps_its_rows(
    dump: Path, database: str, tmp_path: Path
) -> None:
    """The schema becomes that of a new store. A store open for reading is not upgraded; the hint says what does."""
    _restore(dump, database)
    if dump.stem != revisions()[-1]:
        with pytest.raises(StoreError, match=rf"older schema {dump.stem}\n  fix: orchestrate collect"):
            open_store(database, read_only=True)
    with open_store(database) as store:
        assert revision(store) == revisions()[-1]
    if "postgresql" in database:
        with open_store(database, read_only=True) as store:
            assert queries.summaries(store) == []
        return
    new, old = str(tmp_path / "new.db"), str(tmp_path / "old.db")
    open_store(new).close()
    assert {**_sqlite_schema(database), "orchestrate_revision": 0} == {**_sqlite_schema(new), "orchestrate_revision": 0}
    _restore(dump, old)
    added = {"compile": "off", "cudnn_benchmark": False, "pretrained": False, "test_fraction": 1.0}
    with open_store(database) as store, store.read() as connection, sqlite3.connect(old) as before:
        before.row_factory = sqlite3.Row
        for table in (*models.CONTENT, models.ingested):
            kept = "WHERE path NOT LIKE '%/result.json'" if table is models.ingested and dump.stem < "0005" else ""
            rows = [dict(row) for row in before.execute(f"SELECT * FROM {table.name} {kept}")]
            upgraded = [dict(row) for row in connection.execute(select(table)).mappings()]
            assert rows and len(rows) == len(upgraded)
            for row, now in zip(rows, upgraded, strict=True):
                assert now == {c.name: row.get(c.name, added.get(c.name)) for c in table.c}
        states = [record.state for record in queries.run_records(store).values()]
        assert sorted(states) == [State.FAILED, State.SUBMITTING, State.SUCCEEDED]
    before.close()


def test_a_column_of_results_that_is_new_is_added(campaign: Any, database: str) -> None:
    """A metric of a later version. A store open for reading does not get it; the hint says what adds it.

    Results that an earlier version ingested are read again: they may have its value.
    """
    campaign.done(seed=0, result={"energy_j": 3.5})
    with open_store(database) as store:
        collect(store, campaign.runs)
        before = queries.summaries(store)
        with store.write() as connection:
            connection.exec_driver_sql("DROP VIEW summary")
            connection.exec_driver_sql("ALTER TABLE results DROP COLUMN energy_j")
            names = ", ".join(f"s.{c.name}" for c in models.results.c if c.name != "energy_j")
            connection.exec_driver_sql(f"CREATE VIEW summary AS SELECT {names} FROM results s")
    with pytest.raises(StoreError, match=r"has no column energy_j in results\n  fix: orchestrate collect"):
        open_store(database, read_only=True)
    with open_store(database) as store:
        assert queries.summaries(store) == [{**before[0], "energy_j": None}]
        campaign.done(seed=1)
        assert collect(store, campaign.runs).problems == []
        assert [row["energy_j"] for row in queries.summaries(store)] == [3.5, None]
        assert queries.summaries(store)[0] == before[0]


@pytest.mark.parametrize(("table", "column"), [("runs", "lr"), ("results", "diverged"), ("ingested", "size")])
def test_a_forgotten_migration_names_the_column(table: str, column: str, database: str) -> None:
    """As if a key had been added to the contract and no migration to the schema; the database stays as it is."""
    with open_store(database) as store, store.write() as connection:
        for view in models.VIEWS:
            connection.exec_driver_sql(f"DROP VIEW {view}")
        connection.exec_driver_sql(f"ALTER TABLE {table} DROP COLUMN {column}")
        for view in models.VIEWS:
            connection.exec_driver_sql(f"CREATE VIEW {view} AS SELECT 1 AS run_id")
    for _ in range(2):
        with pytest.raises(StoreDamagedError) as error:
            open_store(database)
        assert error.value.what == f"{table} has no column {column}, which the model declares"
        assert error.value.hint.startswith("add a migration in db/migrations/versions, or ")


def test_files_of_migrations_are_named_after_their_revisions() -> None:
    """Opening a store takes the newest revision from the names and does not import Alembic."""
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(schema.MIGRATIONS))
    config.set_main_option("path_separator", "os")
    script = ScriptDirectory.from_config(config)
    assert tuple(r.revision for r in reversed(list(script.walk_revisions()))) == tuple(revisions())


def test_a_store_is_created_and_opened_without_alembic(database: str) -> None:
    """Alembic costs a tenth of a second, so it is imported only when there is something to migrate."""
    code = "import sys; from db.connect import open_store; open_store(sys.argv[1]); print('alembic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, database], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_verbs_module_imports_no_database_library() -> None:
    code = (
        "import sys, orchestrator.cli.verbs.results; print({'sqlalchemy', 'rich.table', 'alembic'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_sqlite_is_set_up_for_many_commands_at_once(database: str) -> None:
    with open_store(database) as store, store.read() as connection:
        for pragma, value in (
            ("journal_mode", "wal"),
            ("busy_timeout", 60_000),
            ("foreign_keys", 1),
            ("synchronous", 2),
        ):
            assert connection.exec_driver_sql(f"PRAGMA {pragma}").scalar_one() == value, pragma


def test_a_write_takes_the_lock_before_it_reads(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction that reads first would fail when another one wrote in between (SQLITE_BUSY_SNAPSHOT)."""
    monkeypatch.setattr(connect, "BUSY_TIMEOUT_S", 0.05)
    with open_store(database) as store, open_store(database) as other, store.write() as connection:
        connection.execute(select(models.runs))
        with (
            pytest.raises(StoreError, match="another command has been writing for 60 s\n  fix: try again"),
            other.write(),
        ):
            pass


def test_a_store_that_another_command_creates_meanwhile_is_ours(database: str) -> None:
    """Between our check of an empty file and our next statement, another command creates the whole schema."""
    begun = []

    def create_at_the_second(_connection: object) -> None:
        begun.append(1)
        if len(begun) == 2:
            open_store(database).close()

    event.listen(Engine, "begin", create_at_the_second)
    try:
        with open_store(database) as store:
            assert revision(store) == revisions()[-1]
    finally:
        event.remove(Engine, "begin", create_at_the_second)
    assert len(begun) > 2


def _foreign_sqlite(path: str, table: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(f"CREATE TABLE {table} (version_num TEXT)")
    connection.execute(f"INSERT INTO {table} VALUES ('abc')")
    connection.commit()
    connection.close()


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("table", ["recipes", "alembic_version"])
def test_another_program_s_database_is_left_alone(table: str, read_only: bool, database: str) -> None:
    """Also when that program uses Alembic, too."""
    _foreign_sqlite(database, table)
    before = _digest(database)
    with pytest.raises(ForeignStoreError, match=rf"another program's database; left as it is \(its tables: {table}\)"):
        open_store(database, read_only=read_only)
    assert _digest(database) == before


@pytest.mark.parametrize("content", [b"name,accuracy\ncnn,0.9\n" * 9, b"\x00" * 4096, os.urandom(8192)])
def test_a_file_that_is_not_a_database_is_left_alone(content: bytes, database: str) -> None:
    Path(database).write_bytes(content)
    fix = (
        f"name another file with --db; if it was orchestrate's: mv {database} {database}.damaged,"
        " then orchestrate collect, which reads the runs folder again"
    )
    for read_only in (False, True):
        with pytest.raises(ForeignStoreError) as error:
            open_store(database, read_only=read_only)
        assert str(error.value) == f"{database}: not an SQLite database; left as it is\n  fix: {fix}"
    assert Path(database).read_bytes() == content


def test_a_store_of_a_newer_version_is_rejected(database: str) -> None:
    with open_store(database) as store, store.write() as connection:
        connection.exec_driver_sql(f"UPDATE {models.schema_revision.name} SET version_num = '0099'")
    before = _digest(database)
    with pytest.raises(
        ForeignStoreError,
        match=rf"newer version of orchestrate \(schema 0099, this one knows up to {revisions()[-1]}\)",
    ):
        open_store(database)
    assert _digest(database) == before


def test_an_older_store_is_migrated_and_keeps_its_rows(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an invented later revision. A store open for reading is not migrated; the hint says what does."""
    with open_store(database) as store, store.write() as connection:
        connection.execute(insert(models.ingested).values(path="x", size=1, mtime_ns=2, read_bytes=3))
    scripts = tmp_path / "migrations"
    shutil.copytree(schema.MIGRATIONS, scripts)
    (scripts / "versions" / "0098_more.py").write_text(
        f"import sqlalchemy as sa\nfrom alembic import op\nrevision = '0098'\ndown_revision = '{revisions()[-1]}'\n"
        "def upgrade():\n    op.add_column('ingested', sa.Column('note', sa.Text()))\n"
    )
    newest = revisions()[-1]
    monkeypatch.setattr(schema, "MIGRATIONS", scripts)
    with pytest.raises(StoreError, match=rf"older schema {newest}\n  fix: orchestrate collect"):
        open_store(database, read_only=True)
    with open_store(database) as store:
        assert revision(store) == "0098"
        with store.read() as connection:
            assert [c["name"] for c in inspect(connection).get_columns("ingested")][-1] == "note"
            assert connection.exec_driver_sql("SELECT path, note FROM ingested").all() == [("x", None)]


def test_a_migration_that_fails_changes_nothing(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schema changes are part of the transaction."""
    open_store(database).close()
    scripts = tmp_path / "migrations"
    shutil.copytree(schema.MIGRATIONS, scripts)
    (scripts / "versions" / "0098_broken.py").write_text(
        f"from alembic import op\nrevision = '0098'\ndown_revision = '{revisions()[-1]}'\n"
        "def upgrade():\n    op.execute('CREATE TABLE half (a)')\n    raise RuntimeError('power cut')\n"
    )
    with monkeypatch.context() as later:
        later.setattr(schema, "MIGRATIONS", scripts)
        with pytest.raises(RuntimeError, match="power cut"):
            open_store(database)
    with open_store(database) as store, store.read() as connection:
        assert "half" not in inspect(connection).get_table_names()


WRITES = [
    "DELETE FROM runs",
    "DROP TABLE epochs",
    "INSERT INTO ingested VALUES ('a', 1, 1, 1)",
    "PRAGMA journal_mode = DELETE",
    "PRAGMA query_only = OFF",
    "ATTACH '{tmp}/other.db' AS other",
    "VACUUM INTO '{tmp}/copy.db'",
    "CREATE TEMP TABLE t (a)",
]


@pytest.mark.parametrize("sql", WRITES)
def test_nothing_can_be_written_through_a_read_only_store(sql: str, database: str, tmp_path: Path) -> None:
    """Neither the database nor any other file."""
    open_store(database).close()
    before = sorted(p.name for p in tmp_path.iterdir())
    with open_store(database, read_only=True) as store:
        connection = store.engine.raw_connection()
        with pytest.raises(sqlite3.DatabaseError):
            connection.execute(sql.format(tmp=tmp_path))
        connection.close()
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.endswith(("-wal", "-shm"))) == before


def test_a_store_can_be_read_where_no_journal_can_be_created(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk SQLite cannot create the shared memory that readers of a write-ahead log need; an empty log
    may be left of who tried. With anything in the log, the file alone would be old news."""
    open_store(database).close()

    class WithoutSharedMemory(sqlite3.Connection):
        def execute(self, *_: object) -> sqlite3.Cursor:
            raise sqlite3.OperationalError("disk I/O error")

    def connect(name: str, **options: Any) -> sqlite3.Connection:
        return real(name, **options) if "immutable=1" in name else real(name, factory=WithoutSharedMemory, **options)

    real = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", connect)
    wal = Path(f"{database}-wal")
    wal.touch()
    open_store(database, read_only=True).close()
    wal.write_bytes(b"something")
    with pytest.raises(StoreError, match="the database cannot be used\n  why: disk I/O error"):
        open_store(database, read_only=True)


def test_opening_for_reading_creates_no_database(database: str) -> None:
    with pytest.raises(StoreError, match=r"there is no database\n  fix: orchestrate collect"):
        open_store(database, read_only=True)
    assert not Path(database).exists()
    Path(database).touch()
    with pytest.raises(StoreError, match=r"the database is empty\n  fix: orchestrate collect"):
        open_store(database, read_only=True)


def test_paths_where_a_database_cannot_be_created(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"folder does not exist\n  fix: mkdir -p"):
        open_store(str(tmp_path / "missing" / "results.db"))
    for read_only in (False, True):
        with pytest.raises(StoreError, match=r"the database is a folder\n  fix: name a file with --db"):
            open_store(str(tmp_path), read_only=read_only)


@pytest.mark.parametrize("name", ["résumé 实验.db", "a?b#c%20&d.db", 'it\'s "x".db', "new\nline.db"])
def test_any_file_name_works(name: str, tmp_path: Path) -> None:
    for read_only in (False, True):
        open_store(str(tmp_path / name), read_only=read_only).close()
    assert (tmp_path / name).stat().st_size > 0


def test_postgresql_without_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(
        InputError, match=r"driver is not installed\n  fix: pip install \"orchestrate-hpc\[postgres\]\""
    ) as error:
        open_store("postgresql://me:secret@server/lab")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://server/lab", "'mysql' is not a supported database"),
        ("://", "'://' is not a database URL"),
        ("postgresql://me:secret@a..b/lab", r"me:\*\*\*@a..b/lab: 'a..b' is not a valid host name"),
        ("postgresql:///lab?host=\udcff", r"'postgresql:///lab\?host=\\udcff' is not a database URL"),
    ],
)
def test_a_url_that_is_not_supported(url: str, message: str) -> None:
    with pytest.raises(InputError, match=rf"{message}(.|\n)*fix: give a file name, or postgresql://USER@HOST/DATABASE"):
        open_store(url)


def test_an_sqlite_url_is_a_file_name(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path}/results.db") as store:
        assert isinstance(store, Store) and store.is_sqlite
    assert (tmp_path / "results.db").exists()


def test_postgresql_that_cannot_be_reached(tmp_path: Path) -> None:
    pytest.importorskip("psycopg", reason='needs the extra "postgres"')
    with pytest.raises(StoreError, match=r"the database cannot be used\n  why: connection.* failed"):
        open_store(f"postgresql://me@/lab?host={tmp_path}")


def test_postgresql_rejects_what_sqlite_rejects(postgresql_server: str) -> None:
    """Reading does not write, a foreign database is left alone, a newer one is rejected."""
    import psycopg

    with psycopg.connect(host=postgresql_server, user="me", dbname="postgres", autocommit=True) as connection:
        connection.execute("CREATE DATABASE refusals")
    url = f"postgresql://me@/refusals?host={postgresql_server}"
    with pytest.raises(StoreError, match="the database is empty"):
        open_store(url, read_only=True)
    with open_store(url) as store, store.write() as connection:
        connection.exec_driver_sql(f"UPDATE {models.schema_revision.name} SET version_num = '0099'")
    with pytest.raises(ForeignStoreError, match="newer version"):
        open_store(url)
    with psycopg.connect(host=postgresql_server, user="me", dbname="refusals", autocommit=True) as connection:
        connection.execute(f"DROP TABLE {models.schema_revision.name}")
    with pytest.raises(ForeignStoreError, match="another program's database"):
        open_store(url)
