"""Queries of the store: states, durations, conditions, and the user's own SQL."""

from __future__ import annotations

from typing import Any

import pytest

from db.connect import open_store
from db.errors import ForeignStoreError, QueryError
from db.ingest import collect
from db.queries import SUMMARY_COLUMNS, durations, run_records, run_sql, sizes, summaries
from db.submissions import record_intents
from workloads.contract import Hardware, ResourceShape, State
from workloads.errors import InputError


def test_a_record_has_the_newest_state_and_the_newest_success(campaign: Any, database: str) -> None:
    """Attempt 1 succeeded, attempt 2 (a rerun) failed: the state is failed, the digests are those of the success."""
    run = campaign.run(hardware="a100:4x2")
    digests = {"code_digest": "c0de", "packages_digest": "9ac4"}
    campaign.finish(campaign.submit(run, 1), provenance=digests, dataset_digest="da7a", total_time_s=12.5)
    campaign.finish(campaign.submit(run, 2), state="failed", reason="program_error", message="boom", total_time_s=None)
    never_submitted = campaign.run(seed=5)
    with open_store(database) as store:
        collect(store, campaign.runs)
        records = run_records(store)
        record = records[run.run_id]
        assert (record.state, record.attempt, record.reason) == (State.FAILED, 2, "program_error")
        assert (record.message, record.job_id, record.target) == ("boom", "2000", "local")
        assert (record.code_digest, record.packages_digest, record.dataset_digest) == ("c0de", "9ac4", "da7a")
        assert (record.total_time_s, record.gpus) == (12.5, 8)
        assert list(records) == sorted(records)
        other = records[never_submitted.run_id]
        assert (other.state, other.attempt, other.reason, other.gpus) == (State.PLANNED, 0, "", 0)


def test_durations_are_of_runs_that_succeeded(campaign: Any, database: str) -> None:
    campaign.done(seed=0, epochs=3)
    campaign.done(seed=1, steps=20)
    campaign.done(seed=2, result={"state": "failed"})
    with open_store(database) as store:
        collect(store, campaign.runs)
        found = sorted(
            (d.model, d.dataset, d.strategy, d.hardware, d.epochs, d.steps, d.total_time_s) for d in durations(store)
        )
    expected = ("cnn", "digits", "eager", Hardware("cpu", 1))
    assert sorted(found, key=str) == sorted([(*expected, 3, None, 10.0), (*expected, 10, 20, 10.0)], key=str)


CONDITIONS = [
    (["seed=1"], [1]),
    (["seed!=1"], [0, 2, 3]),
    (["seed>1"], [2, 3]),
    (["seed >= 1", "seed<=2"], [1, 2]),
    (["lr=0.1"], [1]),
    (["model=vit_tiny"], [2]),
    (["model~VIT"], [2]),
    (["label~100%"], [3]),
    (["label~_"], [3]),
    (["state=failed"], [2]),
    (["state=succeeded", "test_accuracy>0.89"], [0, 1]),
    (["steps="], [0, 1, 2]),
    (["steps!="], [3]),
    (["steps!=7"], [0, 1, 2, 3]),
    (["channels_last=true"], [1]),
    (["channels_last=False"], [0, 2, 3]),
    (["label='; DROP TABLE runs; --"], []),
]


@pytest.mark.parametrize(("conditions", "seeds"), CONDITIONS, ids=[" and ".join(c) for c, _ in CONDITIONS])
def test_conditions_select_runs(conditions: list[str], seeds: list[int], campaign: Any, database: str) -> None:
    """Values have the type of the column; % and _ are no wildcards; null differs from 7."""
    campaign.done(seed=0)
    campaign.done(seed=1, lr=0.1, channels_last=True)
    campaign.done(seed=2, model="vit_tiny", label="vit", result={"state": "failed", "test_accuracy": None})
    campaign.run(seed=3, label="100% a_b", steps=9)
    with open_store(database) as store:
        collect(store, campaign.runs)
        assert sorted(row["seed"] for row in summaries(store, conditions)) == seeds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rte=1", "no column 'learning_rte'\n  fix: columns: run_id, label"),
        ("test_acuracy>1", "no column 'test_acuracy'\n  fix: did you mean test_accuracy?"),
        ("seed", "not a condition\n  fix: KEY=VALUE"),
        ("lr=fast", "lr is a number, not 'fast'"),
        ("seed=1.5", "seed is a whole number, not '1.5'"),
        ("nesterov=maybe", "nesterov is true or false, not 'maybe'"),
        (f"seed<{2**63}", f"seed is a whole number of 64 bits, and {2**63} is larger"),
        ("model=\udcff", "not valid UTF-8\n  fix: write it in UTF-8"),
        ("label~\udcff", "not valid UTF-8\n  fix: write it in UTF-8"),
    ],
)
def test_an_invalid_condition_says_why(text: str, message: str, tmp_path: Any) -> None:
    with open_store(str(tmp_path / "results.db")) as store, pytest.raises(InputError) as error:
        summaries(store, [text])
    assert str(error.value).startswith(f"--where {text}: {message}")


