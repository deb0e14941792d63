"""Wheels that no index offers for the installed torch: their sources, edits, settings and target interpreter.

``wheel_cache`` finds or builds a wheel, ``wheel_build`` does the build, and a recipe such as ``horovod_recipe`` holds
what is special about one package. A subprocess queries the target interpreter, so no framework is imported here.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from orchestrator.errors import InputError
from workloads.provenance.software import canonical_name

_QUERY = """
import importlib.metadata, importlib.util, json, os, platform, runpy, sys, sysconfig
sys.path[:] = [p for p in sys.path if p]  # not the current folder
own = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
own |= {os.path.join(p, "lib-dynload") for p in own}
spec = importlib.util.find_spec("torch")
places = list(spec.submodule_search_locations or []) if spec else []
# Running version.py alone takes milliseconds, importing torch seconds.
torch = runpy.run_path(os.path.join(places[0], "version.py")) if places else {}
named = [d for d in importlib.metadata.distributions() if d.metadata["Name"]]
print(json.dumps({
    "tag": "cp%d%d%s" % (*sys.version_info[:2], getattr(sys, "abiflags", "")),
    "machine": platform.machine(),
    "torch": torch.get("__version__") or "",
    "cuda": torch.get("cuda") or "",
    "include": sysconfig.get_path("include"),
    "scripts": sysconfig.get_path("scripts"),
    "paths": [p for p in sys.path if os.path.isdir(p) and os.path.realpath(p) not in own],
    "packages": {d.metadata["Name"]: d.version for d in reversed(named)},
}))
"""
_QUERY_TIMEOUT_S = 60


class Flavour(StrEnum):
    """Which library communicates tensors on GPUs."""

    CPU = "cpu"
    """None: the wheel has no GPU support."""
    NCCL = "nccl"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPython:
    """The interpreter that a wheel is for."""

    python: str
    tag: str
    """``cp312``."""
    machine: str
    """``x86_64``."""
    torch: str
    cuda: str
    """The CUDA version torch was built with; empty: built without."""
    include: str
    """Folder of Python.h."""
    scripts: str
    paths: tuple[str, ...]
    """Its import path without the standard library."""
    packages: Mapping[str, str]
    """Canonical name -> version."""

    @classmethod
    def query(cls, python: Path) -> TargetPython:
        """Query an interpreter.

        Raises:
            InputError: it does not exist, does not answer, or has no torch.
        """
        found = shutil.which(python)
        if found is None:
            raise InputError("no such program", where=f"--python {python}", hint="name the interpreter of your jobs")
        # Not resolved: Python finds its virtual environment by the path it is started with (PEP 405).
        path = str(Path(found).absolute())
        try:
            answer = subprocess.run(
                [path, "-c", _QUERY], capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True
            )
            facts = json.loads(answer.stdout)
        except subprocess.CalledProcessError as error:
            raise InputError("this Python could not be queried", where=path, why=error.stderr.strip()) from error
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise InputError("this Python could not be queried", where=path, why=str(error)) from error
        if not facts["torch"]:
            raise InputError(
                "this Python has no torch, and the wheel is built against it",
                where=path,
                hint="install torch there, or name the interpreter of your jobs with --python",
            )
        packages = {canonical_name(name): version for name, version in facts.pop("packages").items()}
        return cls(python=path, paths=tuple(facts.pop("paths")), packages=packages, **facts)


@dataclass(frozen=True, slots=True)
class Edit:
    """One edit of the sources."""

    file: str
    old: str
    """Must occur exactly once."""
    new: str
    why: str


@dataclass(frozen=True, slots=True)
class BuildNeeds:
    """What a recipe adds to one build."""

    environment: Mapping[str, str]
    packages: Sequence[str]
    """Build requirements that the target lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to build one package."""

    name: str
    version: str
    sdist_sha256: str
    edits: tuple[Edit, ...]
    settings: Mapping[Flavour, Mapping[str, str]]
    """Environment variables of the build that change its result."""
    version_variable: str
    """Environment variable from which its ``setup.py`` takes a local version."""
    prepare: Callable[[TargetPython, Mapping[str, str], Flavour, Path], BuildNeeds]
    """(target, environment, flavour, scratch folder) -> build needs; raises OperationError for a missing tool."""
    smoke_test: Callable[[Flavour], str]
    """Python program that fails unless the installed wheel works and has this flavour."""

    def digest(self, environment: Mapping[str, str]) -> str:
        """Digest of sources, edits and settings."""
        edits = [asdict(edit) for edit in self.edits]
        content = json.dumps([self.sdist_sha256, edits, sorted(environment.items())])
        return hashlib.sha256(content.encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True)
class WheelSpec:
    """A wheel to find or build: everything its name in the cache identifies."""

    recipe: Recipe
    target: TargetPython
    flavour: Flavour

    @classmethod
    def of(cls, recipe: Recipe, target: TargetPython, flavour: Flavour | None) -> WheelSpec:
        """Choose the flavour: NCCL if torch has CUDA, unless one is given.

        Raises:
            InputError: NCCL is wanted for a torch without CUDA.
        """
        if flavour is Flavour.NCCL and not target.cuda:
            raise InputError(
                f"torch {target.torch} of {target.python} was built without CUDA, so a wheel with NCCL cannot be built",
                where="--nccl",
                hint="install a torch with CUDA there, or use --cpu",
            )
        return cls(recipe, target, flavour or (Flavour.NCCL if target.cuda else Flavour.CPU))

    @property
    def settings(self) -> Mapping[str, str]:
        return self.recipe.settings[self.flavour]

    @property
    def local_version(self) -> str:
        """Local version (PEP 440) that differs between builds of one release, so that pip replaces one by the other."""
        torch = re.sub(r"[^a-z0-9]+", ".", self.target.torch.lower()).strip(".")
        return f"torch{torch}.{self.flavour}.{self.recipe.digest(self.settings)}"

    @property
    def key(self) -> str:
        """Folder of this wheel in the cache."""
        t, r = self.target, self.recipe
        gpu = f"nccl-cuda{t.cuda}" if self.flavour is Flavour.NCCL else "cpu"
        return f"{r.name}-{r.version}-torch{t.torch}-{gpu}-{t.tag}-{t.machine}-{r.digest(self.settings)}"


def check_sdist(recipe: Recipe, path: Path) -> None:
    """Raise InputError unless this is the source archive of the recipe."""
    try:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise InputError("cannot be read", where=f"--sdist {path}", why=error.strerror or str(error)) from error
    if digest != recipe.sdist_sha256:
        raise InputError(
            f"this is not the source archive of {recipe.name} {recipe.version}",
            where=str(path),
            why=f"its SHA-256 is {digest}, expected {recipe.sdist_sha256}",
            hint=f"get it on a machine with network: {download_command(recipe)}",
        )


def download_command(recipe: Recipe) -> str:
    return f"pip download --no-deps --no-binary :all: {recipe.name}=={recipe.version}"
