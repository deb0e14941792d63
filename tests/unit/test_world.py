"""The world of a launch and the hardware check: functions of the environment and a fake ``nvidia-smi``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workloads.contract import Expectation
from workloads.errors import WrongHardwareError
from workloads.job.world import Gpu, Launcher, World, check, check_distinct, tasks_per_node, visible_gpus

SLURM_STEP = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
SUBMITIT_LOCAL = {
    "SUBMITIT_EXECUTOR": "local",
    "SUBMITIT_LOCAL_JOB_ID": "4711",
    "SUBMITIT_LOCAL_NTASKS": "2",
    "SUBMITIT_LOCAL_GLOBALID": "1",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "r",
}


def _place(world: World) -> tuple[Any, ...]:
    return world.launcher, world.rank, world.size, world.local_rank, world.local_size, world.node, world.nodes


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({}, (Launcher.SINGLE, 0, 1, 0, 1, 0, 1)),
        (SLURM_STEP, (Launcher.SLURM, 2, 3, 0, 1, 1, 2)),
        (
            SLURM_STEP | {"SLURM_NODEID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"},
            (Launcher.SLURM, 1, 3, 1, 2, 0, 2),
        ),
        (SUBMITIT_LOCAL, (Launcher.SUBMITIT_LOCAL, 1, 2, 1, 2, 0, 1)),
        (TORCHRUN, (Launcher.TORCHRUN, 3, 4, 1, 2, 1, 2)),
        # Local mode, or torchrun, inside a Slurm allocation: the inner launcher counts.
        (SLURM_STEP | SUBMITIT_LOCAL, (Launcher.SUBMITIT_LOCAL, 1, 2, 1, 2, 0, 1)),
        (SLURM_STEP | TORCHRUN, (Launcher.TORCHRUN, 3, 4, 1, 2, 1, 2)),
        # submitit's Slurm executor exports this; the step counts.
        (SLURM_STEP | {"SUBMITIT_EXECUTOR": "slurm"}, (Launcher.SLURM, 2, 3, 0, 1, 1, 2)),
        # A batch script that forgot srun: one process, whatever was asked for.
        ({"SLURM_JOB_ID": "71", "SLURM_PROCID": "0", "SLURM_NTASKS": "3"}, (Launcher.SINGLE, 0, 1, 0, 1, 0, 1)),
    ],
)
def test_every_launcher_is_read(env: dict[str, str], place: tuple[Any, ...]) -> None:
    assert _place(World.from_environment(env)) == place


def test_a_requeued_job_has_another_key() -> None:
    """The key tells the two incarnations of a requeued job apart, and is the same for all ranks of one."""
    first = World.from_environment(SLURM_STEP)
    peer = World.from_environment(SLURM_STEP | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    again = World.from_environment(SLURM_STEP | {"SLURM_RESTART_COUNT": "1"})
    assert first.key == peer.key != again.key


def test_mixed_variables_are_an_error() -> None:
    with pytest.raises(WrongHardwareError, match="rank 5 of 4") as caught:
        World.from_environment(TORCHRUN | {"RANK": "5"})
    assert "one launcher only" in str(caught.value)


@pytest.mark.parametrize(("text", "counts"), [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1,2(x2)", [1, 2, 2]), ("", [])])
def test_slurms_run_lengths(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


A100 = Gpu("NVIDIA A100-SXM4-80GB", 81_920 * 2**20, "GPU-a")
A100_40 = Gpu("NVIDIA A100-SXM4-40GB", 40_960 * 2**20, "GPU-b")
SLICE = Gpu("NVIDIA A100-SXM4-80GB MIG 2g.20gb", 19_968 * 2**20, "MIG-c")
A30 = Gpu("NVIDIA A30", 24_576 * 2**20, "GPU-d")
PAIR = Expectation(ranks=2, nodes=1, gpus_per_node=2, cpus_per_rank=4, gpu_name="A100", gpu_memory_gb=80)
TWO_RANKS = World.from_environment(SUBMITIT_LOCAL)


@pytest.mark.parametrize("gpus", [[A100, A100], [A100] * 4, [A100], None])
def test_the_planned_hardware_is_accepted(gpus: list[Gpu] | None) -> None:
    """Two of two; two of a whole node's four; one bound to each of two ranks; not known yet."""
    check(TWO_RANKS, PAIR, cpus=4, gpus=gpus)


