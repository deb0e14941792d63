"""(what a run needs, how its strategy maps processes to devices, the target) -> ResourceShape, or why it cannot be.

All arithmetic of nodes, ranks, GPUs, cores, memory and queues is here and nowhere else. Imports no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """A GPU of a machine, as far as it matters here."""

    @property
    def name(self) -> str:
        """Such as ``NVIDIA A100-SXM4-80GB``."""


class Devices(Protocol):
    """What a machine offers (see ``orchestrator.backends.local.machine``)."""

    @property
    def gpus(self) -> Sequence[NamedGpu]:
        """In the order in which they are handed out."""

    @property
    def cores(self) -> Sequence[int]:
        """Usable core numbers."""


class _RefusedError(Exception):
    """Why a run cannot be placed; its text reaches the plan."""


def default_cpus(profile: ClusterProfile | None) -> Callable[[Hardware, int], int]:
    """Cores of a run that names none, from its hardware and its number of ranks.

    On a cluster ``cpus_per_gpu`` of each GPU or ``cpus_per_rank`` of each CPU rank, on this machine one for each rank.
    """

    def cpus(hardware: Hardware, ranks: int) -> int:
        nodes = profile.nodes(hardware.kind) if profile is not None else None
        if isinstance(nodes, GpuNodes):
            return nodes.cpus_per_gpu * hardware.devices
        return nodes.cpus_per_rank * ranks if isinstance(nodes, CpuNodes) else ranks

    return cpus


def fitting_gpus(gpus: Sequence[NamedGpu], kind: str) -> list[int]:
    """Positions of the GPUs of a kind: ``gpu`` is any, other kinds are part of the GPU's name (``h100``)."""
    return [i for i, gpu in enumerate(gpus) if kind == "gpu" or kind.lower() in gpu.name.lower()]


def shape(
    train: TrainConfig,
    execution: Execution,
    declaration: StrategyDeclaration,
    profile: ClusterProfile | None,
    machine: Devices | None,
) -> ResourceShape | str:
    """What a run occupies on its target, or the reason why the target cannot hold it.

    Args:
        train: the run.
        execution: its limits.
        declaration: of its strategy.
        profile: the cluster; None is this machine.
        machine: this machine; needed when ``profile`` is None.
    """
    hardware = train.hardware
    options = declaration.options_with_defaults(train.strategy_options)
    try:
        ranks_per_node = _ranks_per_node(hardware, declaration.topology(options), train.strategy)
        cpus_per_rank = _cpus_per_rank(train.cpus, hardware.nodes * ranks_per_node)
        if profile is not None:
            return _on_cluster(profile, hardware, execution, ranks_per_node, cpus_per_rank)
        assert machine is not None, "a run has a target"
        return _on_machine(machine, hardware, execution, ranks_per_node, cpus_per_rank)
    except _RefusedError as refusal:
        return str(refusal)


def _ranks_per_node(hardware: Hardware, topology: Topology, strategy: str) -> int:
    if topology is Topology.PROCESS_PER_DEVICE:
        return hardware.devices_per_node
    if hardware.nodes > 1:
        raise _RefusedError(f"{strategy} is one process, which cannot drive the devices of {hardware.nodes} nodes")
    return 1


def _cpus_per_rank(cpus: int, ranks: int) -> int:
    if cpus % ranks:
        raise _RefusedError(f"{cpus} cores cannot be shared evenly by {ranks} ranks; set cpus to a multiple of {ranks}")
    return cpus // ranks


def _on_machine(
    machine: Devices, hardware: Hardware, execution: Execution, ranks_per_node: int, cpus_per_rank: int
) -> ResourceShape:
    if hardware.nodes > 1:
        raise _RefusedError(f"{hardware} needs {hardware.nodes} nodes, and this is one machine")
    if hardware.is_cpu:
        cpus = ranks_per_node * cpus_per_rank
        if cpus > len(machine.cores):
            raise _RefusedError(f"{cpus} cores are asked for, and this machine has {len(machine.cores)}")
    elif hardware.devices > len(fitting_gpus(machine.gpus, hardware.kind)):
        names = ", ".join(dict.fromkeys(gpu.name for gpu in machine.gpus))
        has = f"{len(machine.gpus)} ({names})" if names else "none"
        raise _RefusedError(f"{hardware} needs {hardware.devices} such GPUs, and this machine has {has}")
    return ResourceShape(
        target=LOCAL,
        gpu="" if hardware.is_cpu else hardware.kind,
        nodes=1,
        ranks_per_node=ranks_per_node,
        gpus_per_node=hardware.gpus,
        ask_gpus_per_node=hardware.gpus,
        cpus_per_rank=cpus_per_rank,
        mem_bytes=execution.mem_bytes,
        time_limit_s=execution.time_limit_s,
    )


