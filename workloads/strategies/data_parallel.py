"""``data_parallel``: torch's nn.DataParallel: one process, the model copied to all its GPUs in every step.

``torch.chunk`` splits the batch, so an odd or small one may leave a GPU without samples. Each GPU's batch norm sees its
own part; nn.DataParallel keeps the running statistics of the first GPU only.
"""

from __future__ import annotations

from workloads.contract import Hardware, Topology
from workloads.lazy import lazy_imports
from workloads.registry import Options, StrategyDeclaration
from workloads.strategies.shared import limits
from workloads.strategies.shared.compiled_steps import Model
from workloads.strategies.shared.protocol import Task
from workloads.strategies.shared.torch_strategy import TorchStrategy, under_autocast

with lazy_imports(__name__):
    from torch import Tensor, nn


class DataParallel(TorchStrategy):
    """The model on the first GPU, and a wrapper that copies it to the others."""

    inference_mode = False

    def __init__(self, task: Task) -> None:
        module = task.module.to(task.device)
        # torch/nn/parallel/parallel_apply.py enters autocast in each thread without a dtype: float16.
        replicas = nn.DataParallel(under_autocast(task, module), list(task.devices)).eval()
        super().__init__(task, module, model=replicas, evaluated=replicas)

    def compute(self, model: Model, x: Tensor) -> Tensor:
        return model(x)


def _unsupported_hardware(hardware: Hardware, _options: Options) -> str:
    if hardware.is_cpu:
        return "data_parallel needs GPUs: on a CPU, nn.DataParallel calls the module directly, as eager does"
    return limits.one_node("data_parallel", hardware, "GPUs")


DECLARATION = StrategyDeclaration(
    name="data_parallel",
    summary="nn.DataParallel: one process that copies the model to all its GPUs in every step. GPUs only.",
    topology=lambda _options: Topology.ONE_PROCESS,
    unsupported_hardware=_unsupported_hardware,
    unsupported_compile=lambda _how, _options: (
        "nn.DataParallel copies the model in every step, and compiled code and CUDA graphs belong to one copy"
    ),
    splits_batch=True,
    batch_norm_treatment="per_gpu",
    create=lambda: DataParallel,
)
