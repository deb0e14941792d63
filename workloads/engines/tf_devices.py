"""The devices that a run computes on with TensorFlow, whether they are the planned ones, and what it sees."""

from __future__ import annotations

import os

import keras
import tensorflow as tf

from workloads.engines.world_report import record_world
from workloads.errors import JobError, WrongHardwareError
from workloads.job.context import Job
from workloads.job.world import visible_gpus


def choose(job: Job) -> tuple[str, ...]:
    """Return TensorFlow's names of the run's devices. Call it before anything else uses TensorFlow.

    Raises:
        WrongHardwareError: TensorFlow sees fewer GPUs than planned.
    """
    count = job.spec.train.hardware.devices
    if job.spec.expect.gpus_per_node:
        return _gpus(count)
    tf.config.set_visible_devices([], "GPU")
    if tf.config.threading.get_intra_op_parallelism_threads() != job.spec.expect.cpus_per_rank:
        tf.config.threading.set_intra_op_parallelism_threads(job.spec.expect.cpus_per_rank)
    _logical_cpus(count)
    return tuple(f"/CPU:{i}" for i in range(count))


def _gpus(count: int) -> tuple[str, ...]:
    found = tf.config.list_physical_devices("GPU")
    if len(found) < count:
        built_for = tf.sysconfig.get_build_info().get("cuda_version")
        raise WrongHardwareError(
            f"TensorFlow sees {len(found)} GPUs, {count} planned",
            why=f"TensorFlow {tf.__version__} was built for {f'CUDA {built_for}' if built_for else 'CPUs'}, "
            f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}",
            hint="pip install 'tensorflow[and-cuda]' where jobs run, and compare its CUDA with the driver's",
        )
    # Otherwise TensorFlow maps nearly all memory of each GPU (its guide "Use a GPU"), and peak memory means nothing.
    for gpu in found:
        tf.config.experimental.set_memory_growth(gpu, True)
    return tuple(f"/GPU:{i}" for i in range(count))


def _logical_cpus(count: int) -> None:
    """Make logical CPU devices: one process may stand for several."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    made = tf.config.get_logical_device_configuration(cpu)
    if made is not None and len(made) >= count:
        return
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    # "Virtual devices cannot be modified after being initialized": a run before this one used fewer.
    except RuntimeError as error:
        raise JobError(f"TensorFlow cannot make {count} CPU devices", why=str(error)) from error


def memory_bytes(devices: tuple[str, ...]) -> tuple[int, int] | None:
    """Return (allocated now, peak) of the GPU with most of each; None on CPUs."""
    if not devices[0].startswith("/GPU"):
        return None
    found = [tf.config.experimental.get_memory_info(device[1:]) for device in devices]
    return max(f["current"] for f in found), max(f["peak"] for f in found)


def describe_world(job: Job, devices: tuple[str, ...], initial_weights: str) -> None:
    """Record what the run sees.

    Args:
        initial_weights: where they come from: ``torch`` or ``keras``.
    """
    on_gpu = devices[0].startswith("/GPU")
    gpus = (visible_gpus() or []) if on_gpu else []
    build = tf.sysconfig.get_build_info()
    record_world(
        job,
        device=", ".join(devices),
        gpus=gpus,
        own_gpu=gpus[0] if gpus else None,
        devices_seen=len(tf.config.list_physical_devices("GPU")) if on_gpu else None,
        cpus_seen=len(os.sched_getaffinity(0)),
        software={
            "tensorflow": {
                "version": tf.__version__,
                "keras": keras.__version__,
                "cuda": build.get("cuda_version"),
                "cudnn": build.get("cudnn_version"),
                "threads": tf.config.threading.get_intra_op_parallelism_threads(),
            },
            "initial_weights": initial_weights,
        },
        initial_weights=initial_weights,
    )
