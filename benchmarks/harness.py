"""The engine beside a hand-written loop of the same steps, interleaved in the same processes.

    python benchmarks/harness.py [--pairs 12] [--steps 60] [--only resnet50] [--output harness.json]

For each case (model, strategy, precision, batch) one process a GPU is started. In it the engine's ``train`` and a plain
loop take turns: same model, data on the device, order, optimiser, precision and batch. Both are timed by device events
with one synchronisation a window, warm-up apart. A pair's ratio is engine / hand-written of the mean steady step (the
slowest rank's); printed are the median over pairs and its bootstrap 95 % interval. On a machine without GPUs the same
runs on CPU, which shows only that the benchmark works.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WARMUP_STEPS = 10
IMAGES = {32: 50_000, 224: 6_400}
"""Random pixels: both sides read the same ones, and no step depends on what they show."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table."""

    model: str
    image_size: int
    per_device: int
    """Samples a device and step."""
    strategy: str
    precision: str
    devices: int

    @property
    def batch_size(self) -> int:
        return self.per_device * self.devices

    @property
    def name(self) -> str:
        return (
            f"{self.model} @{self.image_size} {self.precision} {self.strategy} x{self.devices}, "
            f"{self.per_device} a device"
        )


def cases(devices: int, only: str, tiny: bool) -> list[Case]:
    """The table's rows: eager on one device and ddp on all."""
    shapes = [("resnet18", 32, 8)] if tiny else [("resnet50", 32, 128), ("resnet50", 32, 1024), ("vit_tiny", 224, 128)]
    ways = [("eager", 1)] + ([("ddp", devices)] if devices > 1 else [])
    precisions = ["fp32"] if tiny else ["fp32", "bf16"]
    found = [
        Case(model, size, per_device, strategy, precision, n)
        for (model, size, per_device), (strategy, n), precision in itertools.product(shapes, ways, precisions)
    ]
    return [case for case in found if only in case.name]


# --- one rank ---------------------------------------------------------------------------------------------------------


def rank_main(case: Case, pairs: int, steps: int, folder: Path) -> None:
    """Take turns with the other ranks; rank 0 writes the times of both sides."""
    import torch

    from workloads import registry
    from workloads.world import World

    world = World.from_environment()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", world.local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    data = _random_images(case.image_size, 2_000 if not on_gpu else IMAGES[case.image_size])
    declaration = dataclasses.replace(
        registry.datasets()["synthetic"], load=lambda *_: data, digest=lambda *_: "", check=lambda *_: []
    )
    registry.datasets()["synthetic"] = declaration
    rows = []
    for pair in range(pairs + 1):
        # Which side goes first alternates, so that a drifting clock touches both alike.
        turns = [("engine", _engine), ("hand", _hand_written)]
        times = {
            name: run(case, steps, folder, pair, world, device, data) for name, run in turns[:: 1 if pair % 2 else -1]
        }
        if pair:  # the first pair fills caches and is not counted
            rows.append(times)
    if world.rank == 0:
        (folder / "times.json").write_text(json.dumps(rows))


def _random_images(size: int, count: int) -> Any:
    import numpy as np

    from workloads.datasets.images import ImageData, Split

    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (count, 3, size, size), dtype=np.uint8)
    labels = generator.integers(0, 10, count)
    test = Split(labels=labels[:64], images=pixels[:64], files=None)
    return ImageData(
        train=Split(labels=labels, images=pixels, files=None),
        test=test,
        class_names=tuple("abcdefghij"),
        channels=3,
        image_size=size,
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        digest="",
    )


def _config(case: Case, steps: int, on_gpu: bool) -> Any:
    from workloads.contract import TrainConfig

    return TrainConfig(
        model=case.model,
        dataset="synthetic",
        strategy=case.strategy,
        hardware=f"{'gpu' if on_gpu else 'cpu'}:{case.devices}",
        cpus=case.devices,
        steps=steps + WARMUP_STEPS,
        batch_size=case.batch_size,
        precision=case.precision,
        image_size=case.image_size,
        eval_every=0,
        lr=0.01,
    )


