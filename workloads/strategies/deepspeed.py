"""``deepspeed``: ZeRO of DeepSpeed: optimiser state, gradients and parameters split over ranks, by stage.

Our world launches it, torch's process group carries it, and our optimiser is handed to it, so nothing of DeepSpeed is
compiled. It keeps a single-precision copy of what a rank updates, whatever the model's precision.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from workloads.contract import Hardware, Topology
from workloads.registry import Option, Options, StrategyDeclaration
from workloads.strategies.shared.running_statistics import RunningStatistics

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from workloads.loaders.protocol import Batch
    from workloads.strategies.shared.protocol import Task

PARAMETERS = 3
"""The stage from which on parameters are split too."""


class DeepSpeed:
    """This rank's share of the training state; of the parameters too, in the last stage."""

    optimizer: torch.optim.Optimizer

    def __init__(self, task: Task) -> None:
        import torch

        from workloads.strategies.shared.under_autocast import under_autocast

        self._task = task
        self._without_gradients = torch.no_grad
        self._deepspeed = _imported(task)
        stage = int(task.options["stage"])  # type: ignore[arg-type]
        config = {
            # For its book-keeping only: batches come from our loader, already split.
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,  # it clips gradients to a norm of 1 when nobody says anything
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": stage,
                "overlap_comm": bool(task.options["overlap_comm"]),
                "reduce_bucket_size": int(task.options["bucket_elements"]),  # type: ignore[arg-type]
            },
        }
        self._module = task.module
        if stage == PARAMETERS:
            # One by one from the CPU: no device ever holds the whole model.
            self._deepspeed.zero.Init(module=self._module, config_dict_or_path=config, dtype=torch.float32)
            for buffer in self._module.buffers():
                buffer.data = buffer.data.to(task.device)
        self.optimizer = task.make_optimizer(self._module.parameters())
        # Its forward pass switches the run's autocast off, so the model brings its own.
        self._engine, self._zero, _, _ = self._deepspeed.initialize(
            model=under_autocast(task, self._module),
            optimizer=self.optimizer,
            config=config,
            dist_init_required=False,
        )
        self._engine.eval()  # the first step's change of mode must be one, for it freezes what must be frozen
        self._split = stage == PARAMETERS
        self._statistics = RunningStatistics(task, self._module)

    def train_step(self, batch: Batch) -> Tensor:
        self._task.set_training(self._module, True)
        loss = self._task.loss_sum(self._engine(batch.x), batch.y)
        if batch.num_local == 0:
            loss = loss * 0.0
        # As DDP does, ZeRO divides the summed gradients by the world size.
        self._engine.backward(loss * (self._task.world.size / batch.num_global))
        self._engine.step()
        self._statistics.differ = True
        return loss.detach()

    def logits(self, x: Tensor) -> Tensor:
        self._statistics.average()
        self._task.set_training(self._module, False)
        with self._without_gradients():  # inference mode would leave gathered parameters that no later step can train
            logits: Tensor = self._engine(x)
        return logits

    def state_dict(self) -> dict[str, Any]:
        self._statistics.average()
        keep = self._task.world.rank == 0
        parameters = list(self._module.parameters())
        states: dict[int, dict[str, Any]] = {}
        own = self.optimizer.state[self._shards[0]]
        for index, parameter in enumerate(parameters):
            whole = {key: self._whole(parameter, key) if value.ndim else value for key, value in own.items()}
            if keep:
                states[index] = {key: value.detach().to("cpu", copy=True) for key, value in whole.items()}
        with self._gathered():
            whole_model = self._module.state_dict() if keep else {}
            model = {name: tensor.to("cpu", copy=True) for name, tensor in whole_model.items()}
        if not keep:
            return {}
        group = {**self.optimizer.param_groups[0], "params": list(range(len(parameters)))}
        return {"model": model, "optimizer": {"state": states, "param_groups": [group]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        states = state["optimizer"]["state"]
        parameters = list(self._module.parameters())
        for key, like in states.get(0, {}).items():
            if like.ndim:
                # What the optimiser keeps is split as the parameters are; so each kind of it takes their place once.
                self._put({p: states[i][key] for i, p in enumerate(parameters)})
            for shard in self._shards:
                self.optimizer.state[shard][key] = shard.detach().clone() if like.ndim else like.clone()
        buffers = dict(self._module.named_buffers())
        for name, value in state["model"].items():
            if name in buffers:
                buffers[name].copy_(value)
        self._put({p: state["model"][name] for name, p in self._module.named_parameters()})
        self._statistics.differ = False

    def close(self) -> None:
        # It keeps groups of ranks for later runs in this process, which will have others.
        self._engine.destroy()
        self._deepspeed.comm.barrier()
        self._deepspeed.comm.destroy_process_group()

    @property
    def _shards(self) -> list[Tensor]:
        """What the optimiser updates on this rank: flat, and in single precision."""
        name = "fp32_partitioned_groups_flat" if self._split else "single_partition_of_fp32_groups"
        shards: list[Tensor] = getattr(self._zero, name)
        return shards

    def _whole(self, parameter: Tensor, key: str) -> Tensor:
        """What the optimiser keeps of one parameter, from all ranks. Collective."""
        whole: Tensor = self._deepspeed.utils.safe_get_full_optimizer_state(parameter, key)
        return whole.view(parameter.ds_shape if self._split else parameter.shape)  # type: ignore[attr-defined]

    def _put(self, values: Mapping[Tensor, Tensor]) -> None:
        """Give all parameters values, and what is made of them to the optimiser. Collective."""
        with self._gathered(modifier_rank=0):
            for parameter, value in values.items():
                if parameter.numel() == value.numel():  # of a split one, other ranks may hold nothing
                    parameter.data.copy_(value)
        self._zero.refresh_fp32_params()

    @contextlib.contextmanager
    def _gathered(self, modifier_rank: int | None = None) -> Iterator[None]:
        """Within, each rank has whole parameters; those of ``modifier_rank``, if any, are kept. Collective."""
        if not self._split:
            yield
            return
        with self._deepspeed.zero.GatheredParameters(list(self._module.parameters()), modifier_rank=modifier_rank):
            yield


def _imported(task: Task) -> Any:
    """DeepSpeed, told what it would ask its own launcher for."""
    if task.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    os.environ["LOCAL_RANK"] = str(task.device.index or 0)
    deepspeed = importlib.import_module("deepspeed")
    if task.device.type == "cpu":
        # An all-reduce through shared memory, which it would compile at every site anew; gloo does the same.
        importlib.import_module("deepspeed.ops").__dict__["__compatible_ops__"] = {}
    else:
        # It asks NVML for free memory by the numbers in CUDA_VISIBLE_DEVICES, where local mode and MIG have UUIDs.
        # Without NVML it asks torch.
        importlib.import_module("deepspeed.accelerator.cuda_accelerator").__dict__["pynvml"] = None
    return deepspeed


def _unsupported_hardware(_hardware: Hardware, options: Options) -> str:
    stage = options["stage"]
    return "" if stage in (1, 2, PARAMETERS) else f"ZeRO has the stages 1, 2 and 3, and stage is {stage}"


def _unsupported_training(train: Mapping[str, Any], _options: Options) -> str:
    if train["channels_last"]:
        return "ZeRO keeps parameters in flat buffers: no channels_last"
    if train["precision"] == "fp64":
        return "ZeRO updates parameters in single precision, so fp64 would be that in name only"
    return ""


DECLARATION = StrategyDeclaration(
    name="deepspeed",
    summary="DeepSpeed's ZeRO: one process per device; optimiser state, gradients and parameters split, by stage.",
    framework="torch",
    topology=lambda _options: Topology.PROCESS_PER_DEVICE,
    unsupported_hardware=_unsupported_hardware,
    unsupported_training=_unsupported_training,
    unsupported_compile=lambda _how, _options: "ZeRO's hooks gather and reduce between the layers of every step",
    splits_batch=True,
    packages=("torch", "deepspeed"),
    options=(
        Option(
            name="stage",
            type=int,
            default=2,
            minimum=1,
            summary="1 splits the optimiser's state, 2 also gradients, 3 also parameters",
        ),
        Option(
            name="overlap_comm",
            type=bool,
            default=False,
            summary="Send gradients while the backward pass goes on",
        ),
        Option(
            name="bucket_elements",
            type=int,
            default=500_000_000,
            minimum=1,
            summary="Gradients are reduced in buckets of so many elements",
        ),
    ),
    batch_norm_treatment="per_rank",
    contract_options=({}, {"stage": 1}, {"stage": 3}),
    divides_state=lambda options: options["stage"] == PARAMETERS,
    create=lambda: DeepSpeed,
)