@pytest.mark.parametrize(
    ("changed", "cpus", "gpus", "message"),
    [
        ({"ranks": 4}, 4, None, "2 ranks started (submitit_local), 4 planned"),
        ({"nodes": 2}, 4, None, "1 node granted, 2 planned"),
        ({}, 1, None, "rank 1 may use 1 core, 4 planned"),
        ({}, 4, [], "0 GPUs visible, 2 a node planned"),
        ({"gpus_per_node": 4}, 4, [A100], "1 GPU visible, 4 a node planned"),
        ({}, 4, [A100, A30], "GPU 1 is a NVIDIA A30, A100 planned"),
        ({}, 4, [A100, A100_40], "GPU 1 has 42.9 GB, 80 GB planned"),
        ({}, 4, [SLICE, A100], "GPU 0 is a slice (NVIDIA A100-SXM4-80GB MIG 2g.20gb), a whole GPU planned"),
        ({"allow_mig": True}, 4, [SLICE, A100], "GPU 0 has 20.9 GB, 80 GB planned"),
    ],
)
def test_the_error_names_each_difference(
    changed: dict[str, Any], cpus: int, gpus: list[Gpu] | None, message: str
) -> None:
    import dataclasses

    with pytest.raises(WrongHardwareError) as caught:
        check(TWO_RANKS, dataclasses.replace(PAIR, **changed), cpus=cpus, gpus=gpus)
    assert message in str(caught.value)
    assert "orchestrate retry" in str(caught.value)


def test_the_error_lists_all_differences() -> None:
    with pytest.raises(WrongHardwareError) as caught:
        check(TWO_RANKS, PAIR, cpus=1, gpus=[A30, A30])
    assert str(caught.value).count("planned") >= 3


def test_ranks_must_not_share_a_gpu() -> None:
    """All tasks on GPU 0 is what a launcher without binding gives; on two nodes the same UUID is another device."""
    check_distinct([(0, "GPU-a"), (0, "GPU-b"), (1, "GPU-a")])
    with pytest.raises(WrongHardwareError, match="ranks 0 and 1 got the same GPU GPU-a"):
        check_distinct([(0, "GPU-a"), (0, "GPU-a")])


@pytest.mark.parametrize(
    ("selected", "uuids"),
    [
        (None, ["GPU-aa", "GPU-ab", "GPU-b"]),
        ("", []),
        ("2,0", ["GPU-b", "GPU-aa"]),
        ("GPU-ab", ["GPU-ab"]),
        ("GPU-a", []),  # two begin so
        ("1,9,0", ["GPU-ab"]),  # CUDA stops at the first it does not know
        ("MIG-x", None),
    ],
)
def test_visible_gpus_follow_the_selection(tmp_path: Path, selected: str | None, uuids: list[str] | None) -> None:
    tool = tmp_path / "nvidia-smi"
    lines = "".join(f"{i}, {u}, NVIDIA A30, 24576\\n" for i, u in enumerate(["GPU-aa", "GPU-ab", "GPU-b"]))
    tool.write_text(f"#!/bin/sh\nprintf '{lines}'\n")
    tool.chmod(0o755)
    env = {"PATH": str(tmp_path)} | ({} if selected is None else {"CUDA_VISIBLE_DEVICES": selected})
    found = visible_gpus(env)
    assert (found and [g.uuid for g in found]) == uuids if uuids else found == uuids
    if found:
        assert found[0].memory_bytes == 24_576 * 2**20 and found[0].name == "NVIDIA A30"


def test_gpus_are_unknown_without_nvidia_smi(tmp_path: Path) -> None:
    """No tool, or one that fails: None, which is not the same as no GPU."""
    assert visible_gpus({"PATH": str(tmp_path)}) is None
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed' >&2\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert visible_gpus({"PATH": str(tmp_path)}) is None


def test_the_check_needs_no_framework() -> None:
    """Importing the entry and the world imports no framework: wrong hardware fails before that cost."""
    code = "import json, sys, workloads.job.entry; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert not {"torch", "torchvision", "timm", "sklearn", "numpy"} & set(json.loads(done.stdout))
