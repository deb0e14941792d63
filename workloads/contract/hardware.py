"""The devices of a run, and how a strategy maps processes to them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache


class Topology(StrEnum):
    """How a strategy maps processes to devices."""

    ONE_PROCESS = "one_process"
    """One process drives all devices (eager, DataParallel, torchgpipe, MirroredStrategy)."""
    PROCESS_PER_DEVICE = "process_per_device"
    """One rank per device (DDP, FSDP, Horovod, pipelining, DeepSpeed)."""


_HARDWARE = re.compile(r"(?P<kind>[A-Za-z][A-Za-z0-9_.-]*):(?P<devices>[1-9]\d{0,4})(?:x(?P<nodes>[1-9]\d{0,4}))?")


@dataclass(frozen=True, slots=True)
class Hardware:
    """The devices of a run: ``"a100:2"`` is two GPUs of one node, ``"a100:4x2"`` four on each of two nodes."""

    kind: str
    """``"cpu"``, ``"gpu"`` (any GPU) or a logical GPU type of the cluster file."""
    devices_per_node: int
    """GPUs, or CPU ranks, on each node."""
    nodes: int = 1
    text: str = field(init=False, repr=False, compare=False)
    """What :meth:`parse` reads; kept because every run id contains it."""

    def __post_init__(self) -> None:
        nodes = f"x{self.nodes}" if self.nodes > 1 else ""
        object.__setattr__(self, "text", f"{self.kind}:{self.devices_per_node}{nodes}")

    @classmethod
    @lru_cache(maxsize=4096)
    def parse(cls, text: str) -> Hardware:
        """Parse ``KIND:DEVICES`` or ``KIND:DEVICESxNODES``; raise ValueError for another form."""
        match = _HARDWARE.fullmatch(text)
        if match is None:
            raise ValueError(
                'hardware is "KIND:DEVICES" or "KIND:DEVICESxNODES", such as "a100:2", "a100:4x2", "gpu:1" or "cpu:2", '
                f"not {text!r}"
            )
        return cls(match["kind"], int(match["devices"]), int(match["nodes"] or 1))

    @property
    def devices(self) -> int:
        """Devices over all nodes."""
        return self.devices_per_node * self.nodes

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    @property
    def gpus(self) -> int:
        """GPUs over all nodes; 0 on CPU."""
        return 0 if self.is_cpu else self.devices

    def __hash__(self) -> int:
        # A plan looks up tens of thousands; Python caches the hash of a str, not that of a dataclass.
        return hash(self.text)

    def __str__(self) -> str:
        return self.text
