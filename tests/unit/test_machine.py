"""The devices of a machine, listed by a fake ``nvidia-smi`` on PATH."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.backends.local.machine import cpu_quota, local_machine

UUIDS = [f"GPU-{n}{n}{n}{n}0000-0000-4000-8000-00000000000{n}" for n in range(4)]
LISTING = "".join(f"{n}, {uuid}, NVIDIA A100-SXM4-80GB, 81920, Disabled\n" for n, uuid in enumerate(UUIDS))

MIG_LISTING = f"""0, {UUIDS[0]}, NVIDIA A100-SXM4-80GB, 81920, Enabled
1, {UUIDS[1]}, NVIDIA A100-SXM4-80GB, 81920, Disabled
"""
MIG_L = f"""GPU 0: NVIDIA A100-SXM4-80GB (UUID: {UUIDS[0]})
  MIG 3g.40gb     Device  0: (UUID: MIG-aaaa)
  MIG 1g.10gb     Device  1: (UUID: MIG-bbbb)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: {UUIDS[1]})
"""


def fake_nvidia_smi(folder: Path, script: str) -> dict[str, str]:
    """Return an environment whose PATH has an ``nvidia-smi`` with this body (POSIX shell)."""
    folder.mkdir(exist_ok=True)
    command = folder / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def printing(text: str) -> str:
    return f"cat <<'END'\n{text}END"


@pytest.fixture
def four_gpus(tmp_path: Path) -> dict[str, str]:
    return fake_nvidia_smi(tmp_path / "bin", printing(LISTING))


def test_all_gpus_with_uuid_and_memory(four_gpus: dict[str, str]) -> None:
    machine = local_machine(four_gpus)
    assert [gpu.uuid for gpu in machine.gpus] == UUIDS
    assert machine.gpus[0].memory_bytes == 81920 * 2**20
    assert machine.gpus[3].index == 3
    assert machine.problem == ""
    assert set(machine.cores) <= os.sched_getaffinity(0)
    assert machine.cores


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1,3", [1, 3]),
        ("3,1", [3, 1]),
        (UUIDS[2], [2]),
        (f"{UUIDS[2]},{UUIDS[0]}", [2, 0]),
        ("GPU-2222", [2]),
        ("GPU-", []),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,-1,1", [0]),
        ("0, 2", [0, 2]),
        ("0,7,1", [0]),
        ("1,1", [1]),
    ],
)
def test_cuda_visible_devices_as_cuda_reads_it(four_gpus: dict[str, str], value: str, expected: list[int]) -> None:
    """Indices, UUIDs, abbreviated UUIDs and none; the first entry that names no device ends the list."""
    machine = local_machine({**four_gpus, "CUDA_VISIBLE_DEVICES": value})
    assert [gpu.index for gpu in machine.gpus] == expected


def test_mig_instances_replace_their_gpu(tmp_path: Path) -> None:
    script = f'if [ "$1" = "-L" ]; then\n{printing(MIG_L)}\nelse\n{printing(MIG_LISTING)}\nfi'
    environ = fake_nvidia_smi(tmp_path / "bin", script)
    machine = local_machine(environ)
    assert [gpu.uuid for gpu in machine.gpus] == ["MIG-aaaa", "MIG-bbbb", UUIDS[1]]
    assert machine.gpus[0].name == "NVIDIA A100-SXM4-80GB MIG 3g.40gb"
    assert machine.gpus[0].memory_bytes == 40 * 10**9
    only = local_machine({**environ, "CUDA_VISIBLE_DEVICES": "MIG-bbbb"})
    assert [gpu.uuid for gpu in only.gpus] == ["MIG-bbbb"]


def test_a_driver_without_mig(tmp_path: Path) -> None:
    refusing = 'case "$1" in *mig*) echo "Field mig.mode.current is not a valid field" >&2; exit 2;; esac\n'
    environ = fake_nvidia_smi(tmp_path / "bin", refusing + printing(LISTING.replace(", Disabled", "")))
    assert len(local_machine(environ).gpus) == 4


def test_a_machine_without_nvidia_smi_has_no_gpus(tmp_path: Path) -> None:
    machine = local_machine({"PATH": str(tmp_path)})
    assert machine.gpus == ()
    assert machine.problem == ""


def test_a_failing_nvidia_smi_is_quoted(tmp_path: Path) -> None:
    environ = fake_nvidia_smi(tmp_path / "bin", "echo could not talk to the driver; exit 9")
    machine = local_machine(environ)
    assert machine.gpus == ()
    assert machine.problem == "nvidia-smi: could not talk to the driver"


def test_cpu_quota_of_a_container(tmp_path: Path) -> None:
    """The smallest quota of all parent groups counts; without one, or with a path of the host, there is no quota."""
    (tmp_path / "a/b").mkdir(parents=True)
    membership = tmp_path / "membership"
    membership.write_text("0::/a/b\n")
    assert cpu_quota(tmp_path, membership) is None
    (tmp_path / "a/b/cpu.max").write_text("max 100000\n")
    (tmp_path / "a/cpu.max").write_text("250000 100000\n")
    assert cpu_quota(tmp_path, membership) == 2.5
    membership.write_text("3:cpu,cpuacct:/docker/xyz\n")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("150000\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(tmp_path, membership) == 1.5
    membership.write_text("0::/elsewhere\n")
    assert cpu_quota(tmp_path, membership) is None
