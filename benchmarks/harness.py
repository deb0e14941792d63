"""The engine beside a hand-written loop of the same steps, taking turns in the same processes.

    python -m benchmarks.harness [--pairs 1000] [--only resnet50] [--output harness.json]

For each case (model, strategy, precision, batch) one process a GPU runs the engine's own ``train``. Between any two of
its steps a plain loop does one step of the same kind: same model, data on the device, order, optimiser, precision and
batch. A device event stands behind each step of either side, at the same place: where the function that did it has
returned. What the engine does next, before the hand-written loop's turn, is told by the host's clock, and is the
engine's, but for its waiting until the device is done with what is in its queue: that is the time of steps, and counted
as theirs. It is nobody's time where the device is so far behind that it has not even ended the engine's step when the
forward pass of the hand-written one has been launched: then the device had work all the while. The first pairs are not
counted. A pair's ratio is engine / hand-written (the slowest rank's times), a block's ratio the median of its pairs.
Printed are the median over blocks, its bootstrap 95 % interval (over blocks, since neighbouring pairs are alike), and
the ratio of the times' sums, which also holds what the engine does once a window.

Turns of one step matter: where launches are the limit, the speed of a host drifts by 10 to 25 % within a second, and
neighbouring steps share that. On a machine without GPUs the same runs on CPU, which only shows that it works.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.bootstrap import interval

WARMUP_PAIRS = 40
BLOCK_PAIRS = 20
LEAST_BLOCKS = 10
"""Fewer ratios make no interval worth its name."""
IMAGES = {28: 200_000, 32: 200_000, 224: 6_400}
"""Random pixels: both sides read the same ones, and no step depends on what they show."""
SHAPES = [
    ("resnet50", 32, 128, ("fp32", "bf16")),
    ("resnet50", 32, 1024, ("fp32", "bf16")),
    ("vit_tiny", 224, 128, ("fp32", "bf16")),
    ("resnet50", 224, 128, ("bf16",)),
    ("swin_tiny", 224, 128, ("bf16",)),
    ("resnet18", 32, 128, ("fp32",)),
    ("cnn", 28, 1024, ("fp32",)),
]
"""Model, image size, samples a device, precisions."""
TINY = [("resnet18", 32, 8, ("fp32",))]
TIMM = {"vit_tiny": "vit_tiny_patch16_224", "swin_tiny": "swin_tiny_patch4_window7_224"}


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
    def channels(self) -> int:
        return 1 if self.model == "cnn" else 3

    @property
    def name(self) -> str:
        return (
            f"{self.model} @{self.image_size} {self.precision} {self.strategy} x{self.devices}, "
            f"{self.per_device} a device"
        )


def cases(devices: int, only: str, tiny: bool) -> list[Case]:
    """The table's rows: eager on one device and ddp on all."""
    ways = [("eager", 1)] + ([("ddp", devices)] if devices > 1 else [])
    found = [
        Case(model, size, per_device, strategy, precision, n)
        for model, size, per_device, precisions in (TINY if tiny else SHAPES)
        for (strategy, n), precision in itertools.product(ways, precisions)
    ]
    return [case for case in found if any(text in case.name for text in only.split(";"))]


# --- one rank ---------------------------------------------------------------------------------------------------------


