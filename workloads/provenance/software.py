"""Digests of code and packages, which decide whether a result is stale. Standard library only."""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

MEASURED_PACKAGES = frozenset(
    {"deepspeed", "horovod", "numpy", "pillow", "scikit-learn", "tensorflow", "tensorflow-cpu", "timm", "torch"}
    | {"torchgpipe", "torchvision", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"}
)
"""Distributions whose version may change accuracy or speed; others do not make results stale."""

_TOOL_TIMEOUT_S = 10


def canonical_name(name: str) -> str:
    """Normalize a distribution's name as PEP 503 does: ``Scikit_Learn`` becomes ``scikit-learn``."""
    return re.sub(r"[-_.]+", "-", name).lower()


_METADATA_FOLDER = re.compile(r"(?P<name>.+?)-(?P<version>\d[^-]*)(?:-py[\d.]+)?\.(?:dist|egg)-info")
"""Names from the PyPA specification "Recording installed projects"."""


def installed_packages() -> dict[str, str]:
    """Return canonical name -> version of every distribution of this interpreter; imports nothing.

    Reads the names of metadata folders only: reading the files in them takes a second for hundreds of distributions.
    """
    found: dict[str, str] = {}
    for folder in sys.path:
        with contextlib.suppress(OSError):
            for entry in Path(folder or ".").iterdir():
                if match := _METADATA_FOLDER.fullmatch(entry.name):
                    found.setdefault(canonical_name(match["name"]), match["version"])
    return found


def packages_digest(versions: Mapping[str, str]) -> str:
    """Return the digest of the versions of :data:`MEASURED_PACKAGES`, given canonical name -> version of any."""
    text = "\n".join(f"{name}=={version}" for name, version in measured_versions(versions).items())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def measured_versions(versions: Mapping[str, str]) -> dict[str, str]:
    """Keep :data:`MEASURED_PACKAGES` only, sorted."""
    return {name: versions[name] for name in sorted(MEASURED_PACKAGES & versions.keys())}


@cache
def code_digest() -> str:
    """Return the digest of the source of the installed package ``workloads``: all code of a job except plug-ins."""
    folder = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def git() -> dict[str, Any] | None:
    """Return commit of the package's checkout and whether the package differs from it; None outside of a checkout."""
    folder = Path(__file__).parents[1]
    tool = shutil.which("git")
    if tool is None or not (folder.parent / ".git").exists():
        return None
    try:
        command = [tool, "-C", str(folder.parent), "status", "--porcelain=v2", "--branch", "--", folder.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    commit = re.search(r"^# branch.oid ([0-9a-f]+)$", done.stdout, re.MULTILINE)
    dirty = any(not line.startswith("#") for line in done.stdout.splitlines())
    return {"commit": commit[1], "dirty": dirty} if commit else None
