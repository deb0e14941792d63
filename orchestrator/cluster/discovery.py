"""``init --cluster``: the cluster file for this login node, a shipped profile or made from what Slurm reports."""

from __future__ import annotations

import getpass
import json
import os
import shlex
import shutil
import socket
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path

from orchestrator.cluster import cluster_file, cluster_file_writer, sample_scripts, site_facts
from orchestrator.cluster.job_script import DEFAULT_PATH
from orchestrator.cluster.site_facts import Run
from orchestrator.errors import InputError, OperationError
from orchestrator.plugins import nearest

_SCRATCH_VARIABLES = ("SCRATCH", "SCRATCHDIR", "WORK")


@dataclass(frozen=True, slots=True)
class NewClusterFile:
    """A cluster file that is not written yet."""

    text: str
    name: str
    """Of the cluster."""
    origin: str
    """Source of its facts, for people."""
    notes: tuple[str, ...] = ()
    """What the user still has to set."""


def compose(profile: str | None, run: Run, *, hosts: tuple[str, ...] | None = None) -> NewClusterFile:
    """Make the cluster file for this login node.

    Args:
        profile: a shipped profile; None: the one whose host pattern matches, else what Slurm reports.
        run: runs a client command.
        hosts: names of this machine, the full one last; None looks them up.

    Raises:
        InputError: no such profile, or no Slurm here.
        OperationError: Slurm does not answer, or reports no nodes.
    """
    hosts = hosts or (socket.gethostname(), socket.getfqdn())
    try:
        user = getpass.getuser()
    except (KeyError, OSError) as error:
        raise InputError("this account has no user name on this machine", hint="set USER") from error
    name = cluster_file.shipped_for(hosts) if profile is None else profile
    if not name and profile is None:
        return _from_slurm(run, user, hosts[-1])
    shipped = cluster_file.shipped()
    if name not in shipped:
        hint = nearest(name, shipped) or f"there are: {', '.join(shipped)}"
        raise InputError(f"there is no shipped profile {json.dumps(name)}", hint=hint)
    reason = f", whose hosts match {hosts[-1]}" if profile is None else ""
    return _from_shipped(name, shipped[name], run, user, f"the shipped profile {name}{reason}")


def _from_slurm(run: Run, user: str, host: str) -> NewClusterFile:
    answers, unanswered = site_facts.query(run, user)
    if "sinfo" not in answers:
        why = unanswered["sinfo"]
        if "no sinfo on PATH" in why:
            known = ", ".join(cluster_file.shipped())
            raise InputError(
                "there is no Slurm on this machine",
                where=host,
                why=why,
                hint=f"run this on a login node, or name a shipped profile with --profile: {known}",
            )
        raise OperationError(
            "Slurm does not report the cluster's nodes",
            where=f"{host}: {shlex.join(site_facts.COMMANDS['sinfo'])}",
            why=why,
            hint="try again, or name a shipped profile with --profile (init --cluster --list shows them)",
        )
    site = site_facts.parse(answers, unanswered)
    login = cluster_file_writer.Login(
        user=user,
        host=host,
        date=datetime.now(UTC).date().isoformat(),
        slurm_bin=slurm_bin(shutil.which("srun")),
        scratch=scratch(user, os.environ),
    )
    if not cluster_file_writer.tables(site):
        raise OperationError(
            "Slurm reports no nodes that this user may use",
            where=host,
            why=f"{len(site.groups)} groups of nodes, none in a partition that is up and open to {user}",
            hint="ask your site for an account, or name a shipped profile with --profile",
        )
    text = cluster_file_writer.text(site, login)
    name = cluster_file_writer.target(site)
    made = cluster_file.parse_file(text, "the file that was made from Slurm's answers")[name]
    notes = [f"{fault.what}{f' ({fault.hint})' if fault.hint else ''}" for fault in sample_scripts.profile_faults(made)]
    if not login.scratch:
        notes.append("scratch: no shared folder was found; set yours")
    if site.accounting and not site.accounts:
        notes.append("account: Slurm does not report yours; many sites reject jobs without one")
    return NewClusterFile(text, name, f"what Slurm {site.version} reports".replace("  ", " "), tuple(notes))


def _from_shipped(name: str, content: str, run: Run, user: str, origin: str) -> NewClusterFile:
    """Add the user's account to a profile where the site requires one or the user has several."""
    table = tomllib.loads(content)["cluster"][name]
    answers, unanswered = site_facts.query(run, user, ("config", "user", "associations"))
    site = site_facts.parse(answers, unanswered)
    suffixes = {table.get("account_suffix", ""), *(t.get("account_suffix", "") for t in table.get("gpu", {}).values())}
    mine = list(dict.fromkeys(reduce(str.removesuffix, suffixes, a.account) for a in site.accounts))
    chosen = reduce(str.removesuffix, suffixes, cluster_file_writer.account(site))
    if not table.get("needs_account") and len(mine) < 2:
        return NewClusterFile(content, name, origin)
    comment = f"# Your accounts: {', '.join(mine)}." if mine else "# Required here; Slurm does not report yours."
    head = f"[cluster.{name}]\n"
    text = content.replace(head, f"{head}{comment}\naccount = {json.dumps(chosen)}\n", 1)
    return NewClusterFile(text, name, origin, () if chosen else ("account: this site requires one; set yours",))


def slurm_bin(srun: str | None) -> str:
    """The folder of ``srun`` that jobs need on their PATH; empty where they have it anyway."""
    folder = str(Path(srun).parent) if srun else ""
    return "" if folder in DEFAULT_PATH.split(":") else folder


def scratch(user: str, environ: Mapping[str, str]) -> str:
    """The user's folder on a shared disk, with ``{user}`` in place of the name; empty where none is found."""
    usual = (f"/scratch/{user}", f"/scratch/users/{user}")
    for path in (*(environ.get(name, "") for name in _SCRATCH_VARIABLES), *usual):
        if path.startswith("/") and os.access(path, os.W_OK) and Path(path).is_dir():
            return "/".join("{user}" if part == user else part for part in path.rstrip("/").split("/"))
    return ""
