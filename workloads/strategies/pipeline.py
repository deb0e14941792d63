"""``pipeline``: torch.distributed.pipelining: one process per device, each with one stage of the model or several.

The model's list of layers is cut into stages of about equal measured time. Messages between stages have one size, so an
odd batch is filled up to whole micro-batches with samples that no loss counts. Batch norm would see them: with live
batch norm such a batch is refused. It normalises each micro-batch, and its running statistics move once a micro-batch.

Every rank has the whole model in host memory, and its own stages only on its device. With ``compile`` it is stages that
are compiled or recorded; messages between them are sent in between, and the optimiser's update comes after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from workloads.contract import Hardware, Topology
from workloads.registry import Option, Options, StrategyDeclaration
from workloads.strategies.shared.host_group import host_group
from workloads.strategies.shared.partition import ignores_balance_by, misfit

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from workloads.loaders.protocol import Batch
    from workloads.strategies.shared.pipeline_stage import Stage
    from workloads.strategies.shared.protocol import Task

NOT_COUNTED = -100
"""The class of a made-up sample, as ``cross_entropy`` knows it."""

STAGES_A_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 2}


class Pipeline:
    """This rank's stages, and the schedule that all ranks follow."""

    optimizer: torch.optim.Optimizer

    def __init__(self, task: Task) -> None:
        from torch.distributed.pipelining import PipelineStage

        from workloads.strategies.shared.pipeline_stage import Stage

        self._task = task
        self._module = task.module
        chunks, schedule = task.options["chunks"], str(task.options["schedule"])
        assert isinstance(chunks, int)
        self._micro_batch = -(-task.config.batch_size // chunks)
        self._samples = chunks * self._micro_batch
        self._size, self._rank = task.world.size, task.world.rank
        self._count = self._size * STAGES_A_RANK[schedule]
        self._stages: dict[int, Stage] = {}
        parts, wires = self._cut()
        self._wires = wires
        stages = []
        for number in range(self._rank, self._count, self._size):
            self._stages[number] = Stage(task, parts[number].to(task.device)).eval()
            stages.append(
                PipelineStage(
                    self._stages[number],
                    number,
                    self._count,
                    task.device,
                    input_args=wires[number],
                    output_args=wires[number + 1],
                )
            )
        own = {id(p) for stage in self._stages.values() for p in stage.parameters()}
        every = list(self._module.parameters())
        self._indices = [i for i, p in enumerate(every) if id(p) in own]
        self.optimizer = task.make_optimizer([every[i] for i in self._indices] or [_nothing()])
        self._num_global = 1
        self._schedule = _schedule(schedule, stages, chunks, self._loss)
        self._host_group = host_group(task)
        self._recorded = False

    def prepare(self, batch: Batch) -> None:
        from workloads.strategies.shared.compiled_steps import explained, unchanged
        from workloads.strategies.shared.pipeline_stage import warm_up

        how = self._task.config.compile
        learned = [t for stage in self._stages.values() for t in (*stage.parameters(), *stage.buffers())]
        with unchanged(learned, self.optimizer), explained():
            for number, stage in self._stages.items():
                self._task.set_training(stage, True)
                if how in ("default", "default_graphs"):
                    stage.compile_part()
                if how in ("graphs", "default_graphs"):
                    warm_up(stage, self._wires[number])
                    stage.record(self._wires[number], self._samples // self._micro_batch)
                    self._recorded = True
            self.train_step(batch)

    def train_step(self, batch: Batch) -> Tensor:
        import torch

        for stage in self._stages.values():
            self._task.set_training(stage, True)
        # Recorded backward passes add to the gradient tensors that they know.
        self.optimizer.zero_grad(set_to_none=not self._recorded)
        self._num_global = batch.num_global
        given = (_filled(batch.x, self._samples, 0),) if self._rank == 0 else ()
        losses: list[Tensor] = []
        if self._answers:
            self._schedule.step(*given, target=_filled(batch.y, self._samples, NOT_COUNTED), losses=losses)
        else:
            self._schedule.step(*given)
        self.optimizer.step()
        if not losses:
            return torch.zeros((), device=self._task.device, dtype=batch.x.dtype)
        return torch.stack(losses).detach().sum() * batch.num_global

    def logits(self, x: Tensor) -> Tensor | None:
        import torch

        answers = []
        with torch.no_grad():
            for part in torch.split(x, self._micro_batch):
                answer = self._forward(_filled(part, self._micro_batch, 0))
                if answer is not None:
                    answers.append(answer[: len(part)])
        return torch.cat(answers) if answers else None

    def state_dict(self) -> dict[str, Any]:
        from torch import distributed

        from workloads.engines.checkpoint import cpu_state

        state = cpu_state(self._module, self.optimizer)
        tensors = [t for stage in self._stages.values() for t in (*stage.parameters(), *stage.buffers())]
        own = {id(t) for t in tensors}
        held = self._module.state_dict(keep_vars=True)
        share = {
            "model": {name: t for name, t in state["model"].items() if id(held[name]) in own},
            "state": {self._indices[j]: values for j, values in state["optimizer"]["state"].items()},
        }
        shares: list[dict[str, Any]] = [share] * self._size
        distributed.gather_object(share, shares if self._rank == 0 else None, group=self._host_group)
        model = {name: next((s["model"][name] for s in shares if name in s["model"]), held[name]) for name in held}
        states = {i: values for s in shares for i, values in s["state"].items()}
        every = list(range(len(list(self._module.parameters()))))
        groups = [{**group, "params": every} for group in state["optimizer"]["param_groups"]]
        return {"model": model, "optimizer": {"state": dict(sorted(states.items())), "param_groups": groups}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._module.load_state_dict(state["model"])
        states = state["optimizer"]["state"]
        own = {j: states[i] for j, i in enumerate(self._indices) if i in states}
        held = self.optimizer.state_dict()["param_groups"][0]["params"]
        groups = [{**group, "params": held} for group in state["optimizer"]["param_groups"]]
        self.optimizer.load_state_dict({"state": own, "param_groups": groups})

    def close(self) -> None:
        """Nothing outlives the object: its graphs hold no message."""

    @property
    def _answers(self) -> bool:
        """Whether this rank has the last stage."""
        return self._count - 1 in self._stages

    def _loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return self._task.loss_sum(logits, y) / self._num_global

    def _forward(self, x: Tensor) -> Tensor | None:
        """One micro-batch through all stages; what the last one says, on its rank."""
        import torch
        from torch import distributed

        for number, stage in self._stages.items():
            self._task.set_training(stage, False)
            if number:
                x = torch.empty_like(self._wires[number], requires_grad=False)
                distributed.recv(x, (number - 1) % self._size)
            x = stage(x)
            if number == self._count - 1:
                return x
            distributed.send(x, (number + 1) % self._size)
        return None

    def _cut(self) -> tuple[list[nn.Sequential], list[Tensor]]:
        """The parts of all stages, and a sample of what goes over each wire: into the first, between two, out of the
        last.

        Rank 0 decides, because it is measured time that decides.
        """
        import torch
        from torch import distributed

        from workloads.models.shared import layer_lists
        from workloads.strategies.shared.partition import sizes_of_parts

        task, layers = self._task, self._task.layers()
        sizes = torch.zeros(self._count, dtype=torch.int64, device=task.device)
        if self._rank == 0:
            sizes += torch.tensor(sizes_of_parts(task, layers, self._count, self._micro_batch), device=task.device)
        distributed.broadcast(sizes, 0)
        parts = layer_lists.cut(layers, sizes.tolist())
        return parts, _wires(task, parts, self._micro_batch)


def _wires(task: Task, parts: Sequence[nn.Module], samples: int) -> list[Tensor]:
    """Tried out with a copy of each part, one after another, so that only one is on the device."""
    import copy

    import torch

    x = task.example(samples)
    wires = [x]
    with torch.no_grad():
        for part in parts:
            x = task.forward(copy.deepcopy(part).to(task.device).eval(), x)
            # What asks for a gradient gets one sent back.
            wires.append(torch.empty_like(x, memory_format=torch.contiguous_format, requires_grad=True))
    return wires


def _schedule(name: str, stages: list[Any], chunks: int, loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
    from torch.distributed import pipelining

    if name in ("gpipe", "1f1b"):
        single = pipelining.ScheduleGPipe if name == "gpipe" else pipelining.Schedule1F1B
        return single(stages[0], chunks, loss_fn=loss, scale_grads=False)
    several = {
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    }[name]
    return several(stages, chunks, loss_fn=loss, scale_grads=False)


def _filled(tensor: Tensor, samples: int, value: int) -> Tensor:
    """Made longer with made-up samples."""
    if len(tensor) == samples:
        return tensor
    import torch

    return torch.cat([tensor, tensor.new_full((samples - len(tensor), *tensor.shape[1:]), value)])


def _nothing() -> nn.Parameter:
    """What an optimiser has where a stage has no parameters: it must have some."""
    import torch

    return torch.nn.Parameter(torch.zeros(0))


def _stages(hardware: Hardware, options: Options) -> int:
    return hardware.devices * STAGES_A_RANK[str(options["schedule"])]


def _unsupported_hardware(hardware: Hardware, options: Options) -> str:
    chunks, schedule, devices = options["chunks"], str(options["schedule"]), hardware.devices
    assert isinstance(chunks, int) and isinstance(options["balance"], tuple)
    if devices < 2:
        return f"a pipeline needs two devices at least, and {hardware} has one"
    if schedule == "1f1b" and chunks < devices:
        return f"schedule 1f1b needs a micro-batch for each of {devices} devices, and chunks is {chunks}"
    if STAGES_A_RANK[schedule] > 1 and chunks % devices:
        return f"schedule {schedule} needs chunks to be a multiple of the {devices} devices, and it is {chunks}"
    stages = _stages(hardware, options)
    if options["balance"] and len(options["balance"]) != stages:
        named = list(options["balance"])
        return f"schedule {schedule} has {stages} stages on {hardware}, and balance {named} names {len(named)}"
    return ignores_balance_by(options, "time")


def _unsupported_compile(_how: str, options: Options) -> str:
    if options["schedule"] == "zero_bubble":
        return "schedule zero_bubble cuts a stage's backward pass in two, which code and graphs have in one piece"
    return ""


def _unsupported_training(train: Any, _options: Options) -> str:
    return "what travels between stages is contiguous, so channels_last means nothing" if train["channels_last"] else ""


DECLARATION = StrategyDeclaration(
    name="pipeline",
    summary="torch.distributed.pipelining: one process per device with a stage of the model; four schedules.",
    framework="torch",
    topology=lambda _options: Topology.PROCESS_PER_DEVICE,
    unsupported_hardware=_unsupported_hardware,
    unsupported_layers=lambda layers, hardware, options: misfit(layers, _stages(hardware, options), options),
    unsupported_training=_unsupported_training,
    unsupported_compile=_unsupported_compile,
    needs_layers=True,
    splits_batch=False,
    micro_batches=lambda options: int(options["chunks"]),  # type: ignore[arg-type]
    equal_micro_batches=True,
    packages=("torch",),
    options=(
        Option(
            name="schedule",
            type=str,
            default="1f1b",
            choices=tuple(STAGES_A_RANK),
            summary="In which order stages work on micro-batches; interleaved and zero_bubble have two stages a device",
        ),
        Option(
            name="chunks",
            type=int,
            default=4,
            minimum=1,
            summary="Micro-batches a batch",
        ),
        Option(
            name="balance",
            type=tuple[int, ...],
            default=(),
            minimum=1,
            summary="Layers of each stage; [] shares them out",
        ),
        Option(
            name="balance_by",
            type=str,
            default="time",
            choices=("time", "size"),
            summary="Layers are shared out by measured time or by number of parameters",
        ),
    ),
    batch_norm_treatment="per_micro_batch",
    contract_options=({}, {"schedule": "gpipe"}, {"schedule": "interleaved"}, {"schedule": "zero_bubble"}),
    divides_state=lambda _options: True,
    create=lambda: Pipeline,
)