def rank_main(case: Case, pairs: int, folder: Path) -> None:
    """Run the engine with turns in between; leaves this rank's time of each step of both sides."""
    import torch

    from workloads import loaders, registry
    from workloads.engines import torch_loop
    from workloads.files.run_dir import RunDir
    from workloads.job.context import Events, Job, StopSignals
    from workloads.job.watchdog import Pulse
    from workloads.job.world import World
    from workloads.measurement import timing

    world = World.from_environment()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", world.local_rank) if on_gpu else torch.device("cpu")
    data = _random_images(case.image_size, case.channels, IMAGES[case.image_size] if on_gpu else 2_000)
    registry.datasets()["synthetic"] = dataclasses.replace(registry.datasets()["synthetic"], load=lambda *_: data)
    hand: list[_HandWritten] = []
    make = loaders.make

    def with_turns(*args: Any, **kwargs: Any) -> Any:
        hand.append(_HandWritten(case, world, device, data))
        return _Turns(make(*args, **kwargs), hand[0])

    loaders.make = with_turns
    record = timing.Recorder.record

    def recorded(recorder: Any, *step: Any) -> None:
        hand[0].engine_has_done_a_step()
        record(recorder, *step)

    timing.Recorder.record = recorded  # type: ignore[method-assign]
    for name in ("wait", "settle"):
        setattr(timing.Clock, name, _timed(getattr(timing.Clock, name), hand))
    spec = _spec(case, pairs + 1, on_gpu)
    run = RunDir.of(folder / "runs", spec.run_id)
    attempt = run.attempt(1).create()
    result = _result(spec.run_id)
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
                stop_signals=StopSignals(),
                result=result,
            )
        )
    (folder / f"times.{world.rank}.json").write_text(json.dumps(hand[0].times_s(pairs)))


def _timed(wait: Callable[..., Any], hand: list[_HandWritten]) -> Callable[..., Any]:
    """The engine's waiting for the device, of which the hand-written loop is told."""

    def timed(*args: Any) -> Any:
        started_s = time.perf_counter()
        answer = wait(*args)
        for loop in hand:
            loop.engine_has_waited(time.perf_counter() - started_s)
        return answer

    return timed


class _Turns:
    """A loader that lets the hand-written loop do a step before each of the engine's."""

    def __init__(self, loader: Any, hand: _HandWritten) -> None:
        self._loader, self._hand = loader, hand

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def train(self, epoch: int) -> Iterator[Any]:
        batches = self._loader.train(epoch)
        for _ in range(self._loader.steps_per_epoch):
            self._hand.step()
            yield next(batches)


