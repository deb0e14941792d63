"""Files of a submission, and the run folders that a starting job makes from them."""

from __future__ import annotations

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from db.connect import open_store
from db.submissions import live_attempts
from orchestrator.backends.base import Request
from orchestrator.backends.slurm.records import ArrayFolder, ArrayRecord
from orchestrator.parallel_io import AT_A_TIME, FEW, for_each
from orchestrator.tracking import tracker
from workloads.contract import RecoveryRecord, State, Submission
from workloads.files.array_record import create_run_folders, specs_file
from workloads.files.json_file import read_json
from workloads.files.packed_specs import pack_specs, unpack_specs


def test_for_each_runs_each_item_once_and_several_at_a_time() -> None:
    """Few items without a thread; one failure among many is raised."""
    done: list[int] = []
    threads: set[str] = set()

    def work(item: int) -> None:
        threads.add(threading.current_thread().name)
        done.append(item)
        time.sleep(0.001)

    for_each(work, range(FEW - 1))
    assert done == list(range(FEW - 1)) and threads == {"MainThread"}
    for_each(work, range(10 * FEW))
    assert sorted(done[FEW - 1 :]) == list(range(10 * FEW)) and 2 < len(threads) <= 1 + AT_A_TIME

    def fail(item: int) -> None:
        if item == 100:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        for_each(fail, range(200))


def _request(campaign: Any, seed: int, *, attempt: int = 1, recovery: RecoveryRecord | None = None) -> Request:
    submission = Submission(
        token=f"t{seed}", target="lab", attempt=attempt, submitted_at="now", time_limit_s=3600, recovery=recovery
    )
    return Request(campaign.runs, campaign.spec(seed=seed), submission)


def _begin(campaign: Any, requests: list[Request]) -> tuple[ArrayFolder, ArrayRecord]:
    folder = ArrayFolder(campaign.runs)
    return folder, folder.create(ArrayRecord.new("lab", requests), [d.spec for d in requests])


def test_an_array_is_two_files_until_its_tasks_start(campaign: Any) -> None:
    """Common values once, a task's own with the task; the run's files are made from both, once."""
    requests = [_request(campaign, 0), _request(campaign, 1, recovery=RecoveryRecord(failure="timeout"))]
    folder, record = _begin(campaign, requests)
    assert [path.name for path in campaign.runs.iterdir()] == ["jobs"]
    assert sorted(path.name for path in folder.of(record).iterdir()) == ["array.json", "specs.json"]
    assert create_run_folders(folder.of(record), [1]) == [requests[1].directory]
    assert not requests[0].directory.path.exists(), "only who starts"
    record = folder.write(replace(record, job_id="77", partition="htc"))
    create_run_folders(folder.of(record), [0, 1])
    for number, (request, job_id) in enumerate(zip(requests, ["77_0", None], strict=True)):
        run = request.run
        assert run.read_spec() == request.spec
        chosen = {"partition": "htc"} if number == 0 else {}
        assert read_json(request.directory.submission) == {**request.submission.to_json(), "job_id": job_id, **chosen}
    assert folder.read("lab") == [record] and folder.read("other") == []


def test_many_ranks_make_the_same_run_folders_at_once(campaign: Any) -> None:
    """All ranks of a job find the same whole files, and nothing else is left."""
    requests = [_request(campaign, 0)]
    folder, record = _begin(campaign, requests)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: create_run_folders(folder.of(record), [0])[0], range(64))) == {
            requests[0].directory
        }
    attempt = requests[0].directory
    assert sorted(path.name for path in attempt.path.iterdir()) == ["job", "submission.json"]
    assert sorted(path.name for path in attempt.path.parents[1].iterdir()) == ["attempts", "spec.json"]


def test_a_late_start_leaves_the_spec_of_a_later_attempt_alone(campaign: Any) -> None:
    """Slurm may start an attempt's job after the next attempt, with more time, was submitted."""
    early = _request(campaign, 0)
    folder, record = _begin(campaign, [early])
    more_time = replace(early.spec, execution=replace(early.spec.execution, time_limit_s=7200))
    run = early.run
    later = Request(campaign.runs, more_time, Submission(token="t", target="lab", attempt=2))
    later.materialize()
    create_run_folders(folder.of(record), [0])
    assert run.read_spec() == more_time


def test_a_new_store_learns_of_pending_tasks(campaign: Any) -> None:
    """Jobs that have not started have no run folder; a new database finds them in the array records."""
    requests = [_request(campaign, seed) for seed in range(3)]
    folder, record = _begin(campaign, requests)
    folder.write(replace(record, job_id="77"))
    with open_store(str(campaign.runs / "new.db")) as store:
        assert tracker.refresh(store, campaign.runs) == []
        found = {(r.run_id, r.token, r.job_id, r.state) for r in live_attempts(store)}
        assert found == {(d.spec.run_id, d.token, f"77_{i}", State.PENDING) for i, d in enumerate(requests)}
        specs_file(folder.of(record)).unlink()
        assert tracker.refresh(store, campaign.runs) == [], "nothing is missing any more"
    with open_store(str(campaign.runs / "newer.db")) as store:
        shutil.rmtree(requests[0].run.path)
        (problem,) = tracker.refresh(store, campaign.runs)
        assert (problem.path, problem.what) == (folder.of(record), "No such file or directory")


def test_a_spec_is_written_only_where_it_differs(campaign: Any) -> None:
    run = campaign.run(seed=0)
    before = run.spec.stat().st_ino
    run.write_spec(campaign.specs[run.run_id])
    assert run.spec.stat().st_ino == before
    run.spec.write_bytes(b"{}\n")
    run.write_spec(campaign.specs[run.run_id])
    assert run.read_spec() == campaign.specs[run.run_id]


def test_specs_of_many_runs_round_trip(campaign: Any) -> None:
    """What differs in one of them, what is the same in all, texts of any kind, and one alone."""
    specs = [campaign.spec(seed=seed, label='é\n"', strategy_options={"stages": (1, 2)}) for seed in range(3)]
    specs += [replace(specs[0], execution=replace(specs[0].execution, mem_bytes=5)), campaign.spec(model="mlp")]
    assert unpack_specs(pack_specs(specs)) == specs and unpack_specs(pack_specs(specs[:1])) == specs[:1]
    assert unpack_specs(pack_specs(specs), [4, 0]) == [specs[4], specs[0]]
    assert pack_specs(specs[:3]).count(b"train.model") == 1
    mixed = [replace(specs[0], train=replace(specs[0].train, lr=lr)) for lr in (1, 1.0)]
    assert [type(spec.train.lr) for spec in unpack_specs(pack_specs(mixed))] == [int, float]


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b"[" * 100_000, b'{"spec_version": 1, "common": {}, "own": [], "runs": [[1]]}']
)
def test_a_damaged_file_of_specs_is_an_error(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"Expecting value|not a file of specs|argument"):
        unpack_specs(content)
