"""``cluster.toml`` -> ClusterProfile, and the target of an invocation. Imported by the login side only."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from orchestrator import toml_file
from orchestrator.cluster.profile import ClusterProfile, ClusterQueue, CpuNodes, GpuNodes
from orchestrator.cluster.value_types import expand
from orchestrator.errors import ClusterError, InputError, Mistake
from orchestrator.plugins import nearest
from orchestrator.shipped_files import toml_files
from orchestrator.toml_file import KeyPath, TomlError, TomlTable, show

__all__ = ["ClusterProfile", "choose", "load", "parse_file", "shipped"]

DEFAULT_FILE = "cluster.toml"


def parse_file(content: str | bytes, where: str) -> dict[str, ClusterProfile]:
    """Read every profile of a cluster file, by name.

    Raises:
        ClusterError: the file has errors; it holds all of them.
    """
    try:
        document = toml_file.parse(content)
    except TomlError as error:
        raise ClusterError([Mistake(f"{where}: {error.where}", error.what, error.hint)]) from error
    found = [
        Mistake(f"{where}: {key}", f"unknown key {show(key)}", nearest(key, ["cluster"]) or "write [cluster.NAME]")
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
            hint = 'use A-Z, a-z, 0-9, _ and -; not "local"'
            found.append(Mistake(place, f"{show(name)} cannot name a cluster", hint))
        elif not isinstance(table, dict):
            found.append(Mistake(place, f"{show(table)} is not a table", f"write [cluster.{name}]"))
        elif "name" in table:
            found.append(Mistake(f"{place}.name", 'unknown key "name"', f"the table names the cluster: {name}"))
        else:
            try:
                profiles[name] = _profile(name, table)
            except ValidationError as error:
                found += toml_file.mistakes(error, document, where, _unknown_key, ("cluster", name))
    if found:
        raise ClusterError(found)
    return profiles


def _profile(name: str, table: dict[str, Any]) -> ClusterProfile:
    places: dict[str, str] = {}
    if isinstance(table.get("scratch"), str):
        with contextlib.suppress(ValueError):  # validation of the key scratch reports it
            places["scratch"] = expand(table["scratch"], {})
    return ClusterProfile.model_validate({**table, "name": name}, context=places)


def _unknown_key(place: KeyPath) -> str:
    """Suggest what the writer of an unknown key meant."""
    tables: dict[str | int, type[TomlTable]] = {"gpu": GpuNodes, "cpu": CpuNodes}
    table = ClusterQueue if "queue" in place else tables.get(place[0], ClusterProfile)
    keys = [field.alias or key for key, field in table.model_fields.items() if key != "name"]
    word = str(place[-1])
    return nearest(word, keys) or f"the keys here are: {', '.join([k for k in keys if word in k] or keys)}"


def shipped() -> dict[str, str]:
    """Text of each shipped profile, by its name."""
    return toml_files("clusters")


def shipped_for(hosts: Iterable[str]) -> str:
    """Name of the shipped profile whose host pattern matches one of a machine's names; empty where none does."""
    for name, text in shipped().items():
        # Profiles of other sites are not validated: they may name files and variables that exist there only.
        pattern = toml_file.parse(text)["cluster"][name].get("hostname_pattern", "")
        if pattern and any(re.search(pattern, host) for host in hosts):
            return name
    return ""


def load(path_or_name: str | Path, *, hostname: str | None = None) -> ClusterProfile:
    """Read the profile that ``--cluster`` names: ``FILE``, ``FILE:NAME`` where it holds several, or a shipped name.

    Args:
        path_or_name: value of ``--cluster``.
        hostname: chooses among several profiles of a file; None: this machine's.

    Raises:
        ClusterError: the file has errors.
        InputError: there is no such file and no such profile, or a file holds several and none is named.
    """
    given = str(path_or_name)
    path, colon, name = given.rpartition(":")
    file, wanted = (Path(path), name) if colon and not Path(given).exists() else (Path(given), "")
    file = file.expanduser()
    if file.is_file():
        try:
            content = file.read_bytes()
        except OSError as error:
            raise InputError(f"cannot read the cluster file: {error.strerror}", where=str(file)) from error
        profiles = parse_file(content, str(file))
    elif given in shipped():
        profiles = parse_file(shipped()[given], f"shipped profile {given}")
    else:
        names = list(shipped())
        raise InputError(
            "no such cluster file and no such shipped profile",
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


def choose(
    *,
    local: bool,
    named: Path | None,
    cwd: Path,
    hostname: str,
    which: Callable[[str], str | None] = shutil.which,
    fqdn: Callable[[str], str] = socket.getfqdn,
) -> ClusterProfile | None:
    """Choose the target of runs; None is this machine.

    In this order: ``--local``; what ``--cluster`` names; ``cluster.toml`` in the working directory; a shipped profile
    whose hostname pattern matches; this machine, unless it is a login node of a cluster without a profile.

    Raises:
        ClusterError: the file has errors.
        InputError: nothing is named and ``sbatch`` exists here: most sites forbid training on a login node.
    """
    if local:
        return None
    if named is not None:
        return load(named, hostname=hostname)
    if (cwd / DEFAULT_FILE).is_file():
        return load(cwd / DEFAULT_FILE, hostname=hostname)
    on_slurm = which("sbatch") is not None
    # getfqdn may wait for a name server, so only machines with Slurm call it.
    if name := shipped_for({hostname} | ({fqdn(hostname)} if on_slurm else set())):
        return parse_file(shipped()[name], f"shipped profile {name}")[name]
    if on_slurm:
        raise InputError(
            "this machine submits to a Slurm cluster that has no profile",
            where=hostname,
            why="most sites forbid training on a login node, so it is never the default",
            hint="run orchestrate init --cluster, or name a file with --cluster FILE, or use this machine with --local",
        )
    return None
