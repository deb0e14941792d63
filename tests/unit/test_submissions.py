"""No run is submitted twice, no submission is forgotten, and a result decides the state."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from db import queries
from db.connect import Store, open_store
from db.ingest import collect
from db.submissions import (
    AttemptRecord,
    StatusUpdate,
    attempt_histories,
    live_attempts,
    record_intents,
    update_statuses,
)
from workloads.contract import RecoveryRecord, ResourceShape, State, Submission
from workloads.files.json_file import write_json
from workloads.files.run_dir import RunDir


def _intend(store: Store, campaign: Any, *specs: Any, **options: Any) -> list[AttemptRecord]:
    return record_intents(store, campaign.runs, [(spec, ResourceShape(nodes=2)) for spec in specs], "local", **options)


def test_an_intent_is_a_live_attempt_with_a_unique_token(campaign: Any, database: str) -> None:
    """It is committed before anything is submitted; another connection sees it."""
    specs = [campaign.spec(seed=seed, label=f"run {seed}") for seed in range(3)]
    with open_store(database) as store, open_store(database) as other:
        intents = _intend(store, campaign, *specs)
        assert [(i.run_id, i.attempt) for i in intents] == [(s.run_id, 1) for s in specs]
        assert len({i.token for i in intents}) == 3
        known = {a.run_id: a for a in live_attempts(other)}
        for spec, intent in zip(specs, intents, strict=True):
            record = known[spec.run_id]
            assert (record.token, record.state, record.label) == (intent.token, State.SUBMITTING, spec.label)
            assert (record.shape, record.time_limit_s, record.target) == (ResourceShape(nodes=2), 3600, "local")
            assert record.submitted_at == intent.submitted_at


@pytest.mark.parametrize("state", [s for s in State if s is not State.PLANNED])
def test_a_run_with_a_live_attempt_is_skipped(state: State, campaign: Any, tmp_path: Path) -> None:
    """Submitting, pending and running are live; after any other state the next attempt gets the next number."""
    spec = campaign.spec()
    with open_store(str(tmp_path / "results.db")) as store:
        _intend(store, campaign, spec)
        update_statuses(store, [StatusUpdate(spec.run_id, 1, state)])
        again = _intend(store, campaign, spec)
        assert [i.attempt for i in again] == ([] if state.live else [2])


def test_a_duplicate_run_in_one_submit_is_submitted_once(campaign: Any, tmp_path: Path) -> None:
    spec = campaign.spec()
    with open_store(str(tmp_path / "results.db")) as store:
        assert len(_intend(store, campaign, spec, spec)) == 1


def test_a_run_that_was_submitted_since_the_plan_is_skipped(campaign: Any, tmp_path: Path) -> None:
    """It may even have ended by now: the plan is out of date."""
    spec = campaign.spec()
    with open_store(str(tmp_path / "results.db")) as store:
        assert _intend(store, campaign, spec, newest_known={})
        update_statuses(store, [StatusUpdate(spec.run_id, 1, State.FAILED)])
        assert _intend(store, campaign, spec, newest_known={}) == []
        assert [i.attempt for i in _intend(store, campaign, spec, newest_known={spec.run_id: 1})] == [2]


def test_numbers_of_attempts_on_disk_are_not_reused(campaign: Any, tmp_path: Path) -> None:
    """With a new database and old directories: files of attempt 3 would be mixed with new ones."""
    run = campaign.run()
    run.attempt(3).create()
    with open_store(str(tmp_path / "results.db")) as store:
        assert [i.attempt for i in _intend(store, campaign, campaign.specs[run.run_id])] == [4]


def test_a_new_label_replaces_the_old_one(campaign: Any, tmp_path: Path) -> None:
    """Label and experiment are not part of a run's identity; the newest ones are shown."""
    with open_store(str(tmp_path / "results.db")) as store:
        spec = campaign.spec(label="old")
        _intend(store, campaign, spec)
        update_statuses(store, [StatusUpdate(spec.run_id, 1, State.FAILED)])
        _intend(store, campaign, campaign.spec(label="new", experiment="other"))
        record = queries.run_records(store)[spec.run_id]
        assert (record.label, record.experiment, record.attempt) == ("new", "other", 2)