@pytest.fixture
def reader(campaign: Any, database: str) -> Any:
    """A store with two runs, open for reading only."""
    campaign.done(seed=0, lr=0.1)
    campaign.done(seed=1)
    with open_store(database) as store:
        collect(store, campaign.runs)
    with open_store(database, read_only=True) as store:
        yield store


def test_sql_with_parameters(reader: Any) -> None:
    """Values are passed as parameters, never as part of the statement."""
    names, rows = run_sql(
        reader, "SELECT seed, lr FROM runs WHERE model = :m AND label != :l", {"m": "cnn", "l": "'; --"}
    )
    assert names == ["seed", "lr"]
    assert sorted(rows) == [(0, 0.1), (1, 0.05)]


@pytest.mark.parametrize(
    ("condition", "value", "found"),
    [
        ("test_accuracy * 100 > :x", "80", 2),
        ("test_accuracy * 100 > :x", "95", 0),
        ("test_accuracy * 100 > :x", "89.5", 2),
        ("abs(seed) = :x", "1", 1),
        ("seed > :x", "0.5", 1),
        ("seed - 2 = :x", "-1", 1),
        ("seed + 0 < :x", str(2**63 - 1), 2),
        ("seed + 0 < :x", str(-(2**63)), 0),
        ("label LIKE '%=' || :x", "1", 1),
    ],
)
def test_a_parameter_written_as_a_number_is_a_number(condition: str, value: str, found: int, reader: Any) -> None:
    """Also compared with an expression, where SQLite orders every text after every number."""
    assert run_sql(reader, f"SELECT count(*) FROM summary WHERE {condition}", {"x": value})[1] == [(found,)]
    sql = "SELECT model FROM summary GROUP BY model HAVING max(test_accuracy) * 100 > :x"
    assert run_sql(reader, sql, {"x": "80"})[1] == [("cnn",)]


@pytest.mark.parametrize("text", ["0012", "12e4", "1234", "-", "1.", "0x10", "9" * 30, "1_0", " 1", "٣"])
def test_a_text_column_matches_what_looks_like_a_number(text: str, campaign: Any, database: str) -> None:
    """Run ids are hex digits: they may have leading zeros, an e, or digits only."""
    campaign.done(label=text)
    with open_store(database) as store:
        collect(store, campaign.runs)
    with open_store(database, read_only=True) as store:
        for table in ("runs", "summary"):
            assert run_sql(store, f"SELECT count(*) FROM {table} WHERE label = :x", {"x": text})[1] == [(1,)]


@pytest.mark.parametrize(
    ("sql", "has"),
    [
        ("SELECT 1", "it has no parameter"),
        ("SELECT model FROM runs WHERE :mdel IN (model, :mdel, $b, @a)", "it has :a, :b, :mdel"),
        ("SELECT model FROM runs WHERE model = ':model' -- :model", "it has no parameter"),
    ],
)
def test_a_parameter_that_the_statement_lacks_is_rejected(sql: str, has: str, campaign: Any, tmp_path: Any) -> None:
    """A name in a string or a comment is not a parameter either."""
    open_store(str(tmp_path / "results.db")).close()
    others = {"mdel": "cnn", "a": "1", "b": "x"} if ":mdel" in sql else {}
    with open_store(str(tmp_path / "results.db"), read_only=True) as store, pytest.raises(QueryError) as error:
        run_sql(store, sql, {"model": "cnn", **others})
    assert str(error.value) == f"{sql}: the statement has no :model\n  why: {has}\n  fix: leave out -p model="


def test_both_databases_reject_an_unknown_parameter(reader: Any) -> None:
    with pytest.raises(QueryError, match=r"the statement has no :model\n  why: it has :m\n  fix: leave out -p model="):
        run_sql(reader, "SELECT seed FROM runs WHERE model = :m", {"m": "cnn", "model": "cnn"})


