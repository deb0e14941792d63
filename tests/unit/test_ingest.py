"""Ingesting run directories: every row once, whatever happens, on SQLite and PostgreSQL."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, insert, select

from db import ingest, submissions
from db.connect import Store, open_store
from db.ingest import collect, rebuild
from db.models import CONTENT, attempts, classes, epochs, ranks, results, runs
from db.submissions import StatusUpdate, update_statuses
from orchestrator.backends.base import Status
from workloads.contract import ResourceShape, RunResult, State
from workloads.errors import InputError
from workloads.files.json_file import write_json
from workloads.files.run_dir import RunDir

Content = dict[str, list[tuple[Any, ...]]]


def content(store: Store) -> Content:
    """All rows of all tables except the stamps of files."""
    with store.read() as connection:
        return {
            t.name: sorted((tuple(row) for row in connection.execute(select(t))), key=lambda row: repr(row[:3]))
            for t in CONTENT
        }


def collected(database: str, campaign: Any) -> Content:
    with open_store(database) as store:
        assert collect(store, campaign.runs).problems == []
        return content(store)


def test_rows_have_the_values_of_the_files(campaign: Any, database: str) -> None:
    """Every column of runs and results comes from the field of its name, lists become their own tables."""
    attempt = campaign.submit(campaign.run(lr=0.1, strategy_options={"balance": (1, 2), "a": True}, dropout=None))
    campaign.train(attempt, range(1, 3), test_accuracy=0.5, lr=0.1, peak_memory_bytes=3 * 2**30)
    per_class = [{"class_name": "cat", "precision": 0.5, "recall": 0.25, "f1": 1 / 3, "support": 7}]
    memory = [{"rank": r, "allocated_memory_bytes": 5, "peak_memory_bytes": 6 + r} for r in (0, 1)]
    result = {"lr_applied": 0.1, "per_class": per_class, "memory_by_rank": memory, "num_parameters": 2**40}
    result["balance_applied"] = [9, 13]
    campaign.finish(attempt, **result, provenance={"code_digest": "c0de", "packages_digest": "9ac4", "x": [1]})
    with open_store(database) as store:
        found = collect(store, campaign.runs)
        assert (found.runs, found.attempts, found.results, found.epochs, found.problems) == (1, 1, 1, 2, [])
        with store.read() as connection:
            run = connection.execute(select(runs)).mappings().one()
            spec = campaign.specs[run["run_id"]]
            assert {k: run[k] for k in spec.train.to_json() if k != "strategy_options"} == {
                k: v for k, v in spec.train.to_json().items() if k != "strategy_options"
            }
            assert (run["label"], run["strategy_options"]) == (spec.label, '{"a":true,"balance":[1,2]}')
            row = connection.execute(select(results)).mappings().one()
            assert (row["lr_applied"], row["num_parameters"]) == (0.1, 2**40)
            assert row["balance_applied"] == "[9,13]"
            assert (row["code_digest"], row["packages_digest"], row["state"]) == ("c0de", "9ac4", "succeeded")
            assert json.loads(row["provenance"])["x"] == [1]
            assert connection.execute(select(classes)).one()[2:] == (0, "cat", 0.5, 0.25, 1 / 3, 7)
            assert [row[2:] for row in connection.execute(select(ranks).order_by(ranks.c.rank))] == [
                (0, 5, 6),
                (1, 5, 7),
            ]
            epoch = connection.execute(select(epochs).where(epochs.c.epoch == 2)).mappings().one()
            assert (epoch["train_loss"], epoch["test_accuracy"], epoch["diverged"]) == (0.5, 0.5, False)
            row = connection.execute(select(attempts)).mappings().one()
            assert (row["job_id"], row["time_limit_s"], row["shape"]) == ("1000", 3600, '{"nodes":1}')
            assert row["started_at"] is not None


def test_collecting_again_changes_nothing_and_takes_no_lock(campaign: Any, database: str) -> None:
    """The second call reads no file and takes no write lock: it returns while another process holds it."""
    campaign.done()
    first = collected(database, campaign)
    with open_store(database) as store, store.write() as writer:
        found = collect(store, campaign.runs)
        assert (found.runs, found.attempts, found.results, found.epochs, found.problems) == (0, 0, 0, 0, [])
        writer.execute(select(runs))
    assert collected(database, campaign) == first


def test_only_what_was_appended_is_read(campaign: Any, database: str) -> None:
    """An incomplete last line is left for later, and ingested when the rest was written."""
    attempt = campaign.submit(campaign.run())
    campaign.train(attempt, range(1, 3))
    line = json.dumps({"event": "epoch", "epoch": 3, "train_loss": 0.25}, separators=(",", ":")) + "\n"
    with open_store(database) as store:
        assert collect(store, campaign.runs).epochs == 2
        with attempt.events().open("a") as stream:
            stream.write(line[:20])
        assert collect(store, campaign.runs).epochs == 0
        with attempt.events().open("a") as stream:
            stream.write(line[20:])
        assert collect(store, campaign.runs).epochs == 1
        assert [row[2] for row in content(store)["epochs"]] == [1, 2, 3]


def test_a_requeued_attempt_duplicates_no_rows(campaign: Any, database: str) -> None:
    """Slurm starts the same attempt again: its epochs are replaced, its start stays the first."""
    attempt = campaign.submit(campaign.run())
    campaign.train(attempt, range(1, 4), train_loss=9.0)
    with open_store(database) as store:
        collect(store, campaign.runs)
        first = content(store)
        campaign.train(attempt, range(2, 4), train_loss=1.0)
        collect(store, campaign.runs)
        second = content(store)
    assert [row[2:5] for row in second["epochs"]] == [(1, 12, 9.0), (2, 12, 1.0), (3, 12, 1.0)]
    assert second["attempts"] == first["attempts"]
    with open_store(database) as store:
        # Both starts in one file that was not ingested in between.
        rebuild(store, campaign.runs)
        assert content(store)["epochs"] == second["epochs"]


def test_a_rank_that_only_lost_its_peer_does_not_decide_the_state(campaign: Any, database: str) -> None:
    """Its peer ran out of memory. What it measured is kept; the state comes from ``exit.json``, or stays running."""
    attempt = campaign.submit(campaign.run())
    campaign.train(attempt, range(1, 3))
    campaign.finish(attempt, state="failed", reason="rank_lost", message="rank 0: peer", epochs_done=2)

    def status() -> tuple[Any, ...]:
        found = collected(database, campaign)
        (row,), (measured,) = found["attempts"], found["results"]
        values = dict(zip(attempts.columns.keys(), row, strict=True))
        assert dict(zip(results.columns.keys(), measured, strict=True))["epochs_done"] == 2
        return values["state"], values["reason"], values["message"]

    assert status() == ("running", "", "")
    with open_store(database) as store:
        update = StatusUpdate(
            attempt.path.parents[1].name, 1, State.OUT_OF_MEMORY, reason="host_memory", message="full"
        )
        assert update_statuses(store, [update]) == 1
    Status(State.OUT_OF_MEMORY, "host_memory", "full").write_exit(attempt)
    assert status() == ("out_of_memory", "host_memory", "full")
    attempt.result.touch()
    assert status() == ("out_of_memory", "host_memory", "full")


def test_epochs_of_a_later_attempt_replace_earlier_ones(campaign: Any, database: str) -> None:
    """Attempt 2 resumed after epoch 1; the view ``curves`` has each epoch once, from the attempt that ran it last."""
    run = campaign.run()
    campaign.train(campaign.submit(run, 1), range(1, 4), train_loss=9.0)
    campaign.train(campaign.submit(run, 2), range(2, 4), train_loss=1.0)
    with open_store(database) as store:
        collect(store, campaign.runs)
        with store.read() as connection:
            rows = connection.exec_driver_sql("SELECT epoch, attempt, train_loss FROM curves ORDER BY epoch")
            assert [tuple(row) for row in rows] == [(1, 1, 9.0), (2, 2, 1.0), (3, 2, 1.0)]


def test_a_file_that_shrank_is_read_from_its_start(campaign: Any, database: str) -> None:
    attempt = campaign.submit(campaign.run())
    campaign.train(attempt, range(1, 9))
    with open_store(database) as store:
        collect(store, campaign.runs)
        attempt.events().unlink()
        campaign.train(attempt, range(1, 3), train_loss=7.0)
        assert collect(store, campaign.runs).epochs == 2
        assert [row[4] for row in content(store)["epochs"]][:2] == [7.0, 7.0]


def test_nan_and_infinity_are_null_and_mark_the_row_as_diverged(campaign: Any, database: str) -> None:
    """As our writer writes them (null), and as another one might (NaN is not JSON, but Python reads it)."""
    attempt = campaign.submit(campaign.run())
    campaign.train(attempt, range(1, 3), train_loss=float("nan"), test_loss=float("inf"))
    with attempt.events().open("a") as stream:
        stream.write('{"event":"epoch","epoch":3,"train_loss":NaN}\n{"event":"epoch","epoch":4,"train_loss":0.5}\n')
    campaign.finish(attempt, train_loss=float("nan"), test_loss=float("-inf"))
    found = collected(database, campaign)
    assert [(row[2], row[4], row[-1]) for row in found["epochs"]] == [
        (1, None, True),
        (2, None, True),
        (3, None, True),
        (4, 0.5, False),
    ]
    (result,) = found["results"]
    values = dict(zip(results.columns.keys(), result, strict=True))
    assert (values["train_loss"], values["test_loss"], values["diverged"]) == (None, None, True)
    assert json.loads(values["nonfinite"]) == {"train_loss": "nan", "test_loss": "-inf"}


def _result(**changes: Any) -> Callable[[Path], None]:
    """A result in which some values were changed afterwards."""

    def write(path: Path) -> None:
        run_id, attempt = path.parents[2].name, int(path.parent.name)
        path.write_text(json.dumps(RunResult(run_id=run_id, attempt=attempt, state="succeeded").to_json() | changes))

    return write


DAMAGED_RESULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "zero bytes": (lambda p: p.write_bytes(b""), "empty file"),
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:50]), "not whole JSON"),
    "binary": (lambda p: p.write_bytes(b"\xff\xfe\x00"), "not whole JSON"),
    "a list": (lambda p: p.write_text("[]"), "not a JSON object"),
    "nested": (lambda p: p.write_text("[" * 100_000), "nested too deeply"),
    "another run's": (_result(run_id="0" * 16), "belongs to run 0000000000000000 attempt 1"),
    "another attempt's": (_result(attempt=7), "attempt 7"),
    "a newer version's": (_result(spec_version=99), "spec_version 99 is not 1"),
    "unknown state": (_result(state="fine"), "'fine' is not a valid State"),
    "still running": (_result(state="running"), "state 'running' is not the end of an attempt"),
    "text for a number": (_result(test_accuracy="high"), "test_accuracy is 'high', not a number"),
    "true for a number": (_result(epochs_done=True), "epochs_done is True, not a whole number of 64 bits"),
    "huge number": (_result(num_parameters=2**70), "not a whole number of 64 bits"),
    "list for provenance": (_result(provenance=[]), "provenance is not a dict"),
    "text for classes": (_result(per_class="none"), "per_class is not a list"),
    "text for a class": (_result(per_class=["cat"]), "'cat' is not a JSON object"),
    "a class without name": (_result(per_class=[{"f1": 1.0}]), "class_name is missing"),
}


@pytest.mark.parametrize("kind", DAMAGED_RESULTS)
def test_a_damaged_result_is_named_and_ingested_once_repaired(kind: str, campaign: Any, tmp_path: Path) -> None:
    """The other runs and the attempt's own epochs are ingested; the attempt keeps its state."""
    damage, message = DAMAGED_RESULTS[kind]
    attempt, other = campaign.done(seed=0), campaign.done(seed=1)
    damage(attempt.result)
    with open_store(str(tmp_path / "results.db")) as store:
        for _ in range(2):
            found = collect(store, campaign.runs)
            assert [p.path for p in found.problems] == [attempt.result]
            assert message in found.problems[0].what
        assert [row[0] for row in content(store)["results"]] == [other.path.parent.parent.name]
        assert {row[4] for row in content(store)["attempts"]} == {"pending", "succeeded"}
        assert len(content(store)["epochs"]) == 4
        campaign.finish(attempt)
        assert collect(store, campaign.runs).problems == []
        assert len(content(store)["results"]) == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("submission.json", "{", "not whole JSON"),
        ("submission.json", '{"attempt": 2}', "belongs to attempt 2"),
        ("submission.json", '{"time_limit_s": "1 h"}', "time_limit_s is '1 h', not a whole number"),
        ("submission.json", '{"shape": "wide"}', "shape is 'wide', not a JSON object"),
        ("exit.json", "", "empty file"),
        ("exit.json", "{}", "None is not a valid State"),
        ("exit.json", '{"state": "pending"}', "state 'pending' is not the end of an attempt"),
        ("exit.json", '{"state": "failed", "reason": 3}', "reason is 3, not a text"),
    ],
)
def test_a_damaged_submission_or_exit_is_named(
    name: str, text: str, message: str, campaign: Any, tmp_path: Path
) -> None:
    attempt = campaign.submit(campaign.run())
    (attempt.path / name).write_text(text)
    with open_store(str(tmp_path / "results.db")) as store:
        (problem,) = collect(store, campaign.runs).problems
        assert problem.path == attempt.path / name
        assert message in problem.what


