"""A Slurm array on disk: which attempt each task is, and the run folders created from that.

    RUNS/jobs/orc-<token>/array.json     one array, complete before its sbatch: task index -> attempt
    RUNS/jobs/orc-<token>/specs.json     the spec of each task's run (workloads.files.packed_specs)

A run's folder is created when its job starts, so thousands of pending jobs are two files. Where an attempt ends before
its job started, whoever records that end creates the folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from workloads.files.json_file import read_json, write_json
from workloads.files.packed_specs import unpack_specs
from workloads.files.run_dir import AttemptDir, RunDir


def record_file(array: Path) -> Path:
    """Return the path of an array's record."""
    return array / "array.json"


def specs_file(array: Path) -> Path:
    """Return the path of the specs of an array's runs, in the order of its tasks."""
    return array / "specs.json"


def create_run_folders(array: Path, indexes: Iterable[int]) -> list[AttemptDir]:
    """Create the missing folders and files of some tasks' attempts.

    Several processes may do this at once, and again: all write the same.

    Raises:
        OSError: the record or the specs cannot be read, or a folder cannot be created.
        ValueError: the record or the specs are damaged.
    """
    record = read_json(record_file(array))
    indexes = list(indexes)
    created = []
    for index, spec in zip(indexes, unpack_specs(specs_file(array).read_bytes(), indexes), strict=True):
        run_id, number, *_ = record["tasks"][index]
        run = RunDir.of(array.parent.parent, run_id)
        attempt = run.attempt(number).create()
        # The spec of a later attempt wins: it may have other code or more time.
        if run.attempts()[-1].number == number:
            run.write_spec(spec)
        if not attempt.submission.exists():
            write_json(attempt.submission, submission_record(record, index), durable=False)
        created.append(attempt)
    return created


def submission_record(record: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the content of ``submission.json`` for a task: values of the whole array, and the task's own."""
    _, attempt, token, *own = record["tasks"][index]
    job_id = f"{record['job_id']}_{index}" if record["job_id"] else None
    chosen = {name: record[name] for name in ("partition", "qos", "expected_start") if record[name]}
    about = {**record["about"], **(own[0] if own else {})}
    return {"token": token, "target": record["target"], "attempt": attempt, "job_id": job_id, **about, **chosen}
