"""Why a pipeline is slower than its bound: small micro-batches, uneven stages, or communication.

    python -m benchmarks.pipeline_bound [--model swin_tiny] [--batch-size 512] [--chunks 8] [--step-ms MEASURED]

Needs one device. The benchmark measures a whole step of ``eager`` on it and, for the cut that the strategy ``pipeline``
makes, the forward and backward pass of every stage over one micro-batch and the update of its parameters. On GPUs all
of these are recorded as graphs, as in a run. From the times it computes a step of schedule ``1f1b`` without
communication cost:

    bound      step of one device x (m + n - 1) / (n m), for n devices and m micro-batches
    equal      with the measured time of a micro-batch, for stages of equal length
    uneven     with the measured stages
    update     plus the slowest rank's parameter update

The difference between two lines is the cost of one cause. With ``--step-ms``, the measured step of a run on n devices
with the same settings, the remainder is the cost of communication, launches and waiting.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPEATS = 12
WARMUPS = 4


@dataclass(frozen=True)
class StageTime:
    """Times of one stage for one micro-batch."""

    forward_s: float
    backward_s: float
    update_s: float = 0.0


def one_f_one_b_s(stages: Sequence[StageTime], chunks: int) -> float:
    """Return the duration of schedule 1F1B without communication cost (PipeDream-Flush; Narayanan et al., 2021)."""
    count = len(stages)
    orders = []
    for number in range(count):
        ahead = min(chunks, count - number)
        order = [("forward", i) for i in range(ahead)]
        for i in range(chunks):
            order.append(("backward", i))
            if ahead + i < chunks:
                order.append(("forward", ahead + i))
        orders.append(order)
    done: dict[tuple[str, int, int], float] = {}
    clock = [0.0] * count
    while any(orders):
        for number, order in enumerate(orders):
            while order:
                kind, i = order[0]
                before = (kind, i, number - 1 if kind == "forward" else number + 1)
                outermost = number == (0 if kind == "forward" else count - 1)
                if not outermost and before not in done:
                    break
                took = stages[number].forward_s if kind == "forward" else stages[number].backward_s
                clock[number] = max(clock[number], 0.0 if outermost else done[before]) + took
                done[kind, i, number] = clock[number]
                order.pop(0)
    return max(clock)


def explain(whole_s: float, stages: Sequence[StageTime], chunks: int) -> dict[str, float]:
    """Return the seconds of a step, adding one cause after the other."""
    count = len(stages)
    mean = StageTime(
        sum(stage.forward_s for stage in stages) / count, sum(stage.backward_s for stage in stages) / count
    )
    uneven_s = one_f_one_b_s(stages, chunks)
    return {
        "bound": whole_s * (chunks + count - 1) / (count * chunks),
        "equal": one_f_one_b_s([mean] * count, chunks),
        "uneven": uneven_s,
        "update": uneven_s + max(stage.update_s for stage in stages),
    }


# --- measuring --------------------------------------------------------------------------------------------------------


class _Bench:
    """A model and its data on one device, made as in the engine."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch

        from workloads import loaders, registry
        from workloads.contract import Hardware, TrainConfig
        from workloads.engines import recipe, settings
        from workloads.loaders.protocol import Shard
        from workloads.measurement.timing import Clock

        self.on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")
        self.config = TrainConfig(
            model=arguments.model,
            dataset="synthetic",
            strategy="pipeline",
            strategy_options={"chunks": arguments.chunks},
            hardware=Hardware("gpu" if self.on_gpu else "cpu", arguments.devices),
            cpus=arguments.devices,
            batch_size=arguments.batch_size,
            precision=arguments.precision,
            image_size=arguments.image_size,
            compile="graphs" if self.on_gpu else "off",
        )
        recipe.set_precision(self.config)
        self.data = registry.datasets()["synthetic"].load(None, "synthetic", self.config)
        self.size = settings.image_size(self.config, self.data)
        self.loader = loaders.make(
            self.data,
            self.config,
            image_size=self.size,
            device=self.device,
            dtype=recipe.dtype_of(self.config),
            shard=Shard(0, 1),
        )
        self._clock = Clock(self.device)

    def task(self, strategy: str) -> Any:
        """Return the task of a one-rank strategy, or of rank 0 of a pipeline."""
        from workloads.contract import Hardware
        from workloads.engines import recipe, torch_loop
        from workloads.job.world import World

        config = self.config
        if strategy != "pipeline":
            one = Hardware(config.hardware.kind, 1)
            config = dataclasses.replace(config, strategy=strategy, strategy_options={}, hardware=one)
        module = recipe.build_model(config, self.data, self.size)
        return torch_loop.make_task(config, module, self.loader, World.from_environment({}), self.device)

    def time_s(self, *works: Callable[[], object]) -> list[float]:
        """Return the median seconds of each function, called one after the other."""
        found = []
        for repeat in range(WARMUPS + REPEATS):
            marks = [self._clock.mark()]
            for work in works:
                work()
                marks.append(self._clock.mark())
            self._clock.settle()
            if repeat >= WARMUPS:
                found.append(self._clock.between_s(marks))
        return [statistics.median(times) for times in zip(*found, strict=True)]

    def whole_s(self) -> float:
        """Return the seconds of a step of ``eager``."""
        from workloads import registry

        strategy = registry.strategies()["eager"].create()(self.task("eager"))
        batch = next(self.loader.train(0))
        if self.on_gpu:
            strategy.prepare(batch)
        (step_s,) = self.time_s(lambda: strategy.train_step(batch))
        strategy.close()
        return step_s

    def cuts(self, chunks: int, devices: int) -> tuple[list[float], list[tuple[int, ...]]]:
        """Return the seconds of each layer, and the strategy's cut followed by cuts that move one or two layers."""
        from workloads.strategies.shared.partition import equal_parts, measure_layers_s

        task = self.task("pipeline")
        layers_s = measure_layers_s(task, task.layers(), -(-self.config.batch_size // chunks))
        cut = equal_parts(layers_s, devices)
        found = [cut]
        for place in range(devices - 1):
            for more in (-2, -1, 1, 2):
                moved = [*cut[:place], cut[place] + more, cut[place + 1] - more, *cut[place + 2 :]]
                if min(moved) > 0:
                    found.append(tuple(moved))
        return layers_s, found

    def stages(self, sizes: Sequence[int], chunks: int) -> list[StageTime]:
        """Measure each stage of a cut on one micro-batch."""
        import torch

        from workloads.models.shared import layer_lists
        from workloads.strategies.shared.pipeline_stage import Stage, warm_up

        task = self.task("pipeline")
        wire = task.example(-(-self.config.batch_size // chunks))
        found = []
        for part in layer_lists.cut(task.layers(), sizes):
            stage = Stage(task, part.to(self.device)).eval()
            optimizer = task.make_optimizer(stage.parameters())
            task.set_training(stage, True)
            if self.on_gpu:
                warm_up(stage, wire)
                stage.capture(wire, 1)
            answers: list[Any] = []
            given = wire.detach().clone().requires_grad_(wire.requires_grad)
            gradient = torch.ones_like(stage(given))

            def forward(stage: Any = stage, given: Any = given, answers: list[Any] = answers) -> None:
                answers[:] = [stage(given)]

            def backward(gradient: Any = gradient, answers: list[Any] = answers) -> None:
                answers[0].backward(gradient)

            found.append(StageTime(*self.time_s(forward, backward, optimizer.step)))
            wire = torch.zeros_like(gradient, requires_grad=True)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="swin_tiny")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--precision", default="bf16", choices=["fp64", "fp32", "tf32", "bf16"])
    parser.add_argument("--step-ms", type=float, help="measured step of a run with the same settings")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    arguments = parser.parse_args()
    if not 2 <= arguments.devices <= arguments.chunks <= arguments.batch_size:
        parser.error("1f1b needs at least two devices, one micro-batch per device and one sample per micro-batch")
    if arguments.json and not arguments.json.parent.is_dir():
        parser.error(f"--json {arguments.json}: no such folder")
    bench = _Bench(arguments)
    whole_s = bench.whole_s()
    gc.collect()
    layers_s, cuts = bench.cuts(arguments.chunks, arguments.devices)
    rows = []
    for cut in cuts:
        stages = bench.stages(cut, arguments.chunks)
        rows.append(
            {"cut": cut, "stages": [vars(stage) for stage in stages]} | explain(whole_s, stages, arguments.chunks)
        )
        gc.collect()
    steps = {name: rows[0][name] for name in ("bound", "equal", "uneven", "update")}
    if arguments.step_ms:
        steps["measured"] = arguments.step_ms / 1e3
    what = f"{arguments.model}, {arguments.batch_size} samples, {arguments.chunks} micro-batches"
    print(f"{what}: one device {whole_s * 1e3:.1f} ms")
    before_s = 0.0
    for name, step_s in steps.items():
        more = f"{(step_s - before_s) * 1e3:+7.1f} ms" if before_s else " " * 10
        print(f"  {name:9}{step_s * 1e3:8.1f} ms  {more}  {steps['bound'] / step_s:6.1%} of the bound")
        before_s = step_s
    for row in rows:
        times = ", ".join(f"{(s['forward_s'] + s['backward_s']) * 1e3:.2f} ms" for s in row["stages"])
        print(f"  layers {list(row['cut'])}: stages {times}; step {row['update'] * 1e3:.1f} ms")
    if arguments.json:
        arguments.json.write_text(json.dumps({"whole_s": whole_s, "layers_s": layers_s, "cuts": rows}, indent=1))


if __name__ == "__main__":
    main()
