"""``tf_mirrored``: TensorFlow's MirroredStrategy: one process, a replica on each device, gradients summed in the step.

Each replica takes its part of the batch and normalises over it; running statistics are its own, and averaged before an
evaluation or a checkpoint, as in ``ddp``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workloads.contract import Hardware, Topology
from workloads.registry import TENSORFLOW, Option, Options, StrategyDeclaration
from workloads.strategies.tf_eager import TfEager, unsupported_compile, unsupported_training

if TYPE_CHECKING:
    from workloads.strategies.shared.keras_protocol import KerasTask


class TfMirrored(TfEager):
    """The whole model on each of several replicas."""

    def _distribution(self, task: KerasTask) -> Any:
        import tensorflow as tf

        ways = {
            "auto": lambda: None,
            "nccl": tf.distribute.NcclAllReduce,
            "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
            "one_device": tf.distribute.ReductionToOneDevice,
        }
        way = str(task.options["all_reduce"])
        if way == "auto" and task.devices[0].startswith("/CPU"):
            way = "one_device"  # TensorFlow's own choice for CPUs fails in a process that has trained like this before
        return tf.distribute.MirroredStrategy(list(task.devices), cross_device_ops=ways[way]())


def _unsupported_hardware(hardware: Hardware, options: Options) -> str:
    if hardware.nodes > 1:
        return f"tf_mirrored is one process, which cannot drive the devices of {hardware.nodes} nodes"
    if options["all_reduce"] == "nccl" and hardware.is_cpu:
        return 'all_reduce = "nccl" is for GPUs'
    return ""


DECLARATION = StrategyDeclaration(
    name="tf_mirrored",
    summary="TensorFlow's MirroredStrategy: one process with a replica on each device, gradients summed.",
    framework=TENSORFLOW,
    topology=lambda _options: Topology.ONE_PROCESS,
    unsupported_hardware=_unsupported_hardware,
    unsupported_training=unsupported_training,
    unsupported_compile=unsupported_compile,
    splits_batch=True,
    packages=("tensorflow|tensorflow-cpu",),
    options=(
        Option(
            name="all_reduce",
            type=str,
            default="auto",
            choices=("auto", "nccl", "hierarchical_copy", "one_device"),
            summary="How gradients are summed; auto is NCCL for GPUs, and one device for CPUs",
        ),
    ),
    batch_norm_treatment="per_rank",
    create=lambda: TfMirrored,
)
