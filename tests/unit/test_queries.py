"""What the store answers: states, durations, conditions, and the user's own SQL."""

from __future__ import annotations

from typing import Any

import pytest

from db.engine import open_store
from db.errors import QueryError
from db.ingest import collect
from db.queries import SUMMARY_COLUMNS, durations, run_sql, run_states, sizes, summaries
from db.submissions import record_intents
from workloads.contract import State
from workloads.errors import InputError


def test_a_run_s_record_has_its_newest_state_and_its_newest_success(campaign: Any, database: str) -> None:
    """Attempt 1 succeeded, attempt 2 (a rerun) failed: the state is failed, the digests are those of the success."""
    run = campaign.run(hardware="a100:4x2")
    digests = {"code_digest": "c0de", "packages_digest": "9ac4"}
    campaign.finish(campaign.send(run, 1), provenance=digests, dataset_digest="da7a", total_time_s=12.5)
    campaign.finish(campaign.send(run, 2), state="failed", reason="program_error", message="boom", total_time_s=None)
    never_sent = campaign.run(seed=5)
    with open_store(database) as store:
        collect(store, campaign.runs)
        records = run_states(store)
        record = records[run.run_id]
        assert (record.state, record.attempt, record.reason) == (State.FAILED, 2, "program_error")
        assert (record.message, record.job_id, record.target) == ("boom", "2000", "local")
        assert (record.code_digest, record.packages_digest, record.dataset_digest) == ("c0de", "9ac4", "da7a")
        assert (record.total_time_s, record.gpus) == (12.5, 8)
        assert list(records) == sorted(records)
        other = records[never_sent.run_id]
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
    expected = ("cnn", "digits", "eager", "cpu:1")
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
def test_conditions_pick_runs(conditions: list[str], seeds: list[int], campaign: Any, database: str) -> None:
    """Typed by the column, so 0.1 is the number that was trained with; % and _ mean themselves; null is not 7."""
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
        ("seed<9223372036854775808", "no seed has more than 64 bits\n  fix: write a smaller number"),
        ("nesterov=maybe", "nesterov is true or false, not 'maybe'"),
    ],
)
def test_a_condition_that_is_none_says_why(text: str, message: str, tmp_path: Any) -> None:
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
    """Values go in as parameters, never into the text."""
    names, rows = run_sql(
        reader, "SELECT seed, lr FROM runs WHERE model = :m AND label != :l", {"m": "cnn", "l": "'; --"}
    )
    assert names == ["seed", "lr"]
    assert sorted(rows) == [(0, 0.1), (1, 0.05)]


def test_columns_of_one_name_are_told_apart(reader: Any) -> None:
    names, rows = run_sql(reader, "SELECT 1 AS a, 2 AS b, 3 AS a", {})
    assert (names, rows) == (["a", "b", "a_2"], [(1, 2, 3)])


def test_every_table_and_view_that_the_help_names_answers(reader: Any) -> None:
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
def test_a_statement_that_writes_is_refused(sql: str, reader: Any) -> None:
    with pytest.raises(QueryError, match=r"query only reads\n  fix: results are written by orchestrate collect only"):
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
    ],
)
def test_a_mistake_in_sql_is_a_message_with_a_way_on(sql: str, message: str, reader: Any) -> None:
    with pytest.raises(QueryError) as error:
        run_sql(reader, sql, {})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("sql", "message"),
    [("", "nothing was asked"), ("-- only this", "nothing was asked"), ("SELECT 1; SELECT 2", "one statement")],
)
def test_sqlite_takes_exactly_one_statement(sql: str, message: str, campaign: Any, tmp_path: Any) -> None:
    database = str(tmp_path / "results.db")
    open_store(database).close()
    with open_store(database, read_only=True) as store, pytest.raises(QueryError, match=message):
        run_sql(store, sql, {})


def test_states_of_many_runs_come_quickly(campaign: Any, tmp_path: Any) -> None:
    """One query whatever the number of runs: the view finds each newest attempt through the key."""
    with open_store(str(tmp_path / "results.db")) as store:
        record_intents(store, campaign.runs, [(campaign.spec(seed=s), {}) for s in range(50)], "local")
        with store.read() as connection:
            plan = connection.exec_driver_sql("EXPLAIN QUERY PLAN SELECT state FROM summary").all()
    scans = [row[3] for row in plan if row[3].startswith("SCAN")]
    assert scans == ["SCAN r"], plan
