"""Memory of a rank: of the tensors on its GPUs, or of its process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def memory_bytes(*devices: torch.device) -> tuple[int, int]:
    """(allocated now, peak): of the tensors on the device that has most of each, or of this process on a CPU."""
    if devices[0].type == "cuda":
        import torch

        return max(map(torch.cuda.memory_allocated, devices)), max(map(torch.cuda.max_memory_allocated, devices))
    return process_memory_bytes()


def process_memory_bytes() -> tuple[int, int]:
    """(resident now, peak) of this process."""
    status = Path("/proc/self/status").read_text()
    now, peak = (re.search(rf"^{key}:\s+(\d+) kB$", status, re.MULTILINE) for key in ("VmRSS", "VmHWM"))
    assert now is not None and peak is not None
    return int(now[1]) * 1024, int(peak[1]) * 1024
