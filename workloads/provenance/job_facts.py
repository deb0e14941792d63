"""Code, packages, machine and environment of one attempt, kept with its result."""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from pathlib import Path
from typing import Any

from workloads.provenance import software

_RECORDED_VARIABLES = re.compile(r"(CUDA|NCCL|GLOO|OMP|MKL|TORCH|PYTORCH|SLURM_(JOB|STEP|NODE|CPU|GPU|NTASKS|TASKS)).*")


def collect(code: str) -> dict[str, Any]:
    """Collect what is known without a framework; engines add the facts of theirs.

    Args:
        code: digest of the run's code, ``code_snapshot.run_code_digest``.
    """
    packages = software.installed_packages()
    return {
        "code_digest": code,
        "packages_digest": software.packages_digest(packages),
        "packages": {n: v for n, v in sorted(packages.items()) if n in software.MEASURED_PACKAGES or n == "submitit"},
        "git": software.git(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "argv": sys.argv,
        "hostname": socket.gethostname(),
        "kernel": platform.release(),
        "cpu_model": _first(r"^model name\s*:\s*(.+)$", "/proc/cpuinfo"),
        "cores": os.cpu_count(),
        "driver": _first(r"(\S.*)", "/sys/module/nvidia/version"),
        "environment": {k: v for k, v in sorted(os.environ.items()) if _RECORDED_VARIABLES.fullmatch(k)},
    }


def _first(pattern: str, kernel_file: str) -> str | None:
    """Return the group of the first match in a file of the kernel; None without match or file."""
    try:
        match = re.search(pattern, Path(kernel_file).read_text(), re.MULTILINE)
    except OSError:
        return None
    return match[1] if match else None
