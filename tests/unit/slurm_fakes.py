"""A fake cluster: client commands on PATH, one script under several names, that print what a test has prepared."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.slurm import query
from orchestrator.backends.slurm.records import ArrayFolder, ArrayRecord, ArrayTask, ClusterFolder, ClusterLimits
from workloads.contract import Execution, Expectation, Hardware, RunSpec, TrainConfig

FAKE = """#!/bin/sh
name=$(basename "$0")
echo "$name $*" >>{folder}/calls
cat {folder}/$name.out 2>/dev/null
if [ -e {folder}/$name.err ]; then cat {folder}/$name.err >&2; exit 1; fi
"""
SQUEUE = "77|{indices}|{name}|{state}|{elapsed}|n1|{reason}"


class Fakes:
    """A fake cluster: a file per command holds what that prints."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in ("sbatch", "squeue", "sacct", "scancel", "scontrol"):
            (self.bin / name).write_text(FAKE.format(folder=self.bin))
            (self.bin / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{self.bin}:/usr/bin:/bin")
        self.answer("scontrol", "ClusterName = one\n")
        self.limits = ClusterLimits(name="one", **{"poll_seconds": 60, **limits})
        self.runs = folder / "runs"
        self.folder = ClusterFolder(self.runs, "one")
        self.folder.keep(self.limits, {})

    def answer(self, name: str, text: str = "", *, error: str = "") -> None:
        (self.bin / f"{name}.out").write_text(text)
        (self.bin / f"{name}.err").unlink(missing_ok=True)
        if error:
            (self.bin / f"{name}.err").write_text(error)

    def calls(self, name: str) -> list[str]:
        path = self.bin / "calls"
        return [line for line in path.read_text().splitlines() if line.startswith(name)] if path.exists() else []

    def array(self, tasks: int = 3, job_id: str | None = "77") -> ArrayRecord:
        names = tuple(ArrayTask(f"{i:016x}", 1, f"token{i}") for i in range(tasks))
        record = ArrayRecord(token="abc", target="one", tasks=names, asked_at=time.time() - 1, job_id=job_id)
        train = TrainConfig(model="cnn", dataset="digits", strategy="probe", hardware=Hardware("cpu", 1), cpus=1)
        spec = RunSpec(
            run_id=train.run_id(),
            label="fake",
            experiment="fakes",
            train=train,
            execution=Execution(),
            expect=Expectation(ranks=1, nodes=1, gpus_per_node=0, cpus_per_rank=1),
            target="one",
            data_root="",
        )
        return ArrayFolder(self.runs).create(record, [spec] * tasks)

    def poll(self, *records: ArrayRecord, fresh: bool = False) -> query.SlurmReport:
        return query.poll(self.folder, self.limits, records, fresh=fresh)

    def listed(self, record: ArrayRecord, *rows: tuple[str, str, str]) -> None:
        lines = [
            SQUEUE.format(indices=indices, name=record.name, state=state, elapsed="0:05", reason=reason)
            for indices, state, reason in rows
        ]
        self.answer("squeue", "\n".join(lines) + "\n")