def test_an_invalid_epoch_is_named_and_the_others_are_kept(campaign: Any, tmp_path: Path) -> None:
    attempt = campaign.submit(campaign.run())
    campaign.train(attempt, range(1, 3))
    with attempt.events().open("a") as stream:
        stream.write('{"event":"epoch","epoch":"last"}\nnot json\n{"event":"epoch","epoch":3}\n[]\n')
    with open_store(str(tmp_path / "results.db")) as store:
        (problem,) = collect(store, campaign.runs).problems
        assert problem.what == "an epoch's epoch is 'last', not a whole number of 64 bits"
        assert [row[2] for row in content(store)["epochs"]] == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty file"),
        ("{}", "spec_version None is not 1"),
        ('{"spec_version": 1, "run_id": "x"}', "not a run spec"),
    ],
)
def test_a_run_with_a_damaged_spec_is_ingested_once_repaired(
    text: str, message: str, campaign: Any, tmp_path: Path
) -> None:
    attempt = campaign.done(seed=0)
    campaign.done(seed=1)
    spec = attempt.path.parents[1] / "spec.json"
    whole = spec.read_text()
    spec.write_text(text)
    with open_store(str(tmp_path / "results.db")) as store:
        (problem,) = collect(store, campaign.runs).problems
        assert problem.path == spec and message in problem.what
        assert len(content(store)["runs"]) == 1
        spec.write_text(whole)
        assert collect(store, campaign.runs).problems == []
        assert len(content(store)["results"]) == 2


