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
        "packages": {
            name: packages[name] for name in sorted((software.MEASURED_PACKAGES | {"submitit"}) & packages.keys())
        },
        "git": software.git(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "argv": sys.argv,
        "hostname": socket.gethostname(),
        "kernel": platform.release(),
        "cpu_model": _cpu_model(),
        "cores": os.cpu_count(),
        "driver": _driver(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if _RECORDED_VARIABLES.fullmatch(k)},
    }


def _cpu_model() -> str | None:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return match[1] if match else None


def _driver() -> str | None:
    """Return the version of the NVIDIA kernel driver."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return None
