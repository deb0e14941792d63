"""The devices that TensorFlow computes on, whether they are what was planned, and what the run saw."""

from __future__ import annotations

import os

import keras
import tensorflow as tf

from workloads.errors import JobError, WrongHardwareError
from workloads.job.context import Job
from workloads.job.world import visible_gpus
from workloads.provenance import code_snapshot, job_facts


def choose(job: Job) -> tuple[str, ...]:
    """The run's devices, as TensorFlow names them; nothing may have used TensorFlow before.

    Raises:
        WrongHardwareError: it sees fewer GPUs than were planned.
    """
    count = job.spec.train.hardware.devices
    if job.spec.expect.gpus_per_node:
        return _gpus(count)
    tf.config.set_visible_devices([], "GPU")
    _cores(job.spec.expect.cpus_per_rank)
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
    for gpu in found:
        tf.config.experimental.set_memory_growth(gpu, True)
    return tuple(f"/GPU:{i}" for i in range(count))


def _cores(count: int) -> None:
    if tf.config.threading.get_intra_op_parallelism_threads() != count:
        tf.config.threading.set_intra_op_parallelism_threads(count)


def _logical_cpus(count: int) -> None:
    """One process may stand for several CPU devices."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    made = tf.config.get_logical_device_configuration(cpu)
    if made is not None and len(made) >= count:
        return
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    except RuntimeError as error:
        raise JobError(f"TensorFlow cannot make {count} CPU devices", why=str(error)) from error


def memory_bytes(devices: tuple[str, ...]) -> tuple[int, int] | None:
    """(allocated now, peak) of the GPU that has most of each; None on CPUs."""
    if not devices[0].startswith("/GPU"):
        return None
    found = [tf.config.experimental.get_memory_info(device[1:]) for device in devices]
    return max(f["current"] for f in found), max(f["peak"] for f in found)


def describe_world(job: Job, devices: tuple[str, ...], initial_weights: str) -> None:
    """Put on record what the run sees.

    Args:
        initial_weights: where they come from: ``torch`` or ``keras``.
    """
    gpus = (visible_gpus() or []) if devices[0].startswith("/GPU") else []
    about = job_facts.collect(code_snapshot.run_code_digest(job.spec))
    result = job.result
    result.world_size = job.world.size
    result.device_name = gpus[0].name if gpus else about["cpu_model"]
    result.devices_seen = len(tf.config.list_physical_devices("GPU")) if devices[0].startswith("/GPU") else None
    result.cpus_seen = len(os.sched_getaffinity(0))
    build = tf.sysconfig.get_build_info()
    result.provenance = about | {
        "tensorflow": {
            "version": tf.__version__,
            "keras": keras.__version__,
            "cuda": build.get("cuda_version"),
            "cudnn": build.get("cudnn_version"),
            "threads": tf.config.threading.get_intra_op_parallelism_threads(),
        },
        "initial_weights": initial_weights,
        "gpus": [{"name": g.name, "memory_bytes": g.memory_bytes, "uuid": g.uuid} for g in gpus],
        "launcher": job.world.launcher.value,
        "nodes": job.world.nodes,
        "submitted_code_digest": job.spec.code_digest,
    }
    job.events.write(
        "world",
        world_size=job.world.size,
        nodes=job.world.nodes,
        launcher=job.world.launcher.value,
        device=", ".join(devices),
        device_name=result.device_name,
        devices_seen=result.devices_seen,
        cpus_seen=result.cpus_seen,
        initial_weights=initial_weights,
    )