def test_attempts_without_a_spec_belong_to_no_run(campaign: Any, tmp_path: Path) -> None:
    """A directory that is about to get its spec is not a problem; one with attempts and no spec is."""
    run = RunDir.of(campaign.runs, "0123456789abcdef")
    run.path.mkdir(parents=True)
    with open_store(str(tmp_path / "results.db")) as store:
        assert collect(store, campaign.runs).problems == []
        campaign.submit(run)
        (problem,) = collect(store, campaign.runs).problems
        assert "missing, so its attempts belong to no known run" in problem.what


def test_a_copied_directory_does_not_get_the_token(campaign: Any, database: str) -> None:
    """Jobs are found by their tokens, so each belongs to one attempt; the copy is reported and has none."""
    first, second = campaign.done(seed=0), campaign.submit(campaign.run(seed=1))
    with open_store(database) as store:
        collect(store, campaign.runs)
        shutil.copy(first.submission, second.submission)
        (problem,) = collect(store, campaign.runs).problems
        assert "has the token of attempt 1 of run" in problem.what
        tokens = {row[0]: row[2] for row in content(store)["attempts"]}
    assert sorted(tokens.values(), key=str) == [None, f"token-{first.path.parents[1].name}-1"]


@pytest.mark.parametrize("label", ["a b \"c\" 'd' $HOME; `x` | & \n\t", "日本 é \U0001f600", "nul \0", "\ud800 half"])
def test_any_text_is_stored(label: str, campaign: Any, database: str) -> None:
    """What a database cannot store (NUL, a lone surrogate) is escaped, the rest stays as it is."""
    run = campaign.run()
    data = json.loads(run.spec.read_text())
    run.spec.write_text(json.dumps(data | {"label": label}))
    campaign.finish(campaign.submit(run), state="failed", reason="program_error", message=label)
    kept = label.replace("\0", "\\x00").replace("\ud800", "\\ud800")
    found = collected(database, campaign)
    assert found["runs"][0][1] == kept
    assert found["attempts"][0][6] == kept


