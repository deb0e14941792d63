"""What the job's interpreter has installed, asked through metadata only: nothing is imported there."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from workloads.provenance.software import canonical_name, installed_packages, packages_digest

_ASK = (
    "import importlib.metadata as m, json;"
    # Of several on the path, the first is the one that is imported.
    "found = [(d.metadata['Name'], d.version) for d in m.distributions() if d.metadata['Name']];"
    "print(json.dumps(dict(reversed(found))))"
)
_ASK_BYTECODE = """
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
"""Distributions that ``orchestrate wheel`` makes."""


@dataclass(frozen=True, slots=True)
class Packages:
    """Distributions of one interpreter; ``versions`` is None when it could not be asked."""

    python: str
    versions: dict[str, str] | None
    problem: str = ""

    @classmethod
    def of(cls, python: str | None) -> Packages:
        """Ask an interpreter; None or our own path asks this one without a process."""
        if python is None or python == sys.executable:
            return cls(python or sys.executable, installed_packages())
        try:
            answer = subprocess.run(
                # As a job sees it: without this shell's variables, with the user's own packages.
                [python, "-E", "-P", "-c", _ASK],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=True,
            )
            return cls(python, {canonical_name(k): v for k, v in json.loads(answer.stdout).items()})
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return cls(python, None, f"{type(error).__name__}: {error}")

    def missing(self, names: Iterable[str]) -> list[str]:
        """Which of these distributions it lacks; none when it could not be asked.

        Args:
            names: ``one|other`` is either of two, and told as the first.
        """
        if self.versions is None:
            return []
        ways = [name.split("|") for name in names]
        return sorted({way[0] for way in ways if not any(canonical_name(name) in self.versions for name in way)})

    def install_command(self, missing: Iterable[str]) -> str:
        """The command that installs what is missing; a package that no index offers for this torch is built."""
        names = list(missing)
        plain = [name for name in names if name not in BUILT_HERE]
        commands = [f"{self.python} -m pip install {' '.join(plain)}"] if plain else []
        built = [name for name in names if name in BUILT_HERE]
        commands += [f"orchestrate wheel {name} --python {self.python} --install" for name in built]
        return " && ".join(commands)

    @property
    def digest(self) -> str:
        """Digest of what may change a measurement; empty when it could not be asked."""
        if self.versions is None:
            return ""
        return packages_digest(self.versions)


def find_missing_bytecode(python: str, env: Mapping[str, str]) -> tuple[str, str] | None:
    """What is wrong, and what to do, when every rank must compile all of torch's modules before it imports them.

    Compiled modules are kept beside the sources by whoever imports them first, unless that place is read-only or a
    variable forbids it. None also when there is no torch in files, or nobody to ask.

    Args:
        env: variables that a job has.
    """
    try:
        answer = subprocess.run(
            [python, "-P", "-c", _ASK_BYTECODE],
            env=dict(env),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        facts = json.loads(answer.stdout)
        sources, kept, writable, forbidden = (facts[key] for key in ("sources", "kept", "writable", "forbidden"))
    except (OSError, ValueError, TypeError, KeyError, subprocess.SubprocessError):
        return None
    if not sources or kept or (writable and not forbidden):
        return None
    what = f"{sources} has no compiled modules: every rank compiles them when it starts, for seconds"
    if writable:
        tree = Path(sources) if sources.endswith(".py") else Path(sources).parent
        return what, shlex.join([python, "-m", "compileall", "-q", str(tree)])
    first = "unset PYTHONDONTWRITEBYTECODE; " if forbidden else ""
    return what, f"{first}export PYTHONPYCACHEPREFIX=FOLDER, one that you can write and jobs see"