class _HandWritten:
    """The same steps as anybody would write them for one model on one data set."""

    def __init__(self, case: Case, world: Any, device: Any, data: Any) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        self._case, self._device = case, device
        self._on_gpu = device.type == "cuda"
        model = _model(case).to(device)
        self._model = model
        if case.devices > 1:  # the engine has made the process group
            self._model = DistributedDataParallel(
                model,
                device_ids=[device.index] if self._on_gpu else None,
                broadcast_buffers=False,
                bucket_cap_mb=25,  # said, as the engine says it: torch's default has a smaller first bucket
                gradient_as_bucket_view=True,
            )
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
        self._images = torch.from_numpy(data.train.images).to(device)
        labels = torch.from_numpy(data.train.labels).to(device)
        self._order = torch.randperm(len(labels), device=device)
        self._labels = labels[self._order]
        self._scale = torch.full((case.channels, 1, 1), 1 / (255 * 0.25), device=device)
        self._shift = torch.full((case.channels, 1, 1), -2.0, device=device)
        self._rank = world.rank
        self._step = 0
        self._model.train()
        self._marks = [_mark(self._on_gpu)]
        """Behind each step: this loop's, the engine's, and so on; one before the first."""
        self._between_s: list[float] = []
        """Of the host, from the end of an engine's step to the start of this loop's; one before the first. None of it
        where the device did not notice."""
        self._engine_ended_s = time.perf_counter()
        self._waited_s = 0.0
        """Since then, for the device."""

    def engine_has_done_a_step(self) -> None:
        """Called where the engine's step function has returned."""
        self._marks.append(_mark(self._on_gpu))
        self._engine_ended_s = time.perf_counter()
        self._waited_s = 0.0

    def engine_has_waited(self, seconds: float) -> None:
        """Called when the device has done what the engine waited for."""
        self._waited_s += seconds

    def step(self) -> None:
        """One step; freeing its graph, which takes the host a while, is part of it."""
        self._between_s.append(time.perf_counter() - self._engine_ended_s - self._waited_s)
        self._train()
        self._marks.append(_mark(self._on_gpu))

    def _train(self) -> None:
        import torch
        from torch.nn import functional

        case, on_gpu = self._case, self._on_gpu
        start = self._step % (len(self._labels) // case.batch_size) * case.batch_size + self._rank * case.per_device
        pixels = self._images[self._order[start : start + case.per_device]]
        x = torch.addcmul(self._shift, pixels, self._scale) if on_gpu else pixels * self._scale + self._shift
        y = self._labels[start : start + case.per_device]
        self._optimizer.zero_grad(set_to_none=True)
        bf16 = case.precision == "bf16"
        with torch.autocast(self._device.type, torch.bfloat16) if bf16 else contextlib.nullcontext():
            logits = self._model(x)
        if on_gpu and not self._marks[-1].query():  # of the engine's step
            self._between_s[-1] = 0.0
        loss = functional.cross_entropy(logits.float(), y)
        loss.backward()
        self._optimizer.step()
        self._step += 1

    def times_s(self, pairs: int) -> dict[str, list[float]]:
        """Seconds of each hand-written step, and of the engine's step that followed it."""
        import torch

        if self._on_gpu:
            torch.cuda.synchronize()
        marks, between_s = self._marks[: 2 * pairs + 1], self._between_s[: pairs + 1]
        times = [a.elapsed_time(b) / 1e3 if self._on_gpu else b - a for a, b in itertools.pairwise(marks)]
        return {
            "hand": [time_s - before_s for time_s, before_s in zip(times[0::2], between_s[:-1], strict=True)],
            "engine": [time_s + after_s for time_s, after_s in zip(times[1::2], between_s[1:], strict=True)],
        }


def _model(case: Case) -> Any:
    """From its library; the study's network, which no library has, from here."""
    import timm
    import torchvision

    from workloads import registry

    if case.model in TIMM:
        return timm.create_model(TIMM[case.model], num_classes=10, img_size=case.image_size)
    if case.model == "cnn":
        return registry.models()["cnn"].build(_spec(case, 1, False).train, case.channels, 10, case.image_size)
    return getattr(torchvision.models, case.model)(num_classes=10)


def _mark(on_gpu: bool) -> Any:
    import torch

    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _random_images(size: int, channels: int, count: int) -> Any:
    import numpy as np

    from workloads.datasets.shared.image_data import ImageData, Split

    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (count, channels, size, size), dtype=np.uint8)
    labels = generator.integers(0, 10, count)
    return ImageData(
        train=Split(labels=labels, images=pixels, files=None),
        test=Split(labels=labels[:64], images=pixels[:64], files=None),
        class_names=tuple("abcdefghij"),
        channels=channels,
        image_size=size,
        mean=(0.5,) * channels,
        std=(0.25,) * channels,
        digest="",
    )


def _spec(case: Case, steps: int, on_gpu: bool) -> Any:
    from workloads.contract import Execution, Expectation, Hardware, RunSpec, TrainConfig

    config = TrainConfig(
        model=case.model,
        dataset="synthetic",
        strategy=case.strategy,
        hardware=Hardware("gpu" if on_gpu else "cpu", case.devices),
        cpus=case.devices,
        steps=steps,
        batch_size=case.batch_size,
        precision=case.precision,
        image_size=case.image_size,
        eval_every=0,
        lr=0.01,
    )
    return RunSpec(
        run_id=config.run_id(),
        label=case.name,
        experiment="harness",
        train=config,
        execution=Execution(checkpoint_every=0, hang_timeout_s=300),
        expect=Expectation(ranks=case.devices, nodes=1, gpus_per_node=case.devices if on_gpu else 0, cpus_per_rank=1),
        target="local",
        data_root="",
    )


def _result(run_id: str) -> Any:
    from workloads.contract import RunResult, State

    return RunResult(run_id=run_id, attempt=1, state=State.RUNNING)


