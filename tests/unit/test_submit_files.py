"""What a submission leaves on disk: many files quickly, and none that a power cut could take away for good."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator import submitter
from orchestrator.executors.entries import QueueFolder
from orchestrator.executors.protocol import Delivery
from orchestrator.executors.slurm_records import ArrayFolder, ArrayRecord
from orchestrator.together import AT_A_TIME, FEW, for_each
from workloads.rundir import RunDir, attempt_of_task, encoded, jobs_folder, joined, read_json, write_bytes


def test_each_item_is_worked_on_once_and_several_at_a_time() -> None:
    """Few without a thread; a failure among many is told."""
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


def test_two_objects_joined_are_what_one_would_be(tmp_path: Path) -> None:
    first, second = {"token": "t", "name": 'a "quoted", }\n'}, {"shape": {"nodes": 1}, "é": [1.5, None]}
    write_bytes(tmp_path / "a.json", joined(encoded(first), encoded(second)))
    assert read_json(tmp_path / "a.json") == {**first, **second}
    assert joined(encoded(first), encoded(second)) == encoded({**first, **second})


def _delivery(campaign: Any, seed: int, **about: Any) -> Delivery:
    spec = campaign.spec(seed=seed)
    said = {"token": f"t{seed}", "target": "lab", "attempt": 1, "shape": {"nodes": 1}, "submitted_at": "now", **about}
    return Delivery(f"t{seed}", RunDir.of(campaign.runs, spec.run_id).attempt(1), spec, {"nodes": 1}, said)


def test_an_array_tells_of_each_of_its_attempts(campaign: Any) -> None:
    """One file for all: what is common once, what is a task's own with the task; also after it was read again."""
    deliveries = [
        _delivery(campaign, 0),
        _delivery(campaign, 1, recovery={"failure": "timeout"}),
        _delivery(campaign, 2),
    ]
    arrays = ArrayFolder(campaign.runs)
    arrays.write(ArrayRecord.new("lab", deliveries))
    (record,) = arrays.open("lab")
    told = list(ArrayRecord.submissions(ArrayRecord(**{**_fields(record), "job_id": "77", "partition": "htc"})))
    for index, (delivery, content) in enumerate(zip(deliveries, told, strict=True)):
        path = campaign.runs / f"{index}.json"
        path.write_bytes(content)
        assert read_json(path) == {**delivery.about, "job_id": f"77_{index}", "partition": "htc"}
        assert attempt_of_task(jobs_folder(campaign.runs) / record.name, index) == delivery.attempt


def _fields(record: ArrayRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in ArrayRecord.__dataclass_fields__}


def test_specs_that_a_power_cut_took_are_written_again(campaign: Any) -> None:
    """Nobody waits until each run's spec is on the disk; one file of all of them is there, and stays for a while."""
    kept, lost = campaign.run(seed=0), campaign.run(seed=1)
    folder = QueueFolder(campaign.runs)
    folder.create()
    contents = [encoded(campaign.specs[run.run_id].to_json()) for run in (kept, lost)]
    sent = submitter._set_aside(campaign.runs, contents).rename(folder.outbox / "old.sent")
    lost.spec.write_bytes(b"")
    before = kept.spec.stat().st_mtime_ns
    submitter._clear_outbox(campaign.runs)
    assert sent.exists() and lost.spec.read_bytes() == b"", "too young to tell"
    os.utime(sent, (0, time.time() - 1000))
    submitter._clear_outbox(campaign.runs)
    assert not sent.exists() and lost.read_spec() == campaign.specs[lost.run_id]
    assert kept.spec.stat().st_mtime_ns == before


def test_a_spec_is_written_only_where_it_is_another_one(campaign: Any) -> None:
    run = campaign.run(seed=0)
    content = encoded(campaign.specs[run.run_id].to_json())
    assert run.spec.read_bytes() == content
    before = run.spec.stat().st_ino
    run.keep_spec(content)
    assert run.spec.stat().st_ino == before
    run.keep_spec(b"{}\n")
    assert run.spec.read_bytes() == b"{}\n"
    new = RunDir.of(campaign.runs, "ab" * 8)
    new.keep_spec(content)
    assert new.spec.read_bytes() == content
