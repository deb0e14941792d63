"""The Slurm job's claim to be the only one that executes an attempt, and its facts.

``sbatch`` may report a failure although the controller accepted the job, so an attempt may be queued twice. The first
job that starts owns the attempt, also after Slurm requeued it; any other job ends at once. Without accounting, the
claim is also how the login node learns the job's number.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from workloads.contract import State
from workloads.files.json_file import read_json, read_object_or_empty, write_json
from workloads.files.run_dir import AttemptDir, RunDir


def facts(env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return number, name, node and restarts of the Slurm job for one attempt; empty outside of one."""
    if env.get("SUBMITIT_EXECUTOR") != "slurm" or "SLURM_JOB_ID" not in env:
        return {}
    array, index = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    return {
        "job_id": f"{array}_{index}" if array and index else env["SLURM_JOB_ID"],
        "job_name": env.get("SLURM_JOB_NAME", ""),
        "node": env.get("SLURMD_NODENAME", ""),
        "restarts": int(env.get("SLURM_RESTART_COUNT") or 0),
    }


def claim(attempt: AttemptDir, env: Mapping[str, str] = os.environ) -> str:
    """Claim an attempt for this job; every rank does so. Return why another job owns it, empty on success.

    A requeued job finds its own claim and deletes the exit and result files of its earlier start.
    """
    if not (job := facts(env)):
        return ""
    if read_object_or_empty(attempt.exit).get("state") == State.CANCELLED:
        return "it was cancelled before it started"
    newest = RunDir(attempt.path.parent.parent).attempts()[-1].number
    if newest > attempt.number:
        return f"attempt {newest} has replaced it"
    descriptor, name = tempfile.mkstemp(dir=attempt.job_folder, prefix=".owner.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            json.dump(job, stream)
        # link(2) creates the complete file or fails with EEXIST, also on NFS: open(2) recommends it over O_EXCL there.
        with contextlib.suppress(FileExistsError):
            os.link(name, attempt.owner)
    finally:
        os.unlink(name)
    owner = read_json(attempt.owner)
    if owner["job_id"] != job["job_id"]:
        return f"job {owner['job_id']} owns it, and this is job {job['job_id']}"
    if env.get("SLURM_PROCID", "0") == "0":
        # submission.json may be older than the job's number.
        submission = read_object_or_empty(attempt.submission)
        if submission and submission.get("job_id") != job["job_id"]:
            write_json(attempt.submission, {**submission, "job_id": job["job_id"]}, durable=False)
        for path in (attempt.exit, attempt.result) if job["restarts"] else ():
            path.unlink(missing_ok=True)
    return ""
