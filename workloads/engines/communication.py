"""The torch process group of a run, and the collective calls that the training loop needs."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from workloads.files.run_dir import AttemptDir
from workloads.job import rendezvous
from workloads.job.context import print_error
from workloads.job.world import Launcher, World

RENDEZVOUS_TIMEOUT_S = 300
"""Generous, because ranks on busy file systems import at very different speed."""

ADVICE_AFTER_S = 60

Value = TypeVar("Value")


class Communication:
    """Collective calls over the ranks of a world; with one rank they return their argument.

    Args:
        join: whether to make torch's default process group, which strategies of one process per device use.
        hang_timeout_s: the watchdog's timeout; the group's is twice as long, because the watchdog must end a hang: it
            shows the stack of every rank. 0: torch's default.
    """

    def __init__(
        self, world: World, attempt: AttemptDir, device: torch.device, *, join: bool, hang_timeout_s: int
    ) -> None:
        self._world = world
        self._device = device
        self._joined = join
        self.host_group: distributed.ProcessGroup | None = None
        """For values of the host; None where the default group carries them."""
        if not join:
            return
        timeout = datetime.timedelta(seconds=2 * hang_timeout_s) if hang_timeout_s else None
        on_gpu = device.type == "cuda"
        store = _store(world, attempt, hang_timeout_s)
        with _advice_when_slow(on_gpu):
            distributed.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=store,
                init_method=None if store is not None else "env://",
                rank=world.rank,
                world_size=world.size,
                timeout=timeout,
                # Connects NCCL now, so that failures show here, and tells barrier() which device to use.
                device_id=device if on_gpu else None,
            )
            self.add(torch.zeros(1, device=device))
            if on_gpu:
                torch.cuda.synchronize(device)
        if on_gpu and world.size > 1:
            # NCCL would copy numbers of the host, such as times, to the GPU and queue them behind kernels.
            group = distributed.new_group(backend="gloo", timeout=timeout)
            assert not isinstance(group, int), "new_group returns a number to ranks outside of the group only"
            self.host_group = group

    def add(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over ranks in place, queued on the device like a kernel."""
        if self._world.size > 1:
            distributed.all_reduce(tensor)
        return tensor

    def maximum(self, values: Sequence[float]) -> list[float]:
        """Return the maximum over ranks of each value."""
        if self._world.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(tensor, distributed.ReduceOp.MAX, group=self.host_group)
        most: list[float] = tensor.tolist()
        return most

    def gather(self, value: Value) -> list[Value]:
        """Return every rank's value, in order of rank, on all ranks."""
        if self._world.size == 1:
            return [value]
        values: list[Value] = [value] * self._world.size
        distributed.all_gather_object(values, value, group=self.host_group)
        return values

    def close(self) -> None:
        """Wait for all ranks and destroy the group. After a failure, other ranks may never arrive: do not call it."""
        if self._joined and distributed.is_initialized():  # DeepSpeed has destroyed it already
            if self._world.size > 1:
                distributed.barrier(group=self.host_group)
            distributed.destroy_process_group()


@contextlib.contextmanager
def _advice_when_slow(on_gpu: bool) -> Iterator[None]:
    """Print advice when the first message takes long: NCCL can hang on hosts whose PCIe peer-to-peer is broken (NCCL's
    troubleshooting guide: ACS, IOMMU)."""
    advice = f"{socket.gethostname()}: the ranks exchanged nothing for {ADVICE_AFTER_S} s"
    if on_gpu:
        advice += "; if GPUs of this host are joined by PCIe only, try NCCL_P2P_DISABLE=1 in the job's environment"
    timer = threading.Timer(ADVICE_AFTER_S, print_error, (advice,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _store(world: World, attempt: AttemptDir, hang_timeout_s: int) -> Store | None:
    """Return the store through which ranks connect; None when the launcher's environment variables name one."""
    if world.size == 1:
        return HashStore()  # in memory: a single rank needs no port
    if world.launcher is Launcher.TORCHRUN:
        return None
    patience_s = min(hang_timeout_s or RENDEZVOUS_TIMEOUT_S, RENDEZVOUS_TIMEOUT_S)
    timeout = datetime.timedelta(seconds=patience_s)
    if world.rank == 0:
        store = TCPStore(rendezvous.LOOPBACK, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        addresses = rendezvous.own_addresses(world)
        rendezvous.publish(attempt.rendezvous, world, store.port, addresses)
    else:
        address, port = rendezvous.find(attempt.rendezvous, world, patience_s)
        store = TCPStore(address, port, is_master=False, timeout=timeout)
        addresses = [address]
    # Otherwise gloo resolves the host's own name, which may fail or give an address that other nodes cannot reach
    # (torch.distributed docs: GLOO_SOCKET_IFNAME).
    interface = next(filter(None, map(rendezvous.interface_towards, addresses)), "")
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return store
