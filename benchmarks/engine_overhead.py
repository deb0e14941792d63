"""Overhead of the engine: its steps compared with a hand-written loop of the same steps, alternating in one process.

    python -m benchmarks.engine_overhead [--pairs 1000] [--only resnet50] [--output engine_overhead.json]

For each case (model, strategy, precision, batch) one process per GPU runs the engine's own ``train``. Between any two
of its steps a plain loop runs one step with the same model, data on the device, order, optimiser, precision and batch.
A pair is one step of each; its ratio is engine / hand-written, of the slowest rank's times. The first pairs are
dropped.

Device time: an event is recorded after each step of either side, at the same place, where the function that ran the
step has returned. Host time: what the engine does between its step and the next hand-written one counts as the
engine's, except the time that it waits for the device, which is part of the steps already. It counts for neither side
if the device is still busy with the engine's step when the forward pass of the hand-written step has been launched,
because then the host time delayed nothing.

A block's ratio is the median of its pairs. Prints the median over blocks, its bootstrap 95 % interval (over blocks,
because neighbouring pairs are correlated), and the ratio of the summed times, which also includes what the engine does
once per window.

Single-step turns are needed because host speed drifts by 10 to 25 % within a second when launches are the bottleneck,
and neighbouring steps share that drift. Without GPUs the benchmark runs tiny cases on CPU, which only shows that it
works.
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
"""Fewer blocks give no useful interval."""
IMAGES = {28: 200_000, 32: 200_000, 224: 6_400}
"""Image size -> number of images. Their pixels are random: both sides read the same ones, and step time does not
depend on their content."""
SHAPES = [
    ("resnet50", 32, 128, ("fp32", "bf16")),
    ("resnet50", 32, 1024, ("fp32", "bf16")),
    ("vit_tiny", 224, 128, ("fp32", "bf16")),
    ("resnet50", 224, 128, ("bf16",)),
    ("swin_tiny", 224, 128, ("bf16",)),
    ("resnet18", 32, 128, ("fp32",)),
    ("cnn", 28, 1024, ("fp32",)),
]
"""Model, image size, samples per device, precisions."""
TINY = [("resnet18", 32, 8, ("fp32",))]
TIMM = {"vit_tiny": "vit_tiny_patch16_224", "swin_tiny": "swin_tiny_patch4_window7_224"}


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table."""

    model: str
    image_size: int
    per_device: int
    """Samples per device and step."""
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
    """Return the rows of the table: eager on one device and ddp on all."""
    strategies = [("eager", 1)] + ([("ddp", devices)] if devices > 1 else [])
    found = [
        Case(model, size, per_device, strategy, precision, n)
        for model, size, per_device, precisions in (TINY if tiny else SHAPES)
        for (strategy, n), precision in itertools.product(strategies, precisions)
    ]
    return [case for case in found if any(text in case.name for text in only.split(";"))]


# --- one rank ---------------------------------------------------------------------------------------------------------


def rank_main(case: Case, pairs: int, folder: Path) -> None:
    """Run the engine alternating with the hand-written loop, and write this rank's step times of both sides."""
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

    def alternating(*args: Any, **kwargs: Any) -> Any:
        hand.append(_HandWritten(case, world, device, data))
        return _AlternatingLoader(make(*args, **kwargs), hand[0])

    loaders.make = alternating
    record = timing.Recorder.record

    def recorded(recorder: Any, *step: Any) -> None:
        hand[0].engine_step_done()
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
    """Wrap a function in which the engine waits for the device; report the seconds to the hand-written loop."""

    def timed(*args: Any) -> Any:
        started_s = time.perf_counter()
        result = wait(*args)
        for loop in hand:
            loop.add_engine_wait(time.perf_counter() - started_s)
        return result

    return timed


class _AlternatingLoader:
    """A loader that runs one hand-written step before each step of the engine."""

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
    """A plain training loop for one model on one data set."""

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
                bucket_cap_mb=25,  # explicit, as in the engine: by default DDP makes the first bucket smaller (1 MiB)
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
        """After each step: this loop's, the engine's, and so on; one before the first."""
        self._between_s: list[float] = []
        """Host time from the end of an engine step to the start of this loop's step; one before the first. Zero where
        it did not delay the device."""
        self._engine_ended_s = time.perf_counter()
        self._waited_s = 0.0
        """Time that the engine has waited for the device since then."""

    def engine_step_done(self) -> None:
        """Record that the engine's step function has returned."""
        self._marks.append(_mark(self._on_gpu))
        self._engine_ended_s = time.perf_counter()
        self._waited_s = 0.0

    def add_engine_wait(self, seconds: float) -> None:
        """Add time that the engine waited for the device."""
        self._waited_s += seconds

    def step(self) -> None:
        """Run one step, including the host time for freeing its autograd graph."""
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
        if on_gpu and not self._marks[-1].query():  # the engine's step is still running
            self._between_s[-1] = 0.0
        loss = functional.cross_entropy(logits.float(), y)
        loss.backward()
        self._optimizer.step()
        self._step += 1

    def times_s(self, pairs: int) -> dict[str, list[float]]:
        """Return the seconds of each hand-written step and of the engine's step after it."""
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
    """Build the model from its library; ``cnn``, which no library has, from ``workloads``."""
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
        experiment="engine_overhead",
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
    """Start one process per rank with the environment that submitit's local mode sets."""
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
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.engine_overhead", "--rank", arguments], env=environment
        )
        # Pin each rank to its own cores: migration between cores and sharing them add noise.
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
    """Return the names of usable GPUs, as in CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--only", default="", help="only cases whose name contains one of these texts (text;text)")
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
        parser.error(f"--pairs {arguments.pairs}: an interval needs at least {least} ({LEAST_BLOCKS} blocks)")
    if arguments.devices < 1:
        parser.error("--devices: must be at least 1")
    num_gpus = _num_gpus()
    devices = min(arguments.devices, num_gpus) if num_gpus else arguments.devices
    chosen = cases(devices, arguments.only, tiny=not num_gpus)
    if not chosen:
        every = "\n  ".join(case.name for case in cases(devices, "", tiny=not num_gpus))
        parser.error(f"no case contains {arguments.only!r}; the cases are\n  {every}")
    rows = []
    for case in chosen:
        row = measure(case, _gpus(num_gpus)[: case.devices], arguments.pairs)
        rows.append(row)
        if "error" in row:
            print(f"{row['case']}: {row['error']}", flush=True)
        else:
            low, high = row["ratio_95"]
            outcome = "within" if row["within_1_pct"] else "OUTSIDE"
            print(
                f"{row['case']}: engine {row['engine_samples_per_s']:.0f}/s, hand {row['hand_samples_per_s']:.0f}/s, "
                f"ratio {row['ratio']:.4f} ({low:.4f}-{high:.4f}) {outcome} 1 %, "
                f"of sums {row['ratio_of_sums']:.4f}",
                flush=True,
            )
        if arguments.output:
            arguments.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
