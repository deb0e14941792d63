"""``horovod``: Horovod 0.28: a replica per device, gradients averaged by Horovod's own background thread.

Horovod communicates over gloo on CPUs and NCCL on GPUs. Our launcher has started all ranks, so rank 0 hosts the
rendezvous that ``horovodrun`` would host, and torch's process group broadcasts its address. With one rank it is what
studies call "standalone". Horovod averages gradients only; losses and running statistics are reduced as in ``ddp``.
"""

from __future__ import annotations

import importlib
import os
import socket
import threading
from typing import Any

from workloads.contract import Topology
from workloads.errors import JobError
from workloads.job import rendezvous
from workloads.job.world import World
from workloads.lazy import lazy_imports
from workloads.registry import Option, StrategyDeclaration
from workloads.strategies.shared import limits
from workloads.strategies.shared.protocol import Task
from workloads.strategies.shared.torch_strategy import ReplicaStrategy

with lazy_imports(__name__):
    from torch import distributed

START_TIMEOUT_S = 300
"""Horovod's default is 30 s, too short where ranks import from a busy file system."""
_CONNECT_TIMEOUT_S = 5.0


class Horovod(ReplicaStrategy):
    """A replica on each rank, and an optimizer that averages gradients before it updates."""

    def __init__(self, task: Task) -> None:
        hvd: Any = importlib.import_module("horovod.torch")
        # Horovod stays up until the process ends: Horovod 0.28 crashes in a second init() after shutdown().
        if not hvd.is_initialized():
            _configure(task)
            hvd.init()
        module = task.module.to(task.device)
        named = list(module.named_parameters())
        optimizer = hvd.DistributedOptimizer(
            task.make_optimizer(p for _, p in named),
            named_parameters=named,
            compression=hvd.Compression.fp16 if task.options["compression"] == "fp16" else hvd.Compression.none,
            op=hvd.Average,
        )
        super().__init__(task, module, optimizer=optimizer)

    def clear_gradients(self) -> None:
        # zero_grad of Horovod 0.28's optimizer has no set_to_none (horovod/torch/optimizer.py).
        self.module.zero_grad(set_to_none=True)


def _configure(task: Task) -> None:
    """Set the variables from which Horovod learns ranks and rendezvous. Collective."""
    world = task.world
    ranks: list[tuple[int, int, int]] = [(world.node, world.local_rank, world.local_size)] * world.size
    address_and_port: list[Any] = [None, None]
    distributed.all_gather_object(ranks, ranks[world.rank], group=task.host_group)
    if world.rank == 0:
        address_and_port = [rendezvous.own_addresses(world), _serve(world, ranks)]
    distributed.broadcast_object_list(address_and_port, 0, group=task.host_group)
    address = _reachable(*address_and_port)
    own = _slot(world, ranks, world.rank)
    os.environ |= {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        **{f"HOROVOD_{name.upper()}": str(value) for name, value in own.items()},
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": socket.gethostbyname(address),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(address_and_port[1]),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(START_TIMEOUT_S),
        "HOROVOD_FUSION_THRESHOLD": str(int(task.options["fusion_threshold_mb"]) << 20),  # type: ignore[arg-type]
        "HOROVOD_CYCLE_TIME": str(task.options["cycle_time_ms"]),
    }
    # Otherwise the host waits for the all-reduce of every gradient before it launches the next step's kernels.
    os.environ.setdefault("HOROVOD_ENABLE_ASYNC_COMPLETION", "1")
    if interface := rendezvous.interface_towards(address):
        os.environ.setdefault("HOROVOD_GLOO_IFACE", interface)


def _serve(world: World, ranks: list[tuple[int, int, int]]) -> int:
    """Host the rendezvous until this process ends; returns its port."""
    http: Any = importlib.import_module("horovod.runner.http.http_server")
    hosts: Any = importlib.import_module("horovod.runner.common.util.hosts")
    everywhere = "0.0.0.0"  # noqa: S104 (ranks of other nodes may come over any network)
    server = http.RendezvousHTTPServer(
        (rendezvous.LOOPBACK if world.nodes == 1 else everywhere, 0), http.RendezvousHandler, 0
    )
    server.init([hosts.SlotInfo(**_slot(world, ranks, rank)) for rank in range(world.size)])
    threading.Thread(target=server.serve_forever, name="horovod-rendezvous", daemon=True).start()
    return int(server.server_address[1])


def _slot(world: World, ranks: list[tuple[int, int, int]], rank: int) -> dict[str, Any]:
    """Return what Horovod calls a slot; ``cross_rank`` counts the ranks with the same local rank, one on each node.

    Args:
        ranks: (node, local rank, ranks on the node) of each rank.
    """
    node, local_rank, local_size = ranks[rank]
    alike = sorted(other for other, other_local, _ in ranks if other_local == local_rank)
    return {
        "hostname": f"node{node}",
        "rank": rank,
        "local_rank": local_rank,
        "cross_rank": alike.index(node),
        "size": world.size,
        "local_size": local_size,
        "cross_size": len(alike),
    }


def _reachable(addresses: list[str], port: int) -> str:
    """Return the first address that accepts a connection from this rank."""
    problem = ""
    for address in addresses:
        try:
            socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT_S).close()
        except OSError as error:
            problem = f"{address} port {port}: {error}"
        else:
            return address
    raise JobError(
        "Horovod's rendezvous on rank 0 cannot be reached",
        why=problem,
        hint="see whether a firewall blocks connections between nodes",
    )


DECLARATION = StrategyDeclaration(
    name="horovod",
    summary="Horovod: one process per device, each with its part of the batch, gradients averaged by Horovod.",
    topology=lambda _options: Topology.PROCESS_PER_DEVICE,
    unsupported_training=limits.no_channels_last("Horovod averages only contiguous gradients, without channels_last"),
    unsupported_compile=limits.not_captured(
        "Horovod's own thread starts the all-reduce, which a CUDA graph cannot capture"
    ),
    splits_batch=True,
    packages=("torch", "horovod"),
    options=(
        Option("compression", "none", "Send gradients as they are, or in half precision", choices=("none", "fp16")),
        Option("fusion_threshold_mb", 128, "Gradients are sent together up to this size", minimum=0),
        Option(
            "cycle_time_ms", 1.0, "How long Horovod's thread waits for more gradients to send together", minimum=0.0
        ),
    ),
    batch_norm_treatment="per_rank",
    create=lambda: Horovod,
)
