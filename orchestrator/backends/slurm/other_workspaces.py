"""Find the same runs submitted from another runs folder: this one's store does not know them, but Slurm does."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from orchestrator.backends.slurm import commands
from orchestrator.backends.slurm.records import JOB_NAME_PREFIX, ArrayRecord
from workloads.files.array_record import record_file
from workloads.files.json_file import read_json
from workloads.files.run_dir import jobs_folder


def queued_elsewhere(runs: Path, run_ids: Collection[str]) -> dict[Path, list[str]]:
    """Return runs folder -> which of these runs wait or run from there; empty if Slurm does not answer."""
    # squeue(1), %o: the command of a job is the submitted script, which lies in its array's folder.
    answer = commands.run("squeue", "--noheader", f"--user={os.getuid()}", "--format=%j|%o")
    found: dict[Path, list[str]] = {}
    for line in dict.fromkeys(answer.stdout.splitlines()):
        name, _, script = line.partition("|")
        array = Path(script).parent
        if not name.startswith(JOB_NAME_PREFIX) or array.name != name or array.parent == jobs_folder(runs):
            continue
        with contextlib.suppress(OSError, ValueError):
            record = ArrayRecord.from_json(read_json(record_file(array)))
            both = [task.run_id for task in record.tasks if task.run_id in run_ids]
            if both:
                found.setdefault(array.parents[1], []).extend(both)
    return found
