"""A database of ours with other tables than its revision has: the error names the fix, and the fix works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from db.connect import open_store
from db.errors import StoreDamagedError
from db.ingest import collect
from db.models import schema_revision
from db.schema import revision, revisions
from orchestrator.cli import run

DAMAGES = [
    ("DROP TABLE epochs CASCADE", "it lacks (curves, )?epochs"),
    ("DROP TABLE ranks", "it lacks ranks"),
    ("DROP VIEW summary", "it lacks summary"),
    (f"DELETE FROM {schema_revision.name}", f"{schema_revision.name} has 0 rows and must have one"),
    (f"INSERT INTO {schema_revision.name} VALUES ('0001')", f"{schema_revision.name} has 2 rows and must have one"),
    (f"ALTER TABLE {schema_revision.name} RENAME version_num TO x", 'no such column: version_num|column "version_num"'),
]


def _damage(database: str, sql: str) -> None:
    with open_store(database) as store, store.write() as connection:
        connection.exec_driver_sql(sql.removesuffix(" CASCADE") if store.is_sqlite else sql)


@pytest.mark.parametrize(("sql", "why"), DAMAGES, ids=[sql for sql, _ in DAMAGES])
def test_tables_that_differ_from_the_revision_are_damage(sql: str, why: str, campaign: Any, database: str) -> None:
    _damage(database, sql)
    with pytest.raises(StoreDamagedError) as error:
        open_store(database)
    assert error.value.what == "the database is damaged"
    assert re.match(why, error.value.why), error.value.why
    ways = ("create another database and name it with --db", "run orchestrate db rebuild, which creates it again")
    assert error.value.hint.startswith(ways["postgresql" not in database])


@pytest.mark.parametrize("number", ["0001", "0002"])
def test_a_revision_older_than_the_tables_is_corrected(number: str, campaign: Any, database: str) -> None:
    """Only columns that are missing are added."""
    _damage(database, f"UPDATE {schema_revision.name} SET version_num = '{number}'")
    campaign.done()
    with open_store(database) as store:
        assert revision(store) == revisions()[-1]
        assert collect(store, campaign.runs).results == 1


def test_a_column_that_goes_missing_while_the_store_is_open_is_damage(campaign: Any, database: str) -> None:
    """A statement of ours finds it."""
    campaign.done()
    with open_store(database) as store:
        _damage(database, "ALTER TABLE ingested DROP COLUMN size")
        with pytest.raises(StoreDamagedError, match=r"column:? (ingested\.)?size|\.size"):
            collect(store, campaign.runs)


@pytest.mark.parametrize("sql", [sql for sql, _ in DAMAGES])
def test_rebuild_replaces_a_damaged_database(
    sql: str, campaign: Any, database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The damaged file is kept. A database on a server is left as it is, for the user to create another one."""
    campaign.done()
    with open_store(database) as store:
        collect(store, campaign.runs)
    _damage(database, sql)
    code = run(["db", "rebuild", "--runs", str(campaign.runs), "--db", database])
    out, err = capsys.readouterr()
    kept = list(tmp_path.glob("results.db.damaged-*T*Z"))
    if "postgresql" in database:
        assert (code, out, kept) == (1, "", []) and "the database is damaged" in err
    else:
        assert (code, out) == (0, "rebuilt: 1 run, 1 attempt, 1 result, 2 epochs\n")
        assert err == f"the damaged database is kept as {kept[0]}\n"


def test_rebuild_accepts_the_url_of_a_file(campaign: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    campaign.done()
    database = f"sqlite:///{tmp_path}/results.db"
    _damage(database, "DROP TABLE ranks")
    assert run(["db", "rebuild", "--runs", str(campaign.runs), "--db", database]) == 0
    assert list(tmp_path.glob("results.db.damaged-*T*Z"))
