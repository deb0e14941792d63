"""``deepspeed``: ZeRO of DeepSpeed: optimizer state, gradients and parameters sharded over ranks, by stage.

Our launcher starts the ranks, torch's process group connects them, and DeepSpeed is given our optimizer, so it compiles
nothing. It keeps a single-precision copy of the parameters that a rank updates, whatever the model's precision.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Mapping
from typing import Any

from workloads.contract import Topology
from workloads.lazy import lazy_imports
from workloads.registry import Option, Options, StrategyDeclaration
from workloads.strategies.shared.compiled_steps import Model
from workloads.strategies.shared.protocol import Task
from workloads.strategies.shared.torch_strategy import ReplicaStrategy, under_autocast

with lazy_imports(__name__):
    import torch
    from torch import Tensor

SHARDED_PARAMETERS = 3
"""The ZeRO stage that shards parameters too."""


class DeepSpeed(ReplicaStrategy):
    """This rank's shard of the training state; of the parameters too, in stage 3."""

    inference_mode = False
    """Parameters gathered in inference mode stay inference tensors, which a later training step cannot use."""

    def __init__(self, task: Task) -> None:
        self._deepspeed = _import_deepspeed(task)
        stage = int(task.options["stage"])  # type: ignore[arg-type]
        config = {
            # DeepSpeed requires a batch size for its own reports; our loader splits the batches.
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            # Its default is 1.0 (deepspeed/runtime/constants.py, GRADIENT_CLIPPING_DEFAULT).
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": stage,
                "overlap_comm": bool(task.options["overlap_comm"]),
                "reduce_bucket_size": int(task.options["bucket_elements"]),  # type: ignore[arg-type]
            },
        }
        self._shards_parameters = stage == SHARDED_PARAMETERS
        if self._shards_parameters:
            # One by one from the CPU, so that no device ever holds the whole model.
            self._deepspeed.zero.Init(module=task.module, config_dict_or_path=config, dtype=torch.float32)
            for buffer in task.module.buffers():
                buffer.data = buffer.data.to(task.device)
        optimizer = task.make_optimizer(task.module.parameters())
        # DeepSpeedEngine.forward disables an outer autocast, so the model enters its own.
        self._engine, self._zero, _, _ = self._deepspeed.initialize(
            model=under_autocast(task, task.module), optimizer=optimizer, config=config, dist_init_required=False
        )
        # task.set_training acts on a change of mode only, and the first one freezes batch norm.
        self._engine.eval()
        super().__init__(task, task.module, model=self._engine, evaluated=self._engine, optimizer=optimizer)

    def set_training(self, training: bool) -> None:
        self.task.set_training(self.module, training)

    def clear_gradients(self) -> None:
        """Nothing to do: DeepSpeed drops them in its update."""

    def compute(self, model: Model, x: Tensor) -> Tensor:
        return model(x)

    def backward(self, loss: Tensor, weight: float) -> None:
        self._engine.backward(loss * weight)

    def update(self) -> None:
        self._engine.step()

    def state_dict(self) -> dict[str, Any]:
        self.average_statistics()
        keep = self.task.world.rank == 0
        parameters = list(self.module.parameters())
        states: dict[int, dict[str, Any]] = {}
        own = self.optimizer.state[self._shards[0]]
        for index, parameter in enumerate(parameters):
            whole = {key: self._whole(parameter, key) if value.ndim else value for key, value in own.items()}
            if keep:
                states[index] = {key: value.detach().to("cpu", copy=True) for key, value in whole.items()}
        with self._gathered():
            whole_model = self.module.state_dict() if keep else {}
            model = {name: tensor.to("cpu", copy=True) for name, tensor in whole_model.items()}
        if not keep:
            return {}
        group = {**self.optimizer.param_groups[0], "params": list(range(len(parameters)))}
        return {"model": model, "optimizer": {"state": states, "param_groups": [group]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        states = state["optimizer"]["state"]
        parameters = list(self.module.parameters())
        for key, like in states.get(0, {}).items():
            if like.ndim:
                # ZeRO shards momenta as it shards parameters, so each kind of momentum passes through them once.
                self._set_parameters({p: states[i][key] for i, p in enumerate(parameters)})
            for shard in self._shards:
                self.optimizer.state[shard][key] = shard.detach().clone() if like.ndim else like.clone()
        buffers = dict(self.module.named_buffers())
        for name, value in state["model"].items():
            if name in buffers:
                buffers[name].copy_(value)
        self._set_parameters({p: state["model"][name] for name, p in self.module.named_parameters()})
        self.statistics_differ = False

    def close(self) -> None:
        # deepspeed.comm keeps process groups in module variables; the next run in this process makes its own.
        self._engine.destroy()
        self._deepspeed.comm.barrier()
        self._deepspeed.comm.destroy_process_group()

    @property
    def _shards(self) -> list[Tensor]:
        """The flat single-precision tensors that the optimizer updates on this rank."""
        name = "fp32_partitioned_groups_flat" if self._shards_parameters else "single_partition_of_fp32_groups"
        shards: list[Tensor] = getattr(self._zero, name)
        return shards

    def _whole(self, parameter: Tensor, key: str) -> Tensor:
        """Gather one entry of the optimizer state of a parameter. Collective."""
        whole: Tensor = self._deepspeed.utils.safe_get_full_optimizer_state(parameter, key)
        return whole.view(parameter.ds_shape if self._shards_parameters else parameter.shape)  # type: ignore[attr-defined]

    def _set_parameters(self, values: Mapping[Tensor, Tensor]) -> None:
        """Set all parameters, and the optimizer's single-precision copies. Collective."""
        with self._gathered(modifier_rank=0):
            for parameter, value in values.items():
                if parameter.numel() == value.numel():  # of a sharded one, only modifier_rank holds all
                    parameter.data.copy_(value)
        self._zero.refresh_fp32_params()

    def _gathered(self, modifier_rank: int | None = None) -> Any:
        """Return a context with whole parameters on each rank; changes on ``modifier_rank`` stay. Collective."""
        if not self._shards_parameters:
            return contextlib.nullcontext()
        return self._deepspeed.zero.GatheredParameters(list(self.module.parameters()), modifier_rank=modifier_rank)


def _import_deepspeed(task: Task) -> Any:
    """Import DeepSpeed with the settings that its own launcher would make."""
    if task.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    os.environ["LOCAL_RANK"] = str(task.device.index or 0)
    deepspeed = importlib.import_module("deepspeed")
    if task.device.type == "cpu":
        # Otherwise deepspeed.comm compiles its shared-memory all-reduce (ShareMemCommBuilder) on each machine.
        importlib.import_module("deepspeed.ops").__dict__["__compatible_ops__"] = {}
    else:
        # CUDA_Accelerator.available_memory reads CUDA_VISIBLE_DEVICES as numbers for NVML, but local mode and MIG have
        # UUIDs there. Without pynvml it asks torch.
        importlib.import_module("deepspeed.accelerator.cuda_accelerator").__dict__["pynvml"] = None
    return deepspeed


def _unsupported_training(train: Mapping[str, Any], _options: Options) -> str:
    if train["channels_last"]:
        return "ZeRO keeps parameters in flat buffers, without channels_last"
    if train["precision"] == "fp64":
        return "ZeRO updates parameters in single precision, so it cannot train in fp64"
    return ""


DECLARATION = StrategyDeclaration(
    name="deepspeed",
    summary="DeepSpeed's ZeRO: one process per device; optimizer state, gradients and parameters sharded, by stage.",
    topology=lambda _options: Topology.PROCESS_PER_DEVICE,
    unsupported_hardware=lambda _hardware, options: (
        "" if options["stage"] in (1, 2, 3) else f"ZeRO has stages 1, 2 and 3, and stage is {options['stage']}"
    ),
    unsupported_training=_unsupported_training,
    unsupported_compile=lambda _how, _options: (
        "ZeRO's hooks gather and reduce between layers, outside of compiled code and CUDA graphs"
    ),
    splits_batch=True,
    packages=("torch", "deepspeed"),
    options=(
        Option("stage", 2, "1 shards the optimizer state, 2 also gradients, 3 also parameters", minimum=1),
        Option("overlap_comm", False, "Send gradients while the backward pass goes on"),
        Option("bucket_elements", 500_000_000, "Gradients are reduced in buckets of so many elements", minimum=1),
    ),
    batch_norm_treatment="per_rank",
    contract_options=({}, {"stage": 1}, {"stage": 3}),
    divides_state=lambda options: options["stage"] == SHARDED_PARAMETERS,
    create=lambda: DeepSpeed,
)
