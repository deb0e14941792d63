"""``horovod``: Horovod 0.28: a replica per device, gradients averaged by Horovod's own background thread.

Horovod talks over gloo on CPUs and NCCL on GPUs. Nobody logs in anywhere: every rank is there already, so rank 0 hosts
the rendezvous that ``horovodrun`` would, and tells the others where through torch's process group. With one rank it is
what studies call "standalone". Only gradients are Horovod's; losses and running statistics go as in ``ddp``.
"""

from __future__ import annotations

import importlib
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

from workloads.contract import Topology
from workloads.errors import JobError
from workloads.job import rendezvous
from workloads.registry import Option, Options, StrategyDeclaration
from workloads.strategies.shared.host_group import host_group
from workloads.strategies.shared.replica import Replica
from workloads.strategies.shared.running_statistics import RunningStatistics

if TYPE_CHECKING:
    from torch import Tensor

    from workloads.job.world import World
    from workloads.loaders.protocol import Batch
    from workloads.strategies.shared.compiled_steps import Model
    from workloads.strategies.shared.protocol import Task

START_TIMEOUT_S = 300
"""Horovod's own is 30, too short where ranks import from a busy file system."""
_CONNECT_TIMEOUT_S = 5.0


class Horovod(Replica):
    """A replica on each rank, and an optimiser that averages gradients before it steps."""

    def __init__(self, task: Task) -> None:
        import torch

        from workloads.strategies.shared.compiled_steps import Steps

        self._task = task
        self._inference = torch.inference_mode
        hvd: Any = importlib.import_module("horovod.torch")
        # It ends with the process, nowhere else: it crashes when it is started a second time.
        if not hvd.is_initialized():
            _meet(task)
            hvd.init()
        self._module = task.module.to(task.device)
        named = list(self._module.named_parameters())
        self.optimizer = hvd.DistributedOptimizer(
            task.make_optimizer(p for _, p in named),
            named_parameters=named,
            compression=hvd.Compression.fp16 if task.options["compression"] == "fp16" else hvd.Compression.none,
            op=hvd.Average,
        )
        self._statistics = RunningStatistics(task, self._module)
        learned = [*self._module.parameters(), *self._module.buffers()]
        self._steps = Steps(task, self._step, self._module, self.optimizer, learned)

    def _step(self, model: Model, batch: Batch) -> Tensor:
        self._task.set_training(self._module, True)
        self._module.zero_grad(set_to_none=True)  # its optimiser refuses that
        loss = self._task.loss_sum(self._task.forward(model, batch.x), batch.y)
        if batch.num_local == 0:
            loss = loss * 0.0
        # As DDP does, Horovod divides the summed gradients by the world size.
        self._task.backward(loss, self._task.world.size / batch.num_global)
        self.optimizer.step()
        return loss.detach()


def _meet(task: Task) -> None:
    """Tell Horovod who we are and where to meet. Collective."""
    from torch import distributed

    world = task.world
    places: list[tuple[int, int, int]] = [(world.node, world.local_rank, world.local_size)] * world.size
    where: list[Any] = [None, None]
    group = host_group(task)
    distributed.all_gather_object(places, places[world.rank], group=group)
    if world.rank == 0:
        where = [rendezvous.own_addresses(world), _serve(world, places)]
    distributed.broadcast_object_list(where, 0, group=group)
    address = _reachable(*where)
    own = _slot(world, places, world.rank)
    os.environ |= {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        **{f"HOROVOD_{name.upper()}": str(value) for name, value in own.items()},
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": socket.gethostbyname(address),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(where[1]),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(START_TIMEOUT_S),
        "HOROVOD_FUSION_THRESHOLD": str(int(task.options["fusion_threshold_mb"]) << 20),  # type: ignore[arg-type]
        "HOROVOD_CYCLE_TIME": str(task.options["cycle_time_ms"]),
    }
    # Otherwise the host waits for every gradient of a step before it launches the next one.
    os.environ.setdefault("HOROVOD_ENABLE_ASYNC_COMPLETION", "1")
    interface = rendezvous.interface_towards(address)
    if interface:
        os.environ.setdefault("HOROVOD_GLOO_IFACE", interface)


def _serve(world: World, places: list[tuple[int, int, int]]) -> int:
    """Host the rendezvous until this process ends; returns its port."""
    http: Any = importlib.import_module("horovod.runner.http.http_server")
    hosts: Any = importlib.import_module("horovod.runner.common.util.hosts")
    everywhere = "0.0.0.0"  # noqa: S104  ranks of other nodes come in by whatever network there is
    server = http.RendezvousHTTPServer(
        (rendezvous.LOOPBACK if world.nodes == 1 else everywhere, 0), http.RendezvousHandler, 0
    )
    server.init([hosts.SlotInfo(**_slot(world, places, rank)) for rank in range(world.size)])
    threading.Thread(target=server.serve_forever, name="horovod-rendezvous", daemon=True).start()
    return int(server.server_address[1])


def _slot(world: World, places: list[tuple[int, int, int]], rank: int) -> dict[str, Any]:
    """A rank's place, in Horovod's words: ``cross`` is among the ranks of the same local rank, one a node."""
    node, local_rank, local_size = places[rank]
    alike = sorted(other for other, other_local, _ in places if other_local == local_rank)
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


def _unsupported_compile(how: str, _options: Options) -> str:
    return "" if how == "default" else "Horovod's all-reduce starts in a thread of its own, which no CUDA graph records"


def _unsupported_training(train: Any, _options: Options) -> str:
    return "Horovod averages contiguous gradients only: no channels_last" if train["channels_last"] else ""


DECLARATION = StrategyDeclaration(
    name="horovod",
    summary="Horovod: one process per device, each with its part of the batch, gradients averaged by Horovod.",
    framework="torch",
    topology=lambda _options: Topology.PROCESS_PER_DEVICE,
    unsupported_training=_unsupported_training,
    unsupported_compile=_unsupported_compile,
    splits_batch=True,
    packages=("torch", "horovod"),
    options=(
        Option(
            name="compression",
            type=str,
            default="none",
            choices=("none", "fp16"),
            summary="Send gradients as they are, or in half precision",
        ),
        Option(
            name="fusion_threshold_mb",
            type=int,
            default=128,
            minimum=0,
            summary="Gradients are sent together up to this size",
        ),
        Option(
            name="cycle_time_ms",
            type=float,
            default=1.0,
            minimum=0.0,
            summary="How long Horovod's thread waits for more gradients to send together",
        ),
    ),
    batch_norm_treatment="per_rank",
    create=lambda: Horovod,
)