# --- the table --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _ranks(case: Case, gpus: list[str], pairs: int, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
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
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "OMP_NUM_THREADS": "1",
        }
        arguments = json.dumps({"case": dataclasses.asdict(case), "pairs": pairs, "folder": str(folder)})
        process = subprocess.Popen([sys.executable, "-m", "benchmarks.harness", "--rank", arguments], env=environment)
        # Neither side shall wander over cores, nor share one with the other rank.
        share = min(8, len(cores) // case.devices)
        if share:
            os.sched_setaffinity(process.pid, cores[rank * share : (rank + 1) * share])
        processes.append(process)
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def measure(case: Case, gpus: list[str], pairs: int) -> dict[str, Any]:
    """Run one case and summarise its pairs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _ranks(case, gpus, pairs + WARMUP_PAIRS, folder) as processes:
            codes = [process.wait() for process in processes]
        if any(codes):
            return {"case": case.name, "error": f"exit codes {codes}"}
        ranks = [json.loads((folder / f"times.{rank}.json").read_text()) for rank in range(case.devices)]
    engine, hand = (
        [max(times) for times in zip(*(r[side] for r in ranks), strict=True)] for side in ("engine", "hand")
    )
    engine, hand = engine[WARMUP_PAIRS:], hand[WARMUP_PAIRS:]
    of_pairs = [a / b for a, b in zip(engine, hand, strict=True)]
    starts = range(0, len(of_pairs) - BLOCK_PAIRS + 1, BLOCK_PAIRS)
    ratios = [statistics.median(of_pairs[start : start + BLOCK_PAIRS]) for start in starts]
    low, high = interval(ratios, statistics.median)
    return {
        "case": case.name,
        **dataclasses.asdict(case),
        "batch_size": case.batch_size,
        "pairs": len(of_pairs),
        "block_pairs": BLOCK_PAIRS,
        "engine_step_s": statistics.median(engine),
        "hand_step_s": statistics.median(hand),
        "engine_samples_per_s": case.batch_size / statistics.median(engine),
        "hand_samples_per_s": case.batch_size / statistics.median(hand),
        "ratio": statistics.median(ratios),
        "ratio_95": [low, high],
        "within_1_pct": low >= 0.99 and high <= 1.01,
        "ratio_of_sums": sum(engine) / sum(hand),
        "ratios": ratios,
    }


def _num_gpus() -> int:
    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def _gpus(count: int) -> list[str]:
    """Names of the GPUs that may be used, as CUDA_VISIBLE_DEVICES has them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--only", default="", help="cases whose name holds one of these texts, separated by semicolons")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        given = json.loads(arguments.rank)
        rank_main(Case(**given["case"]), given["pairs"], Path(given["folder"]))
        return
    least = LEAST_BLOCKS * BLOCK_PAIRS
    if arguments.pairs < least:
        parser.error(f"--pairs {arguments.pairs}: an interval needs {least} at least, {LEAST_BLOCKS} blocks")
    if arguments.devices < 1:
        parser.error("--devices: one at least")
    num_gpus = _num_gpus()
    devices = min(arguments.devices, num_gpus) if num_gpus else arguments.devices
    chosen = cases(devices, arguments.only, tiny=not num_gpus)
    if not chosen:
        every = "\n  ".join(case.name for case in cases(devices, "", tiny=not num_gpus))
        parser.error(f"no case holds {arguments.only!r}; there are\n  {every}")
    rows = []
    for case in chosen:
        row = measure(case, _gpus(num_gpus)[: case.devices], arguments.pairs)
        rows.append(row)
        if "error" in row:
            print(f"{row['case']}: {row['error']}", flush=True)
        else:
            low, high = row["ratio_95"]
            verdict = "within" if row["within_1_pct"] else "OUTSIDE"
            print(
                f"{row['case']}: engine {row['engine_samples_per_s']:.0f}/s, hand {row['hand_samples_per_s']:.0f}/s, "
                f"ratio {row['ratio']:.4f} ({low:.4f}-{high:.4f}) {verdict} 1 %, "
                f"of sums {row['ratio_of_sums']:.4f}",
                flush=True,
            )
        if arguments.output:
            arguments.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