def test_a_parameter_that_is_not_utf8_is_named(reader: Any) -> None:
    with pytest.raises(InputError, match="-p m=\udcff: not valid UTF-8\n  fix: write it in UTF-8"):
        run_sql(reader, "SELECT :m", {"m": "\udcff"})


@pytest.mark.parametrize(
    ("selected", "expected"),
    [
        ("1 AS a, 2 AS b, 3 AS a", ["a", "b", "a_2"]),
        ("1 AS a, 2 AS a, 3 AS a_2", ["a", "a_3", "a_2"]),
        ("1 AS a_2, 2 AS a, 3 AS a, 4 AS a, 5 AS a_2", ["a_2", "a", "a_3", "a_4", "a_2_2"]),
    ],
)
def test_columns_of_one_name_are_numbered(selected: str, expected: list[str], reader: Any) -> None:
    """With a number that makes the name unique."""
    names, rows = run_sql(reader, f"SELECT {selected}", {})
    assert (names, rows) == (expected, [tuple(range(1, len(expected) + 1))])


def test_every_table_and_view_can_be_queried(reader: Any) -> None:
    for table in ("runs", "attempts", "results", "epochs", "classes", "ranks", "summary", "curves"):
        run_sql(reader, f"SELECT * FROM {table}", {})
    names, _ = run_sql(reader, "SELECT * FROM summary", {})
    assert names == list(SUMMARY_COLUMNS)
    assert {row["table"]: row["rows"] for row in sizes(reader)} == {
        "runs": 2,
        "attempts": 2,
        "results": 2,
        "epochs": 4,
        "classes": 0,
        "ranks": 0,
        "ingested": 8,
    }


@pytest.mark.parametrize(
    "sql", ["DELETE FROM runs", "DROP TABLE runs", "UPDATE runs SET lr = 1", "CREATE TABLE t (a int)"]
)
def test_a_statement_that_writes_is_rejected(sql: str, reader: Any) -> None:
    with pytest.raises(QueryError, match=r"query only reads\n  fix: only orchestrate collect writes results"):
        run_sql(reader, sql, {})
    assert run_sql(reader, "SELECT count(*) FROM runs", {})[1] == [(2,)]


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT test_acuracy FROM results", "did you mean test_accuracy?"),
        ("SELECT * FROM result", "did you mean results?"),
        ("SELECT * FROM zzzzzz", "orchestrate db info --columns lists tables and columns"),
        ("SELECT :lr", "no value for :lr\n  fix: -p lr=VALUE"),
        ("SELEC 1", "syntax error"),
        ("SELECT '\udcff'", "SELECT '\udcff': not valid UTF-8\n  fix: write it in UTF-8"),
    ],
)
def test_an_error_in_sql_has_a_message_and_a_hint(sql: str, message: str, reader: Any) -> None:
    with pytest.raises(InputError) as error:
        run_sql(reader, sql, {})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("", "the statement returns no rows"),
        ("-- only this", "the statement returns no rows"),
        ("SELECT 1; SELECT 2", "one statement"),
    ],
)
def test_sqlite_accepts_exactly_one_statement(sql: str, message: str, campaign: Any, tmp_path: Any) -> None:
    database = str(tmp_path / "results.db")
    open_store(database).close()
    with open_store(database, read_only=True) as store, pytest.raises(QueryError, match=message):
        run_sql(store, sql, {})


def test_a_file_that_is_damaged_while_it_is_open_is_not_an_error_in_sql(campaign: Any, tmp_path: Any) -> None:
    database = tmp_path / "results.db"
    open_store(str(database)).close()
    with open_store(str(database), read_only=True) as store:
        store.engine.dispose()
        database.write_bytes(b"\0" * 4096)
        with pytest.raises(ForeignStoreError, match="not an SQLite database"):
            run_sql(store, "SELECT * FROM runs", {})


def test_the_view_finds_newest_attempts_by_their_key(campaign: Any, tmp_path: Any) -> None:
    """Only ``runs`` is scanned, whatever the number of runs."""
    with open_store(str(tmp_path / "results.db")) as store:
        record_intents(store, campaign.runs, [(campaign.spec(seed=s), ResourceShape()) for s in range(50)], "local")
        with store.read() as connection:
            plan = connection.exec_driver_sql("EXPLAIN QUERY PLAN SELECT state FROM summary").all()
    scans = [row[3] for row in plan if row[3].startswith("SCAN")]
    assert scans == ["SCAN r"], plan