STATES: list[tuple[str, dict[str, Any], str, str]] = [
    ("nothing but a folder", {}, "lost", ""),
    ("submitted, no answer yet", {"submission": {"job_id": None}}, "submitting", ""),
    ("submitted", {"submission": {}}, "pending", ""),
    (
        "observed to end",
        {"submission": {}, "exit": {"state": "timeout", "reason": "time_limit"}},
        "timeout",
        "time_limit",
    ),
    ("ended well without result", {"submission": {}, "exit": {"state": "succeeded"}}, "failed", "no_result"),
    ("result", {"submission": {}, "result": {}}, "succeeded", ""),
    ("failed", {"submission": {}, "result": {"state": "failed", "reason": "program_error"}}, "failed", "program_error"),
    ("result before exit", {"submission": {}, "exit": {"state": "cancelled"}, "result": {}}, "succeeded", ""),
]


@pytest.mark.parametrize(("name", "files", "state", "reason"), STATES, ids=[s[0] for s in STATES])
def test_the_state_comes_from_the_most_reliable_file(
    name: str, files: dict[str, Any], state: str, reason: str, campaign: Any, tmp_path: Path
) -> None:
    """The result, else ``exit.json``, else ``submission.json``. Only an observation says that an attempt runs."""
    run = campaign.run()
    attempt = campaign.submit(run, **files["submission"]) if "submission" in files else run.attempt(1).create()
    campaign.train(attempt)
    if "exit" in files:
        write_json(attempt.exit, files["exit"])
    if "result" in files:
        campaign.finish(attempt, **files["result"])
    (row,) = collected(str(tmp_path / "results.db"), campaign)["attempts"]
    assert (row[4], row[5]) == (state, reason)


