"""What a Slurm job says of itself when it starts, and its claim to be the one job that carries out an attempt.

The claim is what makes a job that was queued twice harmless (``sbatch`` may report a failure after the controller has
accepted the job): of all jobs that were made for an attempt, the first one to start has it, also when it is requeued
and starts again. It is the second witness, too: where there is no accounting, the claim tells the job's number.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from workloads.contract import State
from workloads.files.json_file import read_json, write_json
from workloads.files.run_dir import AttemptDir, RunDir


def is_job(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this process belongs to a job that was sent to Slurm for one attempt."""
    return env.get("SUBMITIT_EXECUTOR") == "slurm" and "SLURM_JOB_ID" in env


def facts(env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The job as Slurm calls it; empty outside of one."""
    if not is_job(env):
        return {}
    array, index = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    return {
        "job_id": f"{array}_{index}" if array and index else env["SLURM_JOB_ID"],
        "job_name": env.get("SLURM_JOB_NAME", ""),
        "node": env.get("SLURMD_NODENAME", ""),
        "restarts": int(env.get("SLURM_RESTART_COUNT") or 0),
    }


def claim(attempt: AttemptDir, env: Mapping[str, str] = os.environ) -> str:
    """Claim an attempt for this job, on every rank alike; why it must not be carried out here, or nothing.

    A job that Slurm starts again finds its own claim, and takes away what its earlier start left as a verdict.
    """
    job = facts(env)
    if not job:
        return ""
    if _verdict(attempt) == State.CANCELLED:
        return "it was cancelled before it started"
    newest = RunDir(attempt.path.parent.parent).attempts()[-1].number
    if newest > attempt.number:
        return f"attempt {newest} has taken over"
    descriptor, name = tempfile.mkstemp(dir=attempt.job_folder, prefix=".owner.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            json.dump(job, stream)
        # A link appears whole or not at all, and once only, also on network disks.
        with contextlib.suppress(FileExistsError):
            os.link(name, attempt.owner)
    finally:
        os.unlink(name)
    owner = read_json(attempt.owner)
    if owner["job_id"] != job["job_id"]:
        return f"job {owner['job_id']} has started it, and this is job {job['job_id']}"
    if env.get("SLURM_PROCID", "0") == "0":
        _tell_number(attempt, job["job_id"])
        for path in (attempt.exit, attempt.result) if job["restarts"] else ():
            path.unlink(missing_ok=True)
    return ""


def _tell_number(attempt: AttemptDir, job_id: str) -> None:
    """Nobody may have known the job's number when ``submission.json`` was written."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        said = read_json(attempt.submission)
        if said.get("job_id") != job_id:
            write_json(attempt.submission, {**said, "job_id": job_id}, durable=False)


def _verdict(attempt: AttemptDir) -> str:
    try:
        return str(read_json(attempt.exit)["state"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
