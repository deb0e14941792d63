"""The probe: a run without a framework that meets its ranks, writes a real result, resumes, and fails on request."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workloads.contract import Execution, Expectation, Hardware, RunResult, RunSpec, State, TrainConfig
from workloads.files.event_log import read_events
from workloads.files.json_file import read_json, write_json
from workloads.files.run_dir import RunDir
from workloads.job.entry import ExitCode

BLOCK = """
import sys
from workloads.job.entry import run
run(sys.argv[1], 1)
loaded = sorted({"torch", "numpy", "sklearn"} & set(sys.modules))
assert not loaded, loaded
"""


def launch(runs: Path, ranks: int = 1, gpus: int = 0, devices: str = "0,1", **options: Any) -> tuple[RunDir, list[int]]:
    """Start every rank as torchrun would; the run's folder and the exit codes by rank."""
    hardware = Hardware("a100" if gpus else "cpu", ranks)
    train = TrainConfig(
        model="cnn",
        dataset="digits",
        strategy="probe",
        hardware=hardware,
        cpus=ranks,
        epochs=3,
        strategy_options=options,
    )
    spec = RunSpec(
        run_id=train.run_id(),
        label="probe",
        experiment="check",
        train=train,
        execution=Execution(hang_timeout_s=2),
        expect=Expectation(ranks=ranks, nodes=1, gpus_per_node=gpus, cpus_per_rank=1),
        target="local",
        data_root="",
    )
    run = RunDir.of(runs, spec.run_id)
    run.write_spec(spec)
    processes = []
    for rank in range(ranks):
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")} | {"PATH": "/usr/bin:/bin"}
        env |= {k: str(v) for k, v in world.items()} | ({"CUDA_VISIBLE_DEVICES": devices} if gpus else {})
        processes.append(subprocess.Popen([sys.executable, "-c", BLOCK, str(run.path)], env=env, stderr=-1))
    codes = []
    for process in processes:
        process.communicate(timeout=30)
        codes.append(process.returncode)
    return run, codes


def result(run: RunDir) -> RunResult:
    return run.attempt(1).read_result()


def test_two_ranks_meet_and_rank_0_writes_what_all_of_them_see(tmp_path: Path) -> None:
    """No framework, no array library and no data are loaded; devices, cores and world size are those of both ranks."""
    run, codes = launch(tmp_path, ranks=2, gpus=2)
    assert codes == [0, 0]
    found = result(run)
    assert (found.state, found.world_size, found.devices_seen, found.epochs_done) == (State.SUCCEEDED, 2, 2, 3)
    assert found.cpus_seen == len(os.sched_getaffinity(0))
    assert found.provenance["code_digest"] and found.test_accuracy is None
    events, _ = read_events(run.attempt(1).events(), 0, "epoch")
    assert [e["epoch"] for e in events] == [1, 2, 3]


def test_two_ranks_on_one_device_are_refused(tmp_path: Path) -> None:
    run, codes = launch(tmp_path, ranks=2, gpus=2, devices="0")
    assert set(codes) == {ExitCode.WRONG_HARDWARE}
    assert "ranks 0 and 1 got the same GPU 0" in result(run).message


def test_it_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    run, _ = launch(tmp_path)
    run.attempt(1).result.unlink()
    run.attempt(1).events().unlink()
    write_json(run.checkpoint, {"epoch": 2, "epoch_times_s": [90.0, 70.0], "total_time_s": 200.0})
    run, codes = launch(tmp_path)
    assert codes == [0]
    found = result(run)
    assert (found.resumed_from_epoch, found.epochs_done) == (2, 3)
    assert found.train_time_s is not None and 160 < found.train_time_s < 170
    assert found.total_time_s is not None and 200 < found.total_time_s < 230
    assert read_json(run.checkpoint)["epoch"] == 3 and read_json(run.checkpoint)["total_time_s"] > 200


@pytest.mark.parametrize(
    ("fault", "code", "reason"), [("crash", ExitCode.FAILED, "program_error"), ("exit", 3, ""), ("hang", 1, "")]
)
def test_it_fails_on_request(tmp_path: Path, fault: str, code: int, reason: str) -> None:
    """In the epoch that was asked for; a hang is ended by the watchdog, which says where."""
    run, codes = launch(tmp_path, fault=fault, fault_epoch=2)
    assert codes == [code]
    if reason:
        assert (result(run).reason, result(run).epochs_done) == (reason, 1)
    stacks = run.attempt(1).hang(0)
    assert (stacks.exists() and "_fail" in stacks.read_text()) == (fault == "hang")
