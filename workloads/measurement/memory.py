"""Memory of a rank: of the tensors on its GPUs, or of its process."""

from __future__ import annotations

import re
from pathlib import Path

from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    import torch


def memory_bytes(*devices: torch.device) -> tuple[int, int]:
    """Return (allocated now, peak): the maximum over the GPUs, of their tensors; on a CPU that of this process."""
    if devices[0].type == "cuda":
        return max(map(torch.cuda.memory_allocated, devices)), max(map(torch.cuda.max_memory_allocated, devices))
    return process_memory_bytes()


def process_memory_bytes() -> tuple[int, int]:
    """Return (resident now, peak) of this process; VmRSS and VmHWM of proc_pid_status(5)."""
    status = Path("/proc/self/status").read_text()
    now, peak = (re.search(rf"^{key}:\s+(\d+) kB$", status, re.MULTILINE) for key in ("VmRSS", "VmHWM"))
    assert now is not None and peak is not None
    return int(now[1]) * 1024, int(peak[1]) * 1024
