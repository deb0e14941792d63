"""``pipeline``: torch.distributed.pipelining: one process per device, each with one or two stages of the model.

The model's list of layers is cut into stages of about equal measured time. Messages between stages have one size, so an
odd batch is padded to whole micro-batches with samples that no loss counts. Live batch norm would see the padding, so
the plan excludes such batches. Batch norm normalizes each micro-batch; its running statistics move once a micro-batch.

Each rank has the whole model in host memory, and only its own stages on its device. ``compile`` compiles or captures
stages; the messages between them and the optimizer's update run outside.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from workloads.contract import Hardware, Topology
from workloads.lazy import lazy_imports
from workloads.registry import Option, Options, StrategyDeclaration
from workloads.strategies.shared import compiled_steps, limits, partition
from workloads.strategies.shared.protocol import Task

with lazy_imports(__name__):
    import torch
    from torch import Tensor, distributed, nn
    from torch.distributed import pipelining

    from workloads.engines import checkpoint
    from workloads.loaders.protocol import Batch
    from workloads.models.shared import layer_lists
    from workloads.strategies.shared import pipeline_stage

IGNORED_CLASS = -100
"""The class of a padding sample: the default ``ignore_index`` of ``cross_entropy``."""

STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 2}


class Pipeline:
    """This rank's stages, and the schedule that all ranks follow."""

    optimizer: torch.optim.Optimizer

    def __init__(self, task: Task) -> None:
        self._task = task
        self._module = task.module
        chunks, schedule = task.options["chunks"], str(task.options["schedule"])
        assert isinstance(chunks, int)
        self._micro_batch = -(-task.config.batch_size // chunks)
        self._samples = chunks * self._micro_batch
        self._ranks, self._rank = task.world.size, task.world.rank
        self._num_stages = self._ranks * STAGES_PER_RANK[schedule]
        parts = self._cut_into_stages()
        self._wires = wires = _wires(task, parts, self._micro_batch)
        self._stages: dict[int, pipeline_stage.Stage] = {}
        stages = []
        for number in range(self._rank, self._num_stages, self._ranks):
            stage = pipeline_stage.Stage(task, parts[number].to(task.device)).eval()
            self._stages[number] = stage
            ends: dict[str, Any] = {"input_args": wires[number], "output_args": wires[number + 1]}
            stages.append(pipelining.PipelineStage(stage, number, self._num_stages, task.device, **ends))
        own = {id(t) for t in self._tensors()}
        every = list(self._module.parameters())
        self._own_indices = [i for i, p in enumerate(every) if id(p) in own]
        placeholder = nn.Parameter(torch.zeros(0))  # torch's optimizers reject an empty list
        self.optimizer = task.make_optimizer([every[i] for i in self._own_indices] or [placeholder])
        self._num_global = 1
        self._schedule = _schedule(schedule, stages, chunks, self._loss)
        self._captured = False

    def prepare(self, batch: Batch) -> None:
        how = self._task.config.compile
        preserved = compiled_steps.preserved(self._tensors(), self.optimizer)
        with preserved, compiled_steps.compiler_errors_explained():
            for number, stage in self._stages.items():
                self._task.set_training(stage, True)
                if how in compiled_steps.COMPILED:
                    stage.compile_part()
                if how in compiled_steps.CAPTURED:
                    pipeline_stage.warm_up(stage, self._wires[number])
                    stage.capture(self._wires[number], self._samples // self._micro_batch)
                    self._captured = True
            self.train_step(batch)

    def train_step(self, batch: Batch) -> Tensor:
        for stage in self._stages.values():
            self._task.set_training(stage, True)
        # Captured backward passes add to the gradient tensors that existed at capture.
        self.optimizer.zero_grad(set_to_none=not self._captured)
        self._num_global = batch.num_global
        inputs = (_padded(batch.x, self._samples, 0),) if self._rank == 0 else ()
        losses: list[Tensor] = []
        if self._num_stages - 1 in self._stages:
            self._schedule.step(*inputs, target=_padded(batch.y, self._samples, IGNORED_CLASS), losses=losses)
        else:
            self._schedule.step(*inputs)
        self.optimizer.step()
        if losses:
            return torch.stack(losses).detach().sum() * batch.num_global
        return torch.zeros((), device=self._task.device, dtype=batch.x.dtype)

    def logits(self, x: Tensor) -> Tensor | None:
        outputs = []
        with torch.no_grad():
            for part in torch.split(x, self._micro_batch):
                output = self._forward(_padded(part, self._micro_batch, 0))
                if output is not None:
                    outputs.append(output[: len(part)])
        return torch.cat(outputs) if outputs else None

    def state_dict(self) -> dict[str, Any]:
        state = checkpoint.cpu_state(self._module, self.optimizer)
        own = {id(t) for t in self._tensors()}
        held = self._module.state_dict(keep_vars=True)
        share = {
            "model": {name: t for name, t in state["model"].items() if id(held[name]) in own},
            "state": {self._own_indices[j]: values for j, values in state["optimizer"]["state"].items()},
        }
        shares: list[dict[str, Any]] = [share] * self._ranks
        distributed.gather_object(share, shares if self._rank == 0 else None, group=self._task.host_group)
        model = {name: next((s["model"][name] for s in shares if name in s["model"]), held[name]) for name in held}
        states = {i: values for s in shares for i, values in s["state"].items()}
        every = list(range(len(list(self._module.parameters()))))
        groups = [{**group, "params": every} for group in state["optimizer"]["param_groups"]]
        return {"model": model, "optimizer": {"state": dict(sorted(states.items())), "param_groups": groups}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._module.load_state_dict(state["model"])
        states = state["optimizer"]["state"]
        own = {j: states[i] for j, i in enumerate(self._own_indices) if i in states}
        held = self.optimizer.state_dict()["param_groups"][0]["params"]
        groups = [{**group, "params": held} for group in state["optimizer"]["param_groups"]]
        self.optimizer.load_state_dict({"state": own, "param_groups": groups})

    def close(self) -> None:
        """Nothing to free: stages' graphs hold no collectives."""

    def _tensors(self) -> list[Tensor]:
        """Return the parameters and buffers of this rank's stages."""
        return [t for stage in self._stages.values() for t in (*stage.parameters(), *stage.buffers())]

    def _loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return self._task.loss_sum(logits, y) / self._num_global

    def _forward(self, x: Tensor) -> Tensor | None:
        """Pass one micro-batch through all stages; returns the last one's output, on its rank. Collective."""
        for number, stage in self._stages.items():
            self._task.set_training(stage, False)
            if number:
                x = torch.empty_like(self._wires[number], requires_grad=False)
                distributed.recv(x, (number - 1) % self._ranks)
            x = stage(x)
            if number == self._num_stages - 1:
                return x
            distributed.send(x, (number + 1) % self._ranks)
        return None

    def _cut_into_stages(self) -> list[nn.Sequential]:
        """Cut the model as rank 0 decides, because measured times differ between ranks. Collective."""
        task, layers = self._task, self._task.layers()
        balance = torch.zeros(self._num_stages, dtype=torch.int64, device=task.device)
        if self._rank == 0:
            decided = partition.decide_balance(task, layers, self._num_stages, self._micro_batch)
            balance += torch.tensor(decided, device=task.device)
        distributed.broadcast(balance, 0)
        return layer_lists.cut(layers, balance.tolist())


def _wires(task: Task, parts: Sequence[nn.Module], samples: int) -> list[Tensor]:
    """Return an example of what passes each wire: into the first stage, between two, out of the last.

    A copy of each part computes it, one after another, so that only one is on the device.
    """
    x = task.example(samples)
    wires = [x]
    with torch.no_grad():
        for part in parts:
            x = task.forward(copy.deepcopy(part).to(task.device).eval(), x)
            # PipelineStage sends gradients back for the inputs that require them.
            wires.append(torch.empty_like(x, memory_format=torch.contiguous_format, requires_grad=True))
    return wires


def _schedule(name: str, stages: list[Any], chunks: int, loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
    kind: Any = {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    }[name]
    # scale_grads divides gradients by the number of micro-batches, which a summed loss must not be.
    return kind(stages if STAGES_PER_RANK[name] > 1 else stages[0], chunks, loss_fn=loss, scale_grads=False)


def _padded(tensor: Tensor, samples: int, value: int) -> Tensor:
    """Return the tensor with padding samples at its end."""
    if len(tensor) == samples:
        return tensor
    return torch.cat([tensor, tensor.new_full((samples - len(tensor), *tensor.shape[1:]), value)])


def _num_stages(hardware: Hardware, options: Options) -> int:
    return hardware.devices * STAGES_PER_RANK[str(options["schedule"])]


def _unsupported_hardware(hardware: Hardware, options: Options) -> str:
    chunks, schedule, devices = options["chunks"], str(options["schedule"]), hardware.devices
    assert isinstance(chunks, int) and isinstance(options["balance"], tuple)
    if devices < 2:
        return f"a pipeline needs at least two devices, and {hardware} has one"
    if schedule == "1f1b" and chunks < devices:
        return f"schedule 1f1b needs a micro-batch for each of {devices} devices, and chunks is {chunks}"
    if STAGES_PER_RANK[schedule] > 1 and chunks % devices:
        return f"schedule {schedule} needs chunks to be a multiple of the {devices} devices, and it is {chunks}"
    stages = _num_stages(hardware, options)
    if options["balance"] and len(options["balance"]) != stages:
        named = list(options["balance"])
        return f"schedule {schedule} has {stages} stages on {hardware}, and balance {named} names {len(named)}"
    return partition.ignored_balance_by(options, "time")


def _unsupported_compile(_how: str, options: Options) -> str:
    if options["schedule"] == "zero_bubble":
        return "schedule zero_bubble splits a stage's backward pass, which compiled code and CUDA graphs run as one"
    return ""


DECLARATION = StrategyDeclaration(
    name="pipeline",
    summary="torch.distributed.pipelining: one process per device with a stage of the model; four schedules.",
    topology=lambda _options: Topology.PROCESS_PER_DEVICE,
    unsupported_hardware=_unsupported_hardware,
    unsupported_layers=lambda layers, hardware, options: partition.unsupported_layers(
        layers, _num_stages(hardware, options), options
    ),
    unsupported_training=limits.no_channels_last(
        "messages between stages are contiguous, so channels_last has no effect"
    ),
    unsupported_compile=_unsupported_compile,
    needs_layers=True,
    splits_batch=False,
    micro_batches=lambda options: int(options["chunks"]),  # type: ignore[arg-type]
    equal_micro_batches=True,
    options=(
        Option(
            "schedule",
            "1f1b",
            "In which order stages work on micro-batches; interleaved and zero_bubble have two stages a device",
            choices=tuple(STAGES_PER_RANK),
        ),
        partition.CHUNKS,
        partition.balance_option("Layers of each stage; [] shares them out"),
        partition.balance_by_option("time"),
    ),
    batch_norm_treatment="per_micro_batch",
    contract_options=({}, {"schedule": "gpipe"}, {"schedule": "interleaved"}, {"schedule": "zero_bubble"}),
    divides_state=lambda _options: True,
    create=lambda: Pipeline,
)