def test_sixteen_submits_at_once_submit_each_run_once(campaign: Any, database: str) -> None:
    """Each process wants all runs; together they get every one exactly once, and none fails."""
    specs = [campaign.spec(seed=seed) for seed in range(20)]
    folder = Path(campaign.runs.parent)
    children = []
    for child in range(16):
        process = os.fork()
        if process == 0:
            try:
                with open_store(database) as store:
                    got = [i for spec in specs[child:] + specs[:child] for i in _intend(store, campaign, spec)]
                (folder / f"submitted.{child}").write_text("".join(f"{i.run_id} {i.attempt}\n" for i in got))
                os._exit(0)
            except BaseException:
                import traceback

                traceback.print_exc()
            os._exit(1)
        children.append(process)
    assert [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in children] == [0] * 16
    submitted = [line for child in range(16) for line in (folder / f"submitted.{child}").read_text().splitlines()]
    assert sorted(submitted) == sorted(f"{spec.run_id} 1" for spec in specs)


def test_a_status_update_keeps_fields_that_are_none(campaign: Any, database: str) -> None:
    spec = campaign.spec()
    with open_store(database) as store:
        _intend(store, campaign, spec)
        assert update_statuses(store, [StatusUpdate(spec.run_id, 1, State.PENDING, job_id="17", reason="Priority")])
        assert update_statuses(store, [StatusUpdate(spec.run_id, 1, State.RUNNING, reason="")])
        (record,) = live_attempts(store)
        assert (record.job_id, record.reason, record.state) == ("17", "", State.RUNNING)
        assert update_statuses(
            store,
            [StatusUpdate(spec.run_id, 1, State.TIMEOUT, message="after 1 h", ended_at="2026-01-01T01:00:00+00:00")],
        )
        assert live_attempts(store) == []
        assert not update_statuses(store, [StatusUpdate(spec.run_id, 2, State.RUNNING)])


def test_a_late_observation_does_not_revive_an_ended_attempt(campaign: Any, tmp_path: Path) -> None:
    """What squeue printed may be older than the end. A lost job may be found again."""
    spec = campaign.spec()
    with open_store(str(tmp_path / "results.db")) as store:
        _intend(store, campaign, spec)
        update_statuses(store, [StatusUpdate(spec.run_id, 1, State.CANCELLED)])
        assert not update_statuses(store, [StatusUpdate(spec.run_id, 1, State.RUNNING)])
        assert queries.run_records(store)[spec.run_id].state is State.CANCELLED
        update_statuses(store, [StatusUpdate(spec.run_id, 1, State.LOST)])
        assert update_statuses(store, [StatusUpdate(spec.run_id, 1, State.RUNNING)])


def test_histories_are_of_runs_that_recovery_may_resubmit(campaign: Any, database: str) -> None:
    """All attempts of runs that ended without a result or were resubmitted, with the reason, also from files."""
    failed, again, fine = (campaign.spec(seed=seed) for seed in range(3))
    why = RecoveryRecord(failure="lost", number=1)
    with open_store(database) as store:
        _intend(store, campaign, failed, again, fine)
        for spec, state in ((failed, State.FAILED), (again, State.LOST), (fine, State.SUCCEEDED)):
            update_statuses(store, [StatusUpdate(spec.run_id, 1, state)])
        _intend(store, campaign, again, recoveries={again.run_id: why, fine.run_id: why})
        found = attempt_histories(store)
        assert {k: [r.attempt for r in v] for k, v in found.items()} == {failed.run_id: [1], again.run_id: [1, 2]}
        assert [r.recovery for r in found[again.run_id]] == [None, why]
        run = RunDir.of(campaign.runs, again.run_id)
        run.write_spec(again)
        third = Submission(token="t", target="local", attempt=3, recovery=replace(why, number=2))
        write_json(run.attempt(3).create().submission, third.to_json())
        assert collect(store, campaign.runs).problems == []
        assert attempt_histories(store)[again.run_id][-1].recovery == third.recovery


def test_a_result_decides_the_state(campaign: Any, tmp_path: Path) -> None:
    """The job wrote its result; that Slurm saw it cancelled during its cleanup does not matter."""
    attempt = campaign.done()
    run_id = attempt.path.parents[1].name
    with open_store(str(tmp_path / "results.db")) as store:
        collect(store, campaign.runs)
        assert (
            update_statuses(store, [StatusUpdate(run_id, 1, State.CANCELLED), StatusUpdate(run_id, 1, State.LOST)]) == 0
        )
        assert queries.run_records(store)[run_id].state is State.SUCCEEDED