def test_an_observed_state_stays_until_a_file_has_a_final_one(campaign: Any, tmp_path: Path) -> None:
    spec = campaign.spec()
    with open_store(str(tmp_path / "results.db")) as store:
        (intent,) = submissions.record_intents(store, campaign.runs, [(spec, ResourceShape())], "local")
        attempt = campaign.submit(campaign.run(), token=intent.token, submitted_at=intent.submitted_at)
        submissions.update_statuses(
            store, [submissions.StatusUpdate(spec.run_id, 1, State.RUNNING, reason="on node 7")]
        )
        campaign.train(attempt)
        collect(store, campaign.runs)
        assert content(store)["attempts"][0][4:6] == ("running", "on node 7")
        campaign.finish(attempt)
        collect(store, campaign.runs)
        assert content(store)["attempts"][0][4:6] == ("succeeded", "")


def _collect_in_child(database: str, runs_folder: Path, prepare: Callable[[], None] = lambda: None) -> int:
    """Fork a process that collects; return its process id."""
    child = os.fork()
    if child == 0:
        try:
            prepare()
            with open_store(database) as store:
                os._exit(0 if not collect(store, runs_folder).problems else 3)
        except BaseException:
            import traceback

            traceback.print_exc()
        os._exit(1)
    return child


def test_sixteen_collects_at_once_ingest_everything_once(
    campaign: Any, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They also create the database at the same time. No row is duplicated or missing, and none fails."""
    monkeypatch.setattr(ingest, "RUNS_PER_TRANSACTION", 2)
    for seed in range(12):
        campaign.done(seed=seed)
    children = [_collect_in_child(database, campaign.runs) for _ in range(16)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 16
    with open_store(database) as store:
        assert collect(store, campaign.runs).runs == 0
        assert content(store) == collected(str(tmp_path / "alone.db"), campaign)


@pytest.mark.parametrize("writes", range(0, 14, 3))
def test_a_collect_that_is_killed_loses_and_duplicates_nothing(
    writes: int, campaign: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL after some writes of a batch, in the first batch or a later one; the next collect completes."""
    monkeypatch.setattr(ingest, "RUNS_PER_TRANSACTION", 2)
    for seed in range(4):
        campaign.done(seed=seed)
    database = str(tmp_path / "results.db")
    open_store(database).close()
    upsert = ingest.upsert
    done = multiprocessing.Value("i", 0)

    def killing(*arguments: Any) -> None:
        if done.value == writes:
            os.kill(os.getpid(), signal.SIGKILL)
        done.value += 1
        upsert(*arguments)

    child = _collect_in_child(database, campaign.runs, lambda: monkeypatch.setattr(ingest, "upsert", killing))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert collected(database, campaign) == collected(str(tmp_path / "alone.db"), campaign)


def test_a_rebuilt_database_equals_one_that_was_collected_step_by_step(campaign: Any, database: str) -> None:
    """Attempts that failed, resumed, diverged and ended."""
    with open_store(database) as store:
        for seed in range(3):
            run = campaign.run(seed=seed)
            first = campaign.submit(run, 1, job_id=None)
            collect(store, campaign.runs)
            campaign.submit(run, 1)
            campaign.train(first, range(1, 3), train_loss=float("inf") if seed == 1 else 0.5)
            collect(store, campaign.runs)
            write_json(first.exit, {"state": "node_fail", "reason": "node", "message": "", "ended_at": "2026-01-01"})
            collect(store, campaign.runs)
            second = campaign.submit(run, 2)
            campaign.train(second, range(3, 5))
            collect(store, campaign.runs)
            campaign.finish(second, per_class=[{"class_name": "0"}], memory_by_rank=[{"rank": 0}])
            collect(store, campaign.runs)
        grown = content(store)
        assert [len(grown[t.name]) for t in CONTENT] == [3, 6, 3, 12, 3, 3]
        found = rebuild(store, campaign.runs)
        assert (found.runs, found.attempts, found.results, found.epochs, found.problems) == (3, 6, 3, 12, [])
        assert content(store) == grown
        with store.write() as connection:
            connection.execute(delete(epochs).where(epochs.c.epoch == 3))
            connection.execute(insert(ranks).values(run_id=grown["runs"][0][0], attempt=1, rank=9))
        rebuild(store, campaign.runs)
        assert content(store) == grown
        assert collect(store, campaign.runs).attempts == 0


def test_a_rebuild_during_a_campaign_keeps_what_only_the_store_knows(campaign: Any, database: str) -> None:
    """An intent without a directory, one whose folder is being created, a running attempt, and a lost one."""
    specs = [campaign.spec(seed=seed) for seed in range(4)]
    with open_store(database) as store:
        intents = submissions.record_intents(
            store, campaign.runs, [(s, ResourceShape(nodes=2)) for s in specs], "local"
        )
        making, running, lost = (campaign.run(seed=seed) for seed in (1, 2, 3))
        making.attempt(1).create()
        for run, intent in ((running, intents[2]), (lost, intents[3])):
            campaign.submit(
                run, token=intent.token, submitted_at=intent.submitted_at, shape=ResourceShape(nodes=2).to_json()
            )
        submissions.update_statuses(store, [submissions.StatusUpdate(running.run_id, 1, State.RUNNING, job_id="1000")])
        submissions.update_statuses(
            store, [submissions.StatusUpdate(lost.run_id, 1, State.LOST, job_id="1000", reason="vanished")]
        )
        collect(store, campaign.runs)
        before = content(store)
        rebuild(store, campaign.runs)
        assert content(store) == before
        assert sorted(row[4] for row in before["attempts"]) == ["lost", "running", "submitting", "submitting"]
        assert {a.token for a in submissions.live_attempts(store)} == {i.token for i in intents[:3]}


def test_a_rebuild_names_the_damage_that_would_lose_a_run(campaign: Any, database: str) -> None:
    run = campaign.done(seed=0).path.parents[1]
    with open_store(database) as store:
        collect(store, campaign.runs)
        (run / "spec.json").write_text("{half")
        with pytest.raises(InputError, match=rf"{run.name}; {run}/spec.json: not whole JSON"):
            rebuild(store, campaign.runs)


def test_a_rebuild_from_the_wrong_folder_is_rejected(campaign: Any, database: str, tmp_path: Path) -> None:
    """Runs without a directory would be lost, which needs --drop-missing; without it nothing changes."""
    campaign.done(seed=0)
    gone = campaign.done(seed=1).path.parents[1]
    with open_store(database) as store:
        collect(store, campaign.runs)
        before = content(store)
        shutil.rmtree(gone)
        with pytest.raises(InputError, match=rf"1 of 2 runs in the database have no readable dir.*\n.*{gone.name}"):
            rebuild(store, campaign.runs)
        assert content(store) == before
        assert rebuild(store, campaign.runs, drop_missing=True).runs == 1
        assert len(content(store)["runs"]) == 1


@pytest.mark.parametrize("loss", ["attempts", "attempt", "result", "emptied", "events"])
def test_a_rebuild_drops_measurements_only_with_drop_missing(loss: str, campaign: Any, database: str) -> None:
    """Files of an attempt are missing or damaged, so the database has the only copy."""
    campaign.done(seed=0)
    attempt = campaign.done(seed=1)
    run_id = attempt.path.parents[1].name
    with open_store(database) as store:
        collect(store, campaign.runs)
        before = content(store)
        if loss in {"attempts", "attempt"}:
            shutil.rmtree(attempt.path if loss == "attempt" else attempt.path.parent)
        elif loss == "emptied":
            attempt.result.write_text("")
        else:
            (attempt.result if loss == "result" else attempt.events()).unlink()
        what, named = {
            "result": ("1 of 2 results in the database have no readable file", f"{run_id} attempt 1"),
            "emptied": (
                "1 of 2 results in the database have no readable file",
                f"{run_id} attempt 1; {attempt.result}: empty file",
            ),
            "events": (
                "2 of 4 epochs in the database are in no readable file",
                f"{run_id} attempt 1 epoch 1, {run_id} attempt 1 epoch 2",
            ),
        }.get(loss, ("1 of 2 attempts in the database have no readable files", f"{run_id} attempt 1"))
        with pytest.raises(InputError) as error:
            rebuild(store, campaign.runs)
        assert (error.value.what, error.value.why) == (f"{what} in {campaign.runs}", f"they would be lost: {named}")
        assert error.value.hint == "name the right folder with --runs, or add --drop-missing"
        assert content(store) == before
        rebuild(store, campaign.runs, drop_missing=True)
        after = content(store)
    assert {name: len(rows) for name, rows in after.items()} == {
        "runs": 2,
        "attempts": 1 if loss in {"attempts", "attempt"} else 2,
        "results": 2 if loss == "events" else 1,
        "epochs": 4 if loss in {"result", "emptied"} else 2,
        "classes": 0,
        "ranks": 0,
    }
    # A run whose result was let go is no success any more.
    states = {row[0]: row[4] for row in after["attempts"]}
    assert states.get(run_id) == {"result": "pending", "emptied": "pending", "events": "succeeded"}.get(loss)


def test_a_rebuild_has_what_another_command_ingests_meanwhile(
    campaign: Any, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch ends, and is collected, after the rebuild read the files and before it has the write lock."""
    attempt = campaign.submit(campaign.run())
    campaign.train(attempt, range(1, 3))
    with open_store(database) as store:
        collect(store, campaign.runs)

        def slow(fresh: Store, folder: Path) -> Any:
            found = collect(fresh, folder)
            monkeypatch.setattr(ingest, "collect", collect)
            campaign.train(attempt, range(3, 4))
            collect(store, folder)
            return found

        monkeypatch.setattr(ingest, "collect", slow)
        assert rebuild(store, campaign.runs).epochs == 3
