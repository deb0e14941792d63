"""``cluster.toml`` -> ClusterProfile, and which target an invocation has. Imported by the login side only."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
from collections.abc import Callable
from importlib import resources as package_files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from orchestrator.cluster.profile import ClusterProfile, ClusterQueue, CpuNodes, GpuNodes
from orchestrator.cluster.value_types import expand
from orchestrator.errors import ClusterError, InputError, Mistake
from orchestrator.plugins import nearest
from orchestrator.toml_file import KeyPath, TomlError, decode, explain, locate, parse, show

__all__ = ["ClusterProfile", "choose", "load", "parse_file", "shipped"]

DEFAULT_FILE = "cluster.toml"


def parse_file(text: str, where: str) -> dict[str, ClusterProfile]:
    """Every profile of a cluster file, by name.

    Raises:
        ClusterError: the mistakes of the file, all of them.
    """
    try:
        document = parse(text)
    except TomlError as error:
        raise ClusterError([Mistake(f"{where}: {error.where}", error.what, error.hint)]) from error
    found = [
        Mistake(f"{where}: {key}", f"unknown key {show(key)}", nearest(key, ["cluster"]) or "tables are [cluster.NAME]")
        for key in document
        if key != "cluster"
    ]
    tables = document.get("cluster")
    if not isinstance(tables, dict) or not tables:
        raise ClusterError(found or [Mistake(where, "no cluster in this file", "add a table [cluster.NAME]")])
    profiles: dict[str, ClusterProfile] = {}
    for name, table in tables.items():
        place = f"{where}: cluster.{name}"
        if name == "local" or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            found.append(Mistake(place, f"{show(name)} cannot name a cluster", 'letters, digits, _ and -; not "local"'))
        elif not isinstance(table, dict):
            found.append(Mistake(place, f"{show(table)} is not a table", f"write [cluster.{name}]"))
        elif "name" in table:
            found.append(Mistake(f"{place}.name", 'unknown key "name"', f"the name is {name}, of the table"))
        else:
            try:
                profiles[name] = _profile(name, table)
            except ValidationError as error:
                found += [
                    Mistake(f"{where}: {locate(('cluster', name, *below), document)}", what, hint)
                    for details in error.errors(include_url=False)
                    for below, what, hint in explain(details, _unknown_key)
                ]
    if found:
        raise ClusterError(found)
    return profiles


def _profile(name: str, table: dict[str, Any]) -> ClusterProfile:
    places: dict[str, str] = {}
    if isinstance(table.get("scratch"), str):
        with contextlib.suppress(ValueError):  # reported at its own key
            places["scratch"] = expand(table["scratch"], {})
    return ClusterProfile.model_validate({**table, "name": name}, context=places)


def _unknown_key(place: KeyPath) -> str:
    """What the writer of an unknown key may have meant."""
    table: type[BaseModel] = ClusterProfile
    if "queue" in place:
        table = ClusterQueue
    elif place[0] == "gpu":
        table = GpuNodes
    elif place[0] == "cpu":
        table = CpuNodes
    keys = [field.alias or key for key, field in table.model_fields.items() if key != "name"]
    word = str(place[-1])
    return nearest(word, keys) or f"the keys here are: {', '.join([k for k in keys if word in k] or keys)}"


def shipped() -> dict[str, str]:
    """Text of each profile that comes with this package, by its name."""
    folder = package_files.files("templates") / "clusters"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    return {f.name.removesuffix(".toml"): f.read_text(encoding="utf-8") for f in files}


def load(path_or_name: str | Path, *, hostname: str | None = None) -> ClusterProfile:
    """The profile of a cluster file, of ``FILE:NAME`` where the file holds several, or of a shipped name.

    Args:
        path_or_name: what stands after ``--cluster``.
        hostname: chooses among several profiles of a file; None is this machine's.

    Raises:
        ClusterError: the file has mistakes.
        InputError: there is no such file and no such profile, or several and none is meant.
    """
    given = str(path_or_name)
    path, colon, name = given.rpartition(":")
    file, wanted = (Path(path), name) if colon and not Path(given).exists() else (Path(given), "")
    file = file.expanduser()
    if file.is_file():
        profiles = _read(file)
    elif given in shipped():
        profiles = parse_file(shipped()[given], f"shipped profile {given}")
    else:
        names = list(shipped())
        raise InputError(
            "no such cluster file, and no shipped profile of that name",
            where=given,
            hint=nearest(given, names) or f"shipped profiles: {', '.join(names)}",
        )
    if wanted:
        if wanted not in profiles:
            hint = nearest(wanted, profiles) or f"it has: {', '.join(profiles)}"
            raise InputError(f"there is no cluster {show(wanted)} in this file", where=str(file), hint=hint)
        return profiles[wanted]
    if len(profiles) == 1:
        return next(iter(profiles.values()))
    host = socket.gethostname() if hostname is None else hostname
    fitting = [profile for profile in profiles.values() if profile.matches(host)]
    if len(fitting) != 1:
        raise InputError(
            f"the file holds several clusters ({', '.join(profiles)})",
            where=given,
            why=f"{'several patterns match' if fitting else 'no hostname_pattern matches'} {host}",
            hint=f"name one: --cluster {given}:{next(iter(profiles))}",
        )
    return fitting[0]


def _read(file: Path) -> dict[str, ClusterProfile]:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(file)) from error
    try:
        return parse_file(decode(content), str(file))
    except TomlError as error:
        raise ClusterError([Mistake(f"{file}: {error.where}", error.what, error.hint)]) from error


def choose(
    *,
    local: bool,
    named: Path | None,
    cwd: Path,
    hostname: str,
    which: Callable[[str], str | None] = shutil.which,
    fqdn: Callable[[str], str] = socket.getfqdn,
) -> ClusterProfile | None:
    """Where runs go: None is this machine.

    In this order: ``--local``; what ``--cluster`` names; ``cluster.toml`` in the working directory; a shipped profile
    whose hostname pattern matches; this machine, unless it is a login node of a cluster nobody described.

    Raises:
        ClusterError: the file has mistakes.
        InputError: nothing is named and ``sbatch`` is here: most sites forbid training on a login node.
    """
    if local:
        return None
    if named is not None:
        return load(named, hostname=hostname)
    if (cwd / DEFAULT_FILE).is_file():
        return load(cwd / DEFAULT_FILE, hostname=hostname)
    on_slurm = which("sbatch") is not None
    # The full name may cost a look-up, which is made only where it can matter.
    names = {hostname} | ({fqdn(hostname)} if on_slurm else set())
    for name, text in shipped().items():
        # Only the profile that fits is read in full: it may name things that exist on its own machines only.
        pattern = parse(text)["cluster"][name].get("hostname_pattern", "")
        if pattern and any(re.search(pattern, host) for host in names):
            return parse_file(text, f"shipped profile {name}")[name]
    if on_slurm:
        raise InputError(
            "this machine submits to a Slurm cluster that no profile describes",
            where=hostname,
            why="training on a login node is forbidden at most sites, so it is never the default",
            hint="orchestrate init --cluster describes it, --cluster FILE names a file, --local takes this machine",
        )
    return None