def _engine(case: Case, steps: int, folder: Path, pair: int, world: Any, device: Any, _data: Any) -> float:
    """Mean steady step in seconds of our engine, the slowest rank's; from the events that every run writes."""
    from workloads.contract import Execution, Expectation, RunResult, RunSpec, State
    from workloads.engines import torch_loop
    from workloads.job import Events, Job, Orders
    from workloads.rundir import RunDir, read_events
    from workloads.watchdog import Pulse

    on_gpu = device.type == "cuda"
    config = _config(case, steps, on_gpu)
    spec = RunSpec(
        run_id=config.run_id(),
        label=case.name,
        experiment="harness",
        train=config,
        execution=Execution(checkpoint_every=0, hang_timeout_s=300),
        expect=Expectation(ranks=case.devices, nodes=1, gpus_per_node=case.devices if on_gpu else 0, cpus_per_rank=1),
        target="local",
        data_root="",
    )
    run = RunDir.of(folder / "runs", spec.run_id)
    attempt = run.attempt(pair + 1).create()
    events = Events(attempt.events(world.rank))
    with Pulse(attempt, world.rank, spec.execution.hang_timeout_s) as pulse:
        torch_loop.train(
            Job(
                spec=spec,
                run=run,
                attempt=attempt,
                world=world,
                events=events,
                pulse=pulse,
                orders=Orders(),
                result=RunResult(run_id=spec.run_id, attempt=pair + 1, state=State.RUNNING),
            )
        )
    events.close()
    steps_s = [t for e in read_events(attempt.events(world.rank))[0] if e["event"] == "steps" for t in e["step_time_s"]]
    return _slowest(statistics.fmean(steps_s[WARMUP_STEPS:]), world, folder, f"engine-{pair}")


def _hand_written(case: Case, steps: int, folder: Path, pair: int, world: Any, device: Any, data: Any) -> float:
    """The same steps as anybody would write them for one model on one data set."""
    import torch
    import torchvision
    from timm.models import create_model
    from torch import distributed
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel

    on_gpu = device.type == "cuda"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if case.devices > 1:
        distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"file://{folder}/hand-{pair}",
            rank=world.rank,
            world_size=world.size,
            device_id=device if on_gpu else None,
        )
    if case.model.startswith("resnet"):
        model = getattr(torchvision.models, case.model)(num_classes=10).to(device)
    else:
        model = create_model("vit_tiny_patch16_224", num_classes=10, img_size=case.image_size).to(device)
    forward = model
    if case.devices > 1:
        forward = DistributedDataParallel(
            model,
            device_ids=[device.index] if on_gpu else None,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=on_gpu)
    images = torch.from_numpy(data.train.images).to(device)
    labels = torch.from_numpy(data.train.labels).to(device)
    order = torch.randperm(len(labels), device=device)
    shuffled = labels[order]
    scale = torch.full((3, 1, 1), 1 / (255 * 0.25), device=device)
    shift = torch.full((3, 1, 1), -2.0, device=device)
    per_epoch = len(labels) // case.batch_size
    model.train()
    marks = []
    for step in range(WARMUP_STEPS + steps):
        if step >= WARMUP_STEPS:
            marks.append(_mark(on_gpu))
        start = (step % per_epoch) * case.batch_size + world.rank * case.per_device
        pixels = images[order[start : start + case.per_device]]
        x = torch.addcmul(shift, pixels, scale) if on_gpu else pixels.float().mul_(scale).add_(shift)
        y = shuffled[start : start + case.per_device]
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16) if case.precision == "bf16" else contextlib.nullcontext():
            logits = forward(x)
        loss = functional.cross_entropy(logits.float(), y)
        loss.backward()
        optimizer.step()
    marks.append(_mark(on_gpu))
    if on_gpu:
        torch.cuda.synchronize()
        mean_s = marks[0].elapsed_time(marks[-1]) / 1e3 / steps
    else:
        mean_s = (marks[-1] - marks[0]) / steps
    if case.devices > 1:
        distributed.barrier()
        distributed.destroy_process_group()
    return _slowest(mean_s, world, folder, f"hand-time-{pair}")


