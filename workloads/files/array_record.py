"""A Slurm array on disk, as both ends of it read it: which attempt each task is, and making that attempt's folder.

    RUNS/jobs/orc-<token>/array.json     one array, whole before its sbatch: index -> attempt
    RUNS/jobs/orc-<token>/specs.json     the spec of each task's run (workloads.files.packed_specs)

A run gets its folder when its job starts, so that thousands of jobs that wait are two files. Where an attempt ends
without having started, whoever notes that makes the folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from workloads.files.json_file import read_json, write_json
from workloads.files.packed_specs import unpack_specs
from workloads.files.run_dir import AttemptDir, RunDir


def record_file(array: Path) -> Path:
    """The record of an array, in its folder."""
    return array / "array.json"


def specs_file(array: Path) -> Path:
    """The specs of an array's runs, in the order of its tasks."""
    return array / "specs.json"


def create_run_folders(array: Path, indexes: Iterable[int]) -> list[AttemptDir]:
    """Make the folders and files of the attempts that some tasks carry out, as far as they are not there.

    May be done again, and by several at once: each of them writes the same.

    Raises:
        OSError: the record or the specs cannot be read, or a folder not be made.
        ValueError: they are damaged.
    """
    record = read_json(record_file(array))
    indexes = list(indexes)
    made = []
    for index, spec in zip(indexes, unpack_specs(specs_file(array).read_bytes(), indexes), strict=True):
        run_id, number, *_ = record["tasks"][index]
        run = RunDir.of(array.parent.parent, run_id)
        attempt = run.attempt(number).create()
        # A later attempt may have another spec: other code, more time.
        if run.attempts()[-1].number == number:
            run.write_spec(spec)
        if not attempt.submission.exists():
            write_json(attempt.submission, submission_record(record, index), durable=False)
        made.append(attempt)
    return made


def submission_record(record: Mapping[str, Any], index: int) -> dict[str, Any]:
    """What ``submission.json`` says of a task's attempt: what is the same for the array, and its own."""
    _, attempt, token, *own = record["tasks"][index]
    job_id = f"{record['job_id']}_{index}" if record["job_id"] else None
    chosen = {name: record[name] for name in ("partition", "qos", "expected_start") if record[name]}
    about = {**record["about"], **(own[0] if own else {})}
    return {"token": token, "target": record["target"], "attempt": attempt, "job_id": job_id, **about, **chosen}
