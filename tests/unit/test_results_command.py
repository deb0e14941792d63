"""The verbs collect, results, query and db, as users type them."""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from db.connect import open_store
from db.schema import revisions
from orchestrator.cli import completion, run


@pytest.fixture
def study(campaign: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two strategies with three seeds each, one of them failed and one diverged, one run not finished."""
    for seed, accuracy in enumerate((0.9, 0.8, 0.97)):
        campaign.done(seed=seed, result={"test_accuracy": accuracy, "epoch_time_s": 2.0 + seed})
    campaign.done(seed=0, strategy="ddp", hardware="cpu:2", result={"test_accuracy": 0.95, "epoch_time_s": 1.25})
    failure = {"state": "out_of_memory", "reason": "host", "test_accuracy": None}
    campaign.done(seed=1, strategy="ddp", hardware="cpu:2", result=failure)
    campaign.done(seed=2, strategy="ddp", hardware="cpu:2", result={"test_accuracy": 0.1, "train_loss": float("nan")})
    campaign.submit(campaign.run(seed=3))
    monkeypatch.chdir(tmp_path)
    open_store("results.db").close()
    return campaign


def _out(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[str, str]:
    assert run(list(argv)) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_results_collects_and_shows_a_row_a_run(study: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a word before; the notes name what must not be taken for a good number."""
    out, err = _out(capsys, "results")
    lines = [line.split() for line in out.splitlines() if "seed=" in line]
    assert len(lines) == 7
    assert ["cnn", "ddp", "seed=0", "succeeded", "95.00", "1.25", "10.00", "1000", "1.000"] in lines
    assert any("out_of_memory (host)" in line for line in out.splitlines())
    assert any("succeeded (diverged)" in line for line in out.splitlines())
    assert err.splitlines() == [
        "note: 1 of 7 runs failed: cnn ddp seed=1 (host)",
        "note: 1 of 7 runs diverged (a loss was NaN or infinite): cnn ddp seed=2",
        "note: 1 of 7 runs have no result yet",
    ]


def test_a_condition_that_no_run_meets_is_said(study: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """With what = and ~ mean, as most often a part of a value was given; also where a program reads the rows."""
    note = "note: no run has hardware=cpu and seed=0; = is the whole value (hardware=cpu:2), ~ a part of it\n"
    _, err = _out(capsys, "results", "--where", "hardware=cpu", "--where", "seed=0")
    assert note in err
    out, err = _out(capsys, "results", "--where", "hardware=cpu", "--where", "seed=0", "--json")
    assert json.loads(out) == [] and note in err
    assert "no run has" not in _out(capsys, "results", "--where", "hardware~cpu")[1]


def test_json_has_every_column_and_csv_the_selected_ones(study: Any, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = _out(capsys, "results", "--json", "--where", "seed=0", "--where", "strategy=ddp")
    (row,) = json.loads(out)
    assert (row["lr"], row["test_accuracy"], row["state"], row["attempt"]) == (0.05, 0.95, "succeeded", 1)
    assert not [value for value in row.values() if isinstance(value, (dict, list))]
    out, _ = _out(capsys, "results", "-f", "csv", "--select", "seed, test_accuracy", "--sort", "-test_accuracy")
    assert out.splitlines()[:3] == ["seed,test_accuracy", "2,0.97", "0,0.95"]
    assert {line.split(",")[1] for line in out.splitlines()[6:]} == {""}


def test_group_by_gives_median_and_range_over_seeds(study: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Failed and diverged runs are counted and left out."""
    out, _ = _out(capsys, "results", "--group-by", "strategy,hardware", "--select", "test_accuracy,epoch_time_s")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "strategy hardware n failed diverged test accuracy (%) epoch time (s)" in lines
    assert "ddp cpu:2 1 1 1 95.00 1.25" in lines
    assert "eager cpu:1 3 0 0 90.00 (80.00–97.00) 3.00 (2.00–4.00)" in lines
    out, _ = _out(
        capsys, "results", "-g", "strategy", "-s", "test_accuracy", "-f", "csv", "--sort", "test_accuracy_max"
    )
    assert list(csv.reader(io.StringIO(out))) == [
        ["strategy", "n", "failed", "diverged", "test_accuracy", "test_accuracy_min", "test_accuracy_max"],
        ["ddp", "1", "1", "1", "0.95", "0.95", "0.95"],
        ["eager", "3", "0", "0", "0.9", "0.8", "0.97"],
    ]


def test_a_group_over_results_of_other_code_or_cards_says_so(study: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, code in ((7, "one"), (8, "other")):
        study.done(seed=seed, result={"provenance": {"code_digest": code}})
    _, err = _out(capsys, "results", "--group-by", "strategy,hardware")
    assert "some rows combine runs that differ in code_digest: add these to --group-by, or use --where" in err
    assert "orchestrate submit --stale reruns them" in err
    _, err = _out(capsys, "results", "--group-by", "strategy,hardware,code_digest")
    assert "differ" not in err
    for seed, card in ((9, "H100"), (10, "H200")):
        study.done(seed=seed, result={"device_name": card})
    _, err = _out(capsys, "results", "--group-by", "strategy,hardware,code_digest")
    assert "differ in device_name" in err and "--stale" not in err


def test_a_key_of_a_group_stands_there_as_it_is_and_once(study: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Selected beside grouping by it, named twice, or one of the columns that are shown anyway."""
    out, _ = _out(capsys, "results", "--group-by", "strategy,seed,seed", "--select", "seed,lr,strategy", "-f", "csv")
    head, first, *_ = csv.reader(io.StringIO(out))
    assert head == ["strategy", "seed", "n", "failed", "diverged", "lr", "lr_min", "lr_max"]
    assert first[:2] == ["ddp", "0"]
    head, *_ = csv.reader(io.StringIO(_out(capsys, "results", "-g", "test_accuracy", "-f", "csv")[0]))
    assert len(head) == len(set(head)) and "test_accuracy_min" not in head
    out, _ = _out(capsys, "results", "-g", "seed", "-s", "seed", "-f", "csv")
    assert out.splitlines()[0] == "seed,n,failed,diverged"


def test_rows_of_several_experiments_say_which(study: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert "experiment" not in _out(capsys, "results")[0]
    study.done(seed=9, experiment="résumé 实验")
    assert "résumé 实验" in _out(capsys, "results")[0]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["results", "--select", "test_acuracy"],
            "--select test_acuracy: no column 'test_acuracy'\n  fix: did you mean",
        ),
        (["results", "--group-by", "modle"], "--group-by modle: no column 'modle'\n  fix: did you mean model?"),
        (
            ["results", "--sort", "-epoch_tim"],
            "--sort -epoch_tim: no column 'epoch_tim'\n  fix: did you mean epoch_time_s?",
        ),
        (["results", "--where", "lr"], "--where lr: not a condition"),
        (
            ["results", "--select", "published_test_accuracy"],
            "--select published_test_accuracy: no column 'published_test_accuracy'\n"
            "  why: published figures come from the experiment file\n  fix: add --published",
        ),
        (
            ["results", "--sort", "published_on"],
            "--sort published_on: no column 'published_on'\n  why: published figures",
        ),
        (
            ["results", "--where", "published_test_accuracy>0.5"],
            "--where published_test_accuracy>0.5: conditions select by measured values\n"
            "  why: published figures come from the experiment file\n  fix: --where test_accuracy>0.5;",
        ),
        (["results", "--set", "lr=1"], "--set lr=1: --set goes with --published\n  why: it changes"),
        (["results", "-g", "model", "-s", "device_name"], "--select: device_name has no median"),
        (["query", "SELECT :a", "-p", "a"], "-p a: not a parameter\n  fix: write -p NAME=VALUE"),
        (["query", "SELECT :a", "-p", "a=1", "-p", ":a=2"], "-p :a=2: :a is given twice\n  fix: remove one of them"),
        (["query", "SELECT 1", "-p", "a=1"], "SELECT 1: the statement has no :a\n  why: it has no parameter"),
        (["query", "DELETE FROM runs"], "DELETE FROM runs: query only reads"),
    ],
)
def test_bad_input_is_one_message(
    argv: list[str], message: str, study: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["collect"]) == 0
    capsys.readouterr()
    out, err = _out(capsys, *argv, code=2)
    assert out == ""
    assert err.startswith(message)


@pytest.mark.parametrize("other", ["csv", "table"])
@pytest.mark.parametrize("verb", ["results", "query 'SELECT 1'", "db info", "status", "data list", "data check"])
def test_two_formats_at_once_are_refused(verb: str, other: str, study: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """In either order, by every verb that has both options; the same one twice is none too many."""
    message = f"--json --format {other}: --json and --format name two formats\n  fix: remove one of them\n"
    for options in (["--json", "--format", other], ["-f", other, "--json"]):
        assert _out(capsys, *shlex.split(verb), *options, code=2) == ("", message)
    if verb == "results":
        assert _out(capsys, verb, "--json", "-f", "json")[0] == _out(capsys, verb, "--json")[0] != ""


def test_an_empty_folder_has_no_results_and_gets_no_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _, err = _out(capsys, "results", code=2)
    for same in (["query", "SELECT 1"], ["db", "info"], ["db", "info", "--columns"], ["cancel", "--all"]):
        assert _out(capsys, *same, code=2) == ("", err)
    fix = f"  fix: orchestrate submit --db {tmp_path}/other.db, or name the places with --runs and --db\n"
    assert _out(capsys, "query", "SELECT 1", "--db", "other.db", code=2)[1].endswith(fix)
    assert err == (
        f"{tmp_path}: nothing was submitted here yet\n  why: neither runs nor results.db exists\n"
        "  fix: orchestrate submit, or name the places with --runs and --db\n"
    )
    (tmp_path / "runs").mkdir()
    _, err = _out(capsys, "results", code=2)
    fix = "orchestrate collect creates it from the runs folder, --db names another"
    assert err == f"{tmp_path}/results.db: there is no database\n  fix: {fix}\n"
    assert _out(capsys, "query", "SELECT 1", code=2)[1] == err
    assert (
        f"orchestrate collect --db {tmp_path}/other.db creates it"
        in _out(capsys, "db", "info", "--db", "other.db", code=2)[1]
    )
    (tmp_path / "runs").rmdir()
    assert _out(capsys, "db", "upgrade", code=2)[1] == err
    assert "there is no runs folder" in _out(capsys, "collect", code=2)[1]
    assert "there is no runs folder" in _out(capsys, "db", "rebuild", code=2)[1]
    assert list(tmp_path.iterdir()) == []


def test_results_of_a_database_without_its_runs_folder_are_shown_with_a_note(
    study: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where the database was copied; nothing is made."""
    _out(capsys, "collect")
    out, err = _out(capsys, "results", "--runs", "nope")
    assert "cnn ddp seed=0" in out
    assert f"note: {tmp_path}/nope: there is no runs folder, so newer results are missing\n" in err
    assert not (tmp_path / "nope").exists()


@pytest.mark.parametrize(
    "argv",
    ["status", "watch", "logs cnn", "cancel --all", "retry --failed", "clean", "submit --local", "doctor --local"],
)
@pytest.mark.parametrize("empty", [False, True])
def test_runs_are_not_looked_after_in_a_folder_that_has_none(
    study: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: str, empty: bool
) -> None:
    """A wrong name, a disk that is not mounted: no run is taken for lost, and nothing is made."""
    _out(capsys, "collect")
    (tmp_path / "nope").mkdir() if empty else None
    states = _out(capsys, "query", "SELECT run_id, state, message FROM summary", "--json")
    out, err = _out(capsys, *argv.split(), "--runs", "nope", code=2)
    what = "the runs folder is empty" if empty else "there is no runs folder"
    why = f"{tmp_path}/results.db has 7 runs, and none has files there"
    fix = "name their folder with --runs or ORCHESTRATE_RUNS; for a new folder, name a new database with --db"
    assert (out, err) == ("", f"{tmp_path}/nope: {what}\n  why: {why}\n  fix: {fix}\n")
    assert _out(capsys, "query", "SELECT run_id, state, message FROM summary", "--json") == states
    assert (tmp_path / "nope").exists() == empty and not (empty and list((tmp_path / "nope").iterdir()))


def test_collect_says_what_it_took_and_what_it_skipped(study: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 3: partly done."""
    damaged = study.done(seed=8).result
    damaged.write_text("")
    out, err = _out(capsys, "collect", code=3)
    assert out == "new or changed: 8 runs, 8 attempts, 6 results, 14 epochs\n"
    assert err == (
        f"skipped: {damaged}: empty file\nskipped 1 file or folder\n"
        "  fix: repair them; every collect tries them again\n"
    )
    out, _ = _out(capsys, "collect", "--json", code=3)
    assert json.loads(out)["problems"] == [{"path": str(damaged), "what": "empty file"}]
    assert "skipped:" in _out(capsys, "results")[1]


def test_query_prints_rows_of_any_format_and_reads_standard_input(
    study: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(["collect"])
    capsys.readouterr()
    monkeypatch.setattr(
        sys, "stdin", io.StringIO("SELECT seed, test_accuracy FROM summary WHERE strategy = :s AND seed < 1")
    )
    out, err = _out(capsys, "query", "-", "-p", "s=ddp", "--json")
    assert (json.loads(out), err) == ([{"seed": 0, "test_accuracy": 0.95}], "")
    out, _ = _out(
        capsys, "query", "SELECT test_accuracy FROM summary WHERE seed = 0 AND strategy = 'ddp'", "-f", "markdown"
    )
    assert out == "| test_accuracy |\n| ---: |\n| 0.95 |\n"


@pytest.mark.parametrize(("errors", "where"), [("strict", "standard input"), ("surrogateescape", "SELECT '\\udcff'")])
def test_query_says_that_standard_input_is_no_text(
    errors: str, where: str, study: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python reads other bytes in two ways, by the locale."""
    stream = io.TextIOWrapper(io.BytesIO(b"SELECT '\xff'"), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", stream)
    assert _out(capsys, "query", "-", code=2)[1] == f"{where}: not valid UTF-8\n  fix: write it in UTF-8\n"


@pytest.mark.parametrize("style", ["table", "markdown", "latex"])
def test_query_shows_names_and_values_as_they_were_asked_for(
    study: Any, capsys: pytest.CaptureFixture[str], style: str
) -> None:
    """A column and an expression of it agree, and no byte is rounded away; nothing for null."""
    _out(capsys, "collect")
    asked = "test_accuracy, max(test_accuracy), peak_memory_bytes AS roomB, NULL AS none, 1/3.0 AS third"
    out, _ = _out(capsys, "query", f"SELECT {asked} FROM summary WHERE seed = 2 AND strategy = 'eager'", "-f", style)
    shown = [word for word in out.replace("\\_", "_").split() if word not in {"|", "&", "\\\\"}]
    heads = ["test_accuracy", "max(test_accuracy)", "roomB", "none", "third"]
    values = ["0.97", "0.97", str(2**30), str(1 / 3.0)]
    assert [word for word in shown if word in {*heads, *values}] == [*heads, *values]


def test_a_state_is_not_said_twice(study: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the reason is the state's own word, and there is another one."""
    for seed, state in enumerate(("cancelled", "wrong_hardware"), 20):
        study.done(seed=seed, result={"state": state, "reason": state, "test_accuracy": None})
    _out(capsys, "collect")
    out, _ = _out(capsys, "results")
    assert "cancelled" in out and "wrong_hardware" in out and "out_of_memory (host)" in out
    assert "(cancelled)" not in out and "(wrong_hardware)" not in out


def test_published_with_nothing_to_show_says_why(
    study: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No figures of others in the file, and no runs."""
    (tmp_path / "experiment.toml").write_text(
        '[matrix]\nmodel="cnn"\ndataset="digits"\nstrategy="eager"\nhardware="cpu:1"\n'
    )
    note = "note: experiment.toml has no [[published]], so there are no published figures to show\n"
    assert note in _out(capsys, "results", "--published")[1]
    open_store("empty.db").close()
    (tmp_path / "none").mkdir()
    _, err = _out(capsys, "results", "--published", "--db", "empty.db", "--runs", "none")
    assert err == f"note: no runs yet; next: orchestrate submit\n{note}"


def test_db_info_lists_tables_and_columns(study: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run(["collect"])
    capsys.readouterr()
    out, err = _out(capsys, "db", "info", "--json")
    assert {row["table"]: row["rows"] for row in json.loads(out)}["results"] == 6
    assert err.endswith(f"results.db: schema {revisions()[-1]}\n")
    out, _ = _out(capsys, "db", "info", "--columns", "-f", "csv")
    assert {"runs,lr,float", "results,lr_applied,float", "summary,state,str", "curves,epoch,int"} <= set(
        out.splitlines()
    )


def test_db_rebuild_and_upgrade(study: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """From nothing, again, and from a damaged file, which is kept."""
    expected = "rebuilt: 7 runs, 7 attempts, 6 results, 12 epochs\n"
    for _ in range(2):
        assert _out(capsys, "db", "rebuild") == (expected, "")
    assert _out(capsys, "db", "upgrade") == (f"{tmp_path}/results.db: schema {revisions()[-1]}\n", "")
    database = tmp_path / "results.db"
    with database.open("r+b") as stream:
        stream.seek(4096)
        stream.write(b"\xff" * (database.stat().st_size - 4096))
    damaged = database.read_bytes()
    assert "fix: run orchestrate db rebuild" in _out(capsys, "db", "info", code=1)[1]
    out, err = _out(capsys, "db", "rebuild")
    assert out == expected
    kept = Path(err.removeprefix("the damaged database is kept as ").strip())
    assert kept.read_bytes() == damaged
    open_store(str(database)).close()


def test_shell_completion_completes_runs(
    study: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels, also those that bash has a piece of, and run ids once one is begun; of the database that is named."""
    _out(capsys, "collect")
    context: Any = SimpleNamespace(params={})
    labels = completion.run_names(context, "")
    assert len(labels) == 7 and "cnn ddp seed=0" in labels
    assert completion.run_names(context, "cnn ddp") == [label for label in labels if label.startswith("cnn ddp")]
    run_id = json.loads(_out(capsys, "results", "--json", "--where", "strategy=ddp", "--where", "seed=0")[0])[0][
        "run_id"
    ]
    assert completion.run_names(context, run_id[:8]) == [run_id]
    with monkeypatch.context() as patch:
        patch.setenv("_ORCHESTRATE_BEFORE", "cnn ddp seed=")
        assert completion.run_names(context, "2") == ["2"]
    context.params["database"] = "elsewhere.db"
    assert completion.run_names(context, "") == []


def test_hostile_names_in_the_c_locale(study: Any, tmp_path: Path) -> None:
    """The whole way: file, database, table."""
    study.done(seed=11, label='日本 "x" $y; \\ | & \nz', experiment="résumé")
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "results", "--where", "experiment=résumé"],
        cwd=tmp_path,
        env={**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        check=True,
    )
    assert '日本 "x" $y; \\ | &; z' in done.stdout.decode()