def _on_cluster(
    profile: ClusterProfile, hardware: Hardware, execution: Execution, ranks_per_node: int, cpus_per_rank: int
) -> ResourceShape:
    nodes = profile.nodes(hardware.kind)
    if nodes is None:
        known = ", ".join([*profile.gpu, *(["cpu"] if profile.cpu else [])])
        raise _RefusedError(f"cluster {profile.name} has no {hardware.kind}; it has: {known}")
    _check_launcher(profile, hardware.nodes, ranks_per_node)
    cpus_per_node = ranks_per_node * cpus_per_rank
    kind = "" if hardware.is_cpu else profile.gpu_kind(hardware.kind)
    used = 0 if hardware.is_cpu else hardware.devices_per_node
    asked = 0
    if isinstance(nodes, GpuNodes):
        _check_gpus(profile, nodes, kind, used)
        asked = nodes.asked_gpus(used)
        if nodes.cpus_by is CpusBy.GPU and cpus_per_node % asked:
            raise _RefusedError(
                f"{cpus_per_node} cores cannot be asked for evenly with {asked} GPUs; set cpus to a multiple of {asked}"
            )
    if nodes.node_cores and cpus_per_node > nodes.node_cores:
        raise _RefusedError(
            f"{cpus_per_node} cores a node are asked for, and {hardware.kind} nodes have {nodes.node_cores}"
        )
    queue = _queue(profile, nodes, kind or "cpu", hardware.nodes, used, cpus_per_node, execution.time_limit_s)
    return ResourceShape(
        target=profile.name,
        gpu=kind,
        nodes=hardware.nodes,
        ranks_per_node=ranks_per_node,
        gpus_per_node=used,
        ask_gpus_per_node=asked,
        cpus_per_rank=cpus_per_rank,
        mem_bytes=_memory(profile, nodes, execution.mem_bytes, asked or ranks_per_node),
        time_limit_s=execution.time_limit_s,
        partition=queue.partition,
        qos=queue.qos,
        gpu_name=nodes.expect_name if isinstance(nodes, GpuNodes) else "",
        gpu_memory_gb=nodes.expect_mem_gb if isinstance(nodes, GpuNodes) else 0.0,
        allow_mig=isinstance(nodes, GpuNodes) and nodes.mig,
    )


def _check_launcher(profile: ClusterProfile, nodes: int, ranks_per_node: int) -> None:
    if profile.launcher is Launcher.TORCHRUN and nodes > 1:
        raise _RefusedError("launcher torchrun starts the ranks of one node; several nodes need launcher srun")
    if profile.launcher is Launcher.NONE and nodes * ranks_per_node > 1:
        raise _RefusedError("launcher none starts one process; several ranks need launcher srun or torchrun")


def _check_gpus(profile: ClusterProfile, nodes: GpuNodes, kind: str, used: int) -> None:
    if used > nodes.node_gpus:
        have = f"{nodes.node_gpus} GPU{'s' if nodes.node_gpus > 1 else ''}"
        raise _RefusedError(f"{used} GPUs on one node are asked for, and {kind} nodes of {profile.name} have {have}")
    if nodes.mig and used > 1:
        raise _RefusedError(f"{kind} is a slice of a GPU: one process sees one slice, and slices cannot train together")
    usual = profile.nodes("gpu")
    if isinstance(usual, GpuNodes) and nodes.arch != usual.arch and not nodes.python:
        raise _RefusedError(
            f"{kind} nodes are {nodes.arch}: they need an interpreter of their own "
            f"(python in [cluster.{profile.name}.gpu.{kind}])"
        )


def _memory(profile: ClusterProfile, nodes: CpuNodes | GpuNodes, wanted: int | None, shares: int) -> int | None:
    """Memory on each node: the run's own wish, else the profile's share of each GPU (or CPU rank) held there."""
    if nodes.mem_style is MemStyle.NONE:
        if wanted is not None:
            raise _RefusedError(f"cluster {profile.name} takes no request for memory; remove mem")
        return None
    if wanted is None:
        share = nodes.mem_per_gpu_bytes if isinstance(nodes, GpuNodes) else nodes.mem_per_rank_bytes
        if share is None or share == WHOLE_NODE:
            return share
        wanted = share * shares
    if nodes.node_mem_bytes and wanted > nodes.node_mem_bytes:
        have = format_memory(nodes.node_mem_bytes)
        raise _RefusedError(f"{format_memory(wanted)} of memory a node are asked for, and nodes have {have}")
    return wanted


def queues(profile: ClusterProfile, shape: ResourceShape) -> tuple[ClusterQueue, ...]:
    """Every queue that takes runs of a shape, best first; none where the site has no queues."""
    nodes = profile.nodes(shape.node_kind)
    assert nodes is not None, f"a shape of cluster {profile.name} has nodes there"
    size = (shape.nodes, shape.gpus_per_node, shape.cpus_per_node, shape.time_limit_s)
    return tuple(queue for queue in nodes.queue if not _refuses(queue, profile, *size))


def _queue(
    profile: ClusterProfile,
    nodes: CpuNodes | GpuNodes,
    kind: str,
    num_nodes: int,
    gpus_per_node: int,
    cpus_per_node: int,
    time_limit_s: int,
) -> ClusterQueue:
    """The first queue that takes the job; a site without queues takes every job."""
    if not nodes.queue:
        return ClusterQueue()
    refusals = []
    for queue in nodes.queue:
        why = _refuses(queue, profile, num_nodes, gpus_per_node, cpus_per_node, time_limit_s)
        if not why:
            return queue
        refusals.append(f"{queue} {why}")
    raise _RefusedError(f"no {kind} queue takes a job of {format_time_limit(time_limit_s)}: {'; '.join(refusals)}")


def _refuses(
    queue: ClusterQueue,
    profile: ClusterProfile,
    num_nodes: int,
    gpus_per_node: int,
    cpus_per_node: int,
    time_limit_s: int,
) -> str:
    """Why a queue does not take a job; empty where it does."""
    if queue.preemptable and not profile.allow_preemptable:
        return "is preemptable (allow_preemptable = false)"
    if queue.max_time_s and time_limit_s > queue.max_time_s:
        return f"ends jobs after {format_time_limit(queue.max_time_s)}"
    if queue.max_nodes and num_nodes > queue.max_nodes:
        return f"gives {queue.max_nodes} nodes at most"
    if queue.max_gpus and num_nodes * gpus_per_node > queue.max_gpus:
        return f"gives {queue.max_gpus} GPUs at most"
    if queue.max_cpus and num_nodes * cpus_per_node > queue.max_cpus:
        return f"gives {queue.max_cpus} cores at most"
    return ""
