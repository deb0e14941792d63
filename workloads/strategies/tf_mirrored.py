"""``tf_mirrored``: TensorFlow's MirroredStrategy: one process, a replica on each device, gradients summed in the step.

Each replica trains on its part of the batch, which its batch norm sees; running statistics are averaged over replicas
before an evaluation or a checkpoint, as in ``ddp``.
"""

from __future__ import annotations

from typing import Any

from workloads.contract import Hardware
from workloads.lazy import lazy_imports
from workloads.registry import Option, Options
from workloads.strategies.shared import limits
from workloads.strategies.shared.keras_protocol import KerasTask
from workloads.strategies.tf_eager import TfEager

with lazy_imports(__name__):
    import tensorflow as tf


class TfMirrored(TfEager):
    """The whole model on each of several replicas."""

    def make_distribution(self, task: KerasTask) -> Any:
        makers = {
            "auto": lambda: None,
            "nccl": tf.distribute.NcclAllReduce,
            "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
            "one_device": tf.distribute.ReductionToOneDevice,
        }
        all_reduce = str(task.options["all_reduce"])
        if all_reduce == "auto" and task.devices[0].startswith("/CPU"):
            # TensorFlow 2.21's own choice for CPUs fails in a process that has trained with it before.
            all_reduce = "one_device"
        return tf.distribute.MirroredStrategy(list(task.devices), cross_device_ops=makers[all_reduce]())


def _unsupported_hardware(hardware: Hardware, options: Options) -> str:
    if why := limits.one_node("tf_mirrored", hardware):
        return why
    return 'all_reduce = "nccl" is for GPUs' if options["all_reduce"] == "nccl" and hardware.is_cpu else ""


DECLARATION = limits.tensorflow_declaration(
    name="tf_mirrored",
    summary="TensorFlow's MirroredStrategy: one process with a replica on each device, gradients summed.",
    unsupported_hardware=_unsupported_hardware,
    splits_batch=True,
    options=(
        Option(
            "all_reduce",
            "auto",
            "How gradients are summed; auto is NCCL for GPUs, and one device for CPUs",
            choices=("auto", "nccl", "hierarchical_copy", "one_device"),
        ),
    ),
    batch_norm_treatment="per_rank",
    create=lambda: TfMirrored,
)
