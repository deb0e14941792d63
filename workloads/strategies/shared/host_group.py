"""A way to send Python objects and CPU tensors between ranks where the process group is NCCL, for GPU memory only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from workloads.strategies.shared.protocol import Task


def host_group(task: Task) -> ProcessGroup | None:
    """A group of all ranks over gloo; None where the default group is one. Collective."""
    from torch import distributed

    if task.device.type == "cpu" or task.world.size == 1:
        return None
    group = distributed.new_group(backend="gloo")
    assert not isinstance(group, int), "a group of all ranks has this one as a member"
    return group
