"""(run, topology of its strategy, target) -> ResourceShape, or why the target cannot run it.

All arithmetic of nodes, ranks, GPUs, cores, memory and queues is here. Imports no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from orchestrator.cluster.profile import ClusterProfile, ClusterQueue, CpuNodes, GpuNodes
from orchestrator.cluster.sbatch_options import CpusBy, Launcher, MemStyle
from orchestrator.cluster.value_types import WHOLE_NODE
from orchestrator.units import format_memory, format_time_limit
from workloads.contract import Execution, Hardware, ResourceShape, Topology, TrainConfig

if TYPE_CHECKING:
    from workloads.registry import StrategyDeclaration

LOCAL = "local"
"""The target that is this machine."""


class NamedGpu(Protocol):
    """A GPU of a machine."""

    @property
    def name(self) -> str: ...


class Devices(Protocol):
    """Devices of a machine (see ``orchestrator.backends.local.machine``)."""

    @property
    def gpus(self) -> Sequence[NamedGpu]:
        """In the order in which runs get them."""

    @property
    def cores(self) -> Sequence[int]:
        """Numbers of the usable cores."""


class _CannotRunError(Exception):
    """Why a target cannot run a run; the plan shows its text."""


def default_cpus(profile: ClusterProfile | None) -> Callable[[Hardware, int], int]:
    """Return (hardware, ranks) -> cores of a run whose ``cpus`` nobody set.

    On a cluster ``cpus_per_gpu`` for each GPU or ``cpus_per_rank`` for each CPU rank, on this machine one per rank.
    """

    def cpus(hardware: Hardware, ranks: int) -> int:
        nodes = profile.nodes(hardware.kind) if profile is not None else None
        if isinstance(nodes, GpuNodes):
            return nodes.cpus_per_gpu * hardware.devices
        return nodes.cpus_per_rank * ranks if isinstance(nodes, CpuNodes) else ranks

    return cpus


def fitting_gpus(gpus: Sequence[NamedGpu], kind: str) -> list[int]:
    """Indexes of the GPUs of a kind: ``gpu`` is any, other kinds are part of the GPU's name (``h100``)."""
    return [i for i, gpu in enumerate(gpus) if kind == "gpu" or kind.lower() in gpu.name.lower()]


def place(
    train: TrainConfig,
    execution: Execution,
    declaration: StrategyDeclaration,
    profile: ClusterProfile | None,
    machine: Devices | None,
) -> ResourceShape | str:
    """Return the resources of a run on its target, or the reason why the target cannot run it.

    The target is the cluster of ``profile``, or ``machine`` where that is None.
    """
    hardware = train.hardware
    topology = declaration.topology(declaration.options_with_defaults(train.strategy_options))
    try:
        per_device = topology is Topology.PROCESS_PER_DEVICE
        if hardware.nodes > 1 and not per_device:
            raise _CannotRunError(
                f"{train.strategy} is one process, which cannot use the devices of {hardware.nodes} nodes"
            )
        ranks_per_node = hardware.devices_per_node if per_device else 1
        ranks = hardware.nodes * ranks_per_node
        if train.cpus % ranks:
            raise _CannotRunError(
                f"{train.cpus} cores cannot be shared evenly by {ranks} ranks; set cpus to a multiple of {ranks}"
            )
        gpus_per_node = 0 if hardware.is_cpu else hardware.devices_per_node
        shape = ResourceShape(
            target=LOCAL,
            gpu="" if hardware.is_cpu else hardware.kind,
            nodes=hardware.nodes,
            ranks_per_node=ranks_per_node,
            gpus_per_node=gpus_per_node,
            ask_gpus_per_node=gpus_per_node,
            cpus_per_rank=train.cpus // ranks,
            mem_bytes=execution.mem_bytes,
            time_limit_s=execution.time_limit_s,
        )
        if profile is not None:
            return _on_cluster(profile, hardware, shape)
        assert machine is not None, "a run has a target"
        return _on_machine(machine, hardware, shape)
    except _CannotRunError as error:
        return str(error)


def _on_machine(machine: Devices, hardware: Hardware, shape: ResourceShape) -> ResourceShape:
    if shape.nodes > 1:
        raise _CannotRunError(f"{hardware} needs {shape.nodes} nodes, and this is one machine")
    if hardware.is_cpu:
        if shape.cpus_per_node > len(machine.cores):
            raise _CannotRunError(f"it needs {shape.cpus_per_node} cores, and this machine has {len(machine.cores)}")
    elif shape.gpus > len(fitting_gpus(machine.gpus, hardware.kind)):
        names = ", ".join(dict.fromkeys(gpu.name for gpu in machine.gpus))
        has = f"{len(machine.gpus)} ({names})" if names else "none"
        raise _CannotRunError(f"{hardware} needs {shape.gpus} such GPUs, and this machine has {has}")
    return shape