def _mark(on_gpu: bool) -> Any:
    import torch

    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _slowest(mean_s: float, world: Any, folder: Path, name: str) -> float:
    """Maximum over ranks, through files: no process group is left at this moment."""
    part = folder / f"{name}.{world.rank}.part"
    part.write_text(repr(mean_s))
    part.rename(folder / f"{name}.{world.rank}")
    found = [folder / f"{name}.{rank}" for rank in range(world.size)]
    while not all(path.exists() for path in found):
        time.sleep(0.01)
    return max(float(path.read_text()) for path in found)


# --- the table --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _ranks(
    case: Case, gpus: list[int], pairs: int, steps: int, folder: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One process a rank, placed as submitit's local mode places them."""
    processes = []
    cores = sorted(os.sched_getaffinity(0))
    for rank in range(case.devices):
        environment = {
            **os.environ,
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_JOB_ID": "1",
            "SUBMITIT_LOCAL_NTASKS": str(case.devices),
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_GLOBALID": str(rank),
            "SUBMITIT_LOCAL_LOCALID": str(rank),
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "OMP_NUM_THREADS": "1",
        }
        arguments = json.dumps(
            {"case": dataclasses.asdict(case), "pairs": pairs, "steps": steps, "folder": str(folder)}
        )
        process = subprocess.Popen([sys.executable, __file__, "--rank", arguments], env=environment)
        # Neither side shall wander over cores, nor share one with the other rank.
        slot = (gpus[rank] if gpus else rank) % max(1, len(cores) // 2)
        os.sched_setaffinity(process.pid, cores[2 * slot : 2 * slot + 2] or cores)
        processes.append(process)
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def measure(case: Case, gpus: list[int], pairs: int, steps: int) -> dict[str, Any]:
    """Run one case and summarise its pairs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _ranks(case, gpus, pairs, steps, folder) as processes:
            codes = [process.wait() for process in processes]
        if any(codes):
            return {"case": case.name, "error": f"exit codes {codes}"}
        rows = json.loads((folder / "times.json").read_text())
    ratios = [row["engine"] / row["hand"] for row in rows]
    low, high = _interval(ratios)
    return {
        "case": case.name,
        **dataclasses.asdict(case),
        "batch_size": case.batch_size,
        "pairs": len(rows),
        "steps": steps,
        "engine_step_s": statistics.median(row["engine"] for row in rows),
        "hand_step_s": statistics.median(row["hand"] for row in rows),
        "engine_samples_per_s": case.batch_size / statistics.median(row["engine"] for row in rows),
        "hand_samples_per_s": case.batch_size / statistics.median(row["hand"] for row in rows),
        "ratio": statistics.median(ratios),
        "ratio_95": [low, high],
        "within_1_pct": low >= 0.99 and high <= 1.01,
        "ratios": ratios,
    }


def _interval(values: list[float], draws: int = 10_000) -> tuple[float, float]:
    """Percentile bootstrap 95 % interval of the median (Efron, 1979)."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def _num_gpus() -> int:
    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        given = json.loads(arguments.rank)
        rank_main(Case(**given["case"]), given["pairs"], given["steps"], Path(given["folder"]))
        return
    num_gpus = _num_gpus()
    devices = min(arguments.devices, num_gpus) if num_gpus else arguments.devices
    rows = []
    for case in cases(devices, arguments.only, tiny=not num_gpus):
        row = measure(case, list(range(case.devices)) if num_gpus else [], arguments.pairs, arguments.steps)
        rows.append(row)
        if "error" in row:
            print(f"{row['case']}: {row['error']}", flush=True)
        else:
            low, high = row["ratio_95"]
            print(
                f"{row['case']}: engine {row['engine_samples_per_s']:.0f}/s, hand {row['hand_samples_per_s']:.0f}/s, "
                f"ratio {row['ratio']:.4f} ({low:.4f}-{high:.4f}) {'within' if row['within_1_pct'] else 'OUTSIDE'} 1 %",
                flush=True,
            )
        if arguments.output:
            arguments.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
