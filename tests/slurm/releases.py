"""The releases of Slurm that tests run on: the machine's own, and Debian 13's, unpacked beside it.

Packages and all libraries that they need are fetched by apt into folders of its own, unpacked once into the user's
cache, and started with their own loader and libraries. Nothing is installed or mounted, and nobody has to be root.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SUITE, NEWER = "trixie", "24.11"
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurmdbd", "slurm-wlm-mysql-plugin")
CLIENTS = ("sacct", "sacctmgr", "sbatch", "scancel", "scontrol", "sdiag", "sinfo", "squeue", "srun")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
"""Daemons live in sbin, which a user's PATH may lack."""
_TIMEOUT_S = 300
_UNREACHABLE = re.compile(
    r"Could not (connect|resolve)|Temporary failure|Unable to connect|Connection (failed|refused|timed out)|"
    r"Network is unreachable|\b(403|404|5\d\d) "
)

# A program in a tree: started by the tree's loader, so that it never meets this machine's libraries.
_START = """#!/bin/sh
tree="${{0%/*}}/.."
exec "$tree/{loader}" --argv0 "$0" --library-path "$tree/{libraries}:$tree/{plugins}" "$tree/{program}" "$@"
"""


@dataclass(frozen=True, slots=True)
class Release:
    """Folders with the programs of a Slurm."""

    programs: Path | None = None
    """A folder that comes first in PATH; None: the system's."""
    plugins: Path | None = None
    """None: where the programs were built to look."""

    @property
    def system_path(self) -> str:
        return f"{self.programs}:{SYSTEM_PATH}" if self.programs else SYSTEM_PATH


INSTALLED = Release()
both = pytest.mark.parametrize("any_lab", ["installed", NEWER], indirect=True)
"""For tests of what releases of Slurm may do differently; such a test takes its cluster from ``any_lab``."""
newer = pytest.mark.parametrize("any_lab", [NEWER], indirect=True)


class UnreachableError(Exception):
    """The packages cannot be fetched from here, so the release cannot be tested."""


def newer_release() -> Release:
    """Return Slurm 24.11, fetched if it is not in the cache.

    Raises:
        UnreachableError: Debian's archive, or apt, cannot be reached from here.
        AssertionError: it can, but no working tree came of it.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    cache = (base if base.is_absolute() else Path.home() / ".cache") / "orchestrate" / "slurm"
    cache.mkdir(parents=True, exist_ok=True)
    tree = cache / NEWER
    with _alone(cache / "lock"):
        if not tree.is_dir():
            with tempfile.TemporaryDirectory(dir=cache, prefix=f"{NEWER}.") as folder:
                made = _unpacked(_fetched(Path(folder)), Path(folder) / "tree")
                made.rename(tree)
    (plugins,) = tree.glob("usr/lib/*/slurm-wlm")
    return Release(tree / "bin", plugins)


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetched(folder: Path) -> list[Path]:
    """Return the packages and their dependencies, as files."""
    if shutil.which("apt-get") is None or not KEYRING.is_file():
        raise UnreachableError(f"apt-get or {KEYRING} (package debian-archive-keyring) is missing")
    (folder / "sources.list").write_text(f"deb [signed-by={KEYRING}] {_archive()} {SUITE} main\n")
    (folder / "status").touch()  # as if nothing was installed, so that apt fetches the libraries too
    for name in ("lists/partial", "archives/partial"):
        (folder / name).mkdir(parents=True)
    options = {
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State": folder,
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder,
        "APT::Update::Error-Mode": "any",
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Acquire::Retries": "2",
        "Debug::NoLocking": "1",
    }
    apt = ["apt-get", "-qq", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
    _run(*apt, "update")
    planned = _run(*apt, "--simulate", "install", "slurmctld")
    found = re.search(r"^Inst slurmctld \((\S+)", planned, re.MULTILINE)
    assert found and found[1].startswith(f"{NEWER}."), f"{SUITE} has not Slurm {NEWER} any more: {planned[-300:]}"
    _run(*apt, "--yes", "--no-install-recommends", "--download-only", "install", *PACKAGES)
    return sorted((folder / "archives").glob("*.deb"))


def _archive() -> str:
    """Return the mirror that this machine uses.

    Raises:
        UnreachableError: apt knows none.
    """
    form = "$(ORIGIN) $(CODENAME) $(REPO_URI)"
    done = subprocess.run(["apt-get", "indextargets", "--format", form], capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        origin, _, address = line.split(" ", 2)
        if origin == "Debian" and "security" not in address:
            return address
    raise UnreachableError("apt knows no archive of Debian here: name one in its sources, and run apt-get update")


def _unpacked(packages: list[Path], tree: Path) -> Path:
    """Return a tree whose folder ``bin`` has a script that starts each of Slurm's programs."""
    tree.mkdir()
    for package in packages:
        _run("dpkg-deb", "--extract", str(package), str(tree))
    (plugins,) = tree.glob("usr/lib/*/slurm-wlm")
    (loader,) = plugins.parent.glob("ld-linux*.so.*")
    programs = [*(tree / "usr" / "bin" / name for name in CLIENTS), *tree.glob("usr/sbin/slurm*")]
    (tree / "bin").mkdir()
    for program in programs:
        # Debian's alternatives have a suffix.
        starter = tree / "bin" / program.name.removesuffix("-wlm")
        places = {"loader": loader, "libraries": plugins.parent, "plugins": plugins, "program": program}
        starter.write_text(_START.format(**{name: path.relative_to(tree) for name, path in places.items()}))
        starter.chmod(0o755)
    return tree


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    said = done.stdout + done.stderr
    unreachable = [line for line in said.splitlines() if _UNREACHABLE.search(line)]
    if done.returncode and unreachable:
        raise UnreachableError(unreachable[0])
    assert done.returncode == 0, f"{argv}: exit {done.returncode}: {said}"
    return said