def _on_cluster(profile: ClusterProfile, hardware: Hardware, shape: ResourceShape) -> ResourceShape:
    nodes = profile.nodes(hardware.kind)
    if nodes is None:
        raise _CannotRunError(
            f"cluster {profile.name} has no {hardware.kind}; it has: {', '.join(profile.node_tables)}"
        )
    if profile.launcher is Launcher.TORCHRUN and shape.nodes > 1:
        raise _CannotRunError("launcher torchrun starts the ranks of one node; several nodes need launcher srun")
    if profile.launcher is Launcher.NONE and shape.ranks > 1:
        raise _CannotRunError("launcher none starts one process; several ranks need launcher srun or torchrun")
    shape = replace(shape, target=profile.name)
    if isinstance(nodes, GpuNodes):
        shape = replace(
            shape,
            gpu=profile.gpu_kind(hardware.kind),
            gpu_name=nodes.expect_name,
            gpu_memory_gb=nodes.expect_mem_gb,
            allow_mig=nodes.mig,
        )
        _check_gpus(profile, nodes, shape)
        shape = replace(shape, ask_gpus_per_node=nodes.asked_gpus(shape.gpus_per_node))
        if nodes.cpus_by is CpusBy.GPU and shape.cpus_per_node % shape.ask_gpus_per_node:
            gpus = shape.ask_gpus_per_node
            raise _CannotRunError(
                f"{shape.cpus_per_node} cores cannot be shared evenly by {gpus} GPUs; set cpus to a multiple of {gpus}"
            )
    if nodes.node_cores and shape.cpus_per_node > nodes.node_cores:
        raise _CannotRunError(
            f"it needs {shape.cpus_per_node} cores per node, and {hardware.kind} nodes have {nodes.node_cores}"
        )
    queue = _first_queue(profile, nodes, shape)
    return replace(shape, partition=queue.partition, qos=queue.qos, mem_bytes=_memory(profile, nodes, shape))


def _check_gpus(profile: ClusterProfile, nodes: GpuNodes, shape: ResourceShape) -> None:
    kind, used = shape.gpu, shape.gpus_per_node
    if used > nodes.node_gpus:
        have = f"{nodes.node_gpus} GPU{'s' if nodes.node_gpus > 1 else ''}"
        raise _CannotRunError(f"it needs {used} GPUs per node, and {kind} nodes of {profile.name} have {have}")
    if nodes.mig and used > 1:
        # NVIDIA's MIG user guide, "CUDA Device Enumeration": a CUDA process enumerates a single MIG instance.
        raise _CannotRunError(f"{kind} is a MIG slice: a process sees one slice, so slices cannot train together")
    default = profile.nodes("gpu")
    if isinstance(default, GpuNodes) and nodes.arch != default.arch and not nodes.python:
        raise _CannotRunError(
            f"{kind} nodes are {nodes.arch}: they need an interpreter of their own "
            f"(python in [cluster.{profile.name}.gpu.{kind}])"
        )


def _memory(profile: ClusterProfile, nodes: CpuNodes | GpuNodes, shape: ResourceShape) -> int | None:
    """Memory on each node: what the run sets, else the profile's share for each GPU (or CPU rank) that it holds."""
    wanted = shape.mem_bytes
    if nodes.mem_style is MemStyle.NONE:
        if wanted is not None:
            raise _CannotRunError(f"cluster {profile.name} does not allow memory requests; remove mem")
        return None
    if wanted is None:
        share = nodes.mem_per_gpu_bytes if isinstance(nodes, GpuNodes) else nodes.mem_per_rank_bytes
        if share is None or share == WHOLE_NODE:
            return share
        wanted = share * (shape.ask_gpus_per_node or shape.ranks_per_node)
    if nodes.node_mem_bytes and wanted > nodes.node_mem_bytes:
        have = format_memory(nodes.node_mem_bytes)
        raise _CannotRunError(f"it needs {format_memory(wanted)} of memory per node, and nodes have {have}")
    return wanted


def queues(profile: ClusterProfile, shape: ResourceShape) -> tuple[ClusterQueue, ...]:
    """Every queue that accepts runs of a shape, best first; none where the site has no queues."""
    nodes = profile.nodes(shape.node_kind)
    assert nodes is not None, f"a shape of cluster {profile.name} has nodes there"
    return tuple(queue for queue in nodes.queue if not _rejection(queue, profile, shape))


def _first_queue(profile: ClusterProfile, nodes: CpuNodes | GpuNodes, shape: ResourceShape) -> ClusterQueue:
    """The first queue that accepts a job; a site without queues accepts every job."""
    if not nodes.queue:
        return ClusterQueue()
    if accepting := queues(profile, shape):
        return accepting[0]
    rejections = "; ".join(f"{queue} {_rejection(queue, profile, shape)}" for queue in nodes.queue)
    limit = format_time_limit(shape.time_limit_s)
    raise _CannotRunError(f"no {shape.node_kind} queue accepts a job of {limit}: {rejections}")


def _rejection(queue: ClusterQueue, profile: ClusterProfile, shape: ResourceShape) -> str:
    """Why a queue does not accept a job; empty where it does."""
    if queue.preemptable and not profile.allow_preemptable:
        return "is preemptable (allow_preemptable = false)"
    if queue.max_time_s and shape.time_limit_s > queue.max_time_s:
        return f"ends jobs after {format_time_limit(queue.max_time_s)}"
    for limit, used, what in (
        (queue.max_nodes, shape.nodes, "nodes"),
        (queue.max_gpus, shape.gpus, "GPUs"),
        (queue.max_cpus, shape.nodes * shape.cpus_per_node, "cores"),
    ):
        if limit and used > limit:
            return f"allows at most {limit} {what}"
    return ""
