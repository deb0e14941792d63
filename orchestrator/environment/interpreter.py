"""The packages of the jobs' interpreter, from their metadata: nothing is imported there."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from workloads.provenance.software import canonical_name, installed_packages, packages_digest

_QUERY = (
    "import importlib.metadata as m, json;"
    # The first of several on the path is the one that is imported.
    "found = [(d.metadata['Name'], d.version) for d in m.distributions() if d.metadata['Name']];"
    "print(json.dumps(dict(reversed(found))))"
)
_QUERY_BYTECODE = """
import importlib.util, json, os, sys, tempfile
spec = importlib.util.find_spec("torch")
origin = (spec and spec.origin) or ""
cached = spec.cached if origin.endswith(".py") and os.path.isfile(origin) else ""
folder = os.path.dirname(cached)
while folder and not os.path.exists(folder):
    folder = os.path.dirname(folder)
try:
    tempfile.TemporaryFile(dir=folder).close()
    writable = True
except OSError:
    writable = False
package = origin.endswith("__init__.py")
facts = {"sources": (os.path.dirname(origin) if package else origin) if cached else "", "kept": os.path.exists(cached)}
print(json.dumps(facts | {"forbidden": sys.dont_write_bytecode, "writable": writable}))
"""
_TIMEOUT_S = 30
BUILT_HERE = frozenset({"horovod"})
"""Distributions that ``orchestrate wheel`` builds."""


def _output(argv: list[str], env: Mapping[str, str] | None = None) -> str:
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout


@dataclass(frozen=True, slots=True)
class Packages:
    """Distributions of one interpreter; ``versions`` is None if it could not be queried."""

    python: str
    versions: dict[str, str] | None
    problem: str = ""

    @classmethod
    def of(cls, python: str | None) -> Packages:
        """Query an interpreter; None and our own path need no process."""
        if python is None or python == sys.executable:
            return cls(python or sys.executable, installed_packages())
        try:
            # As a job: without PYTHON* variables of this shell (-E), with the user's site-packages.
            versions = json.loads(_output([python, "-E", "-P", "-c", _QUERY]))
            return cls(python, {canonical_name(k): v for k, v in versions.items()})
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return cls(python, None, f"{type(error).__name__}: {error}")

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return which distributions it lacks, ``one|other`` as the first of two; none if it could not be queried."""
        if self.versions is None:
            return []
        ways = [name.split("|") for name in names]
        return sorted({way[0] for way in ways if not any(canonical_name(name) in self.versions for name in way)})

    def install_command(self, missing: Iterable[str]) -> str:
        """Return the command that installs what is missing, and builds what no index offers for this torch."""
        names = list(missing)
        plain = [name for name in names if name not in BUILT_HERE]
        commands = [f"{self.python} -m pip install {' '.join(plain)}"] if plain else []
        built = [name for name in names if name in BUILT_HERE]
        commands += [f"orchestrate wheel {name} --python {self.python} --install" for name in built]
        return " && ".join(commands)

    @property
    def digest(self) -> str:
        """Digest of the packages that may change a measurement; empty if it could not be queried."""
        return "" if self.versions is None else packages_digest(self.versions)


def find_missing_bytecode(python: str, env: Mapping[str, str]) -> tuple[str, str] | None:
    """Return what is wrong and how to fix it if every rank compiles all modules of torch when it starts, else None.

    Python caches compiled modules beside the sources (PEP 3147), unless that folder is read-only or ``env``, the jobs'
    environment, has PYTHONDONTWRITEBYTECODE. None also without torch, and if the interpreter could not be queried.
    """
    try:
        facts = json.loads(_output([python, "-P", "-c", _QUERY_BYTECODE], env))
        sources, kept, writable, forbidden = (facts[key] for key in ("sources", "kept", "writable", "forbidden"))
    except (OSError, ValueError, TypeError, KeyError, subprocess.SubprocessError):
        return None
    if not sources or kept or (writable and not forbidden):
        return None
    what = f"{sources} has no compiled modules: every rank spends seconds on compiling them when it starts"
    if writable:
        tree = Path(sources) if sources.endswith(".py") else Path(sources).parent
        return what, shlex.join([python, "-m", "compileall", "-q", str(tree)])
    first = "unset PYTHONDONTWRITEBYTECODE; " if forbidden else ""
    return what, f"{first}export PYTHONPYCACHEPREFIX=FOLDER, one that you can write and jobs see"
