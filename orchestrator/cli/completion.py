"""What the shell offers behind a verb: runs, columns, keys, studies, clusters. Never an error: only a key was hit."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
from collections.abc import Iterable, MutableMapping
from pathlib import Path

import typer

from orchestrator.errors import OrchestrateError

_BEFORE = "_ORCHESTRATE_BEFORE"
"""The environment variable with what bash has of a word before the piece that it asks for."""


def join_words(environ: MutableMapping[str, str]) -> None:
    """Undo that bash takes words apart at each ``=``, which labels and ``--set`` are full of.

    Args:
        environ: COMP_WORDS and COMP_CWORD, as the script for bash sets them, a word a line; changed in place.
    """
    words: list[str] = []
    in_pieces = False
    for piece in environ["COMP_WORDS"].split("\n")[: int(environ["COMP_CWORD"]) + 1]:
        in_pieces = piece == "=" or (in_pieces and words[-1].endswith("="))
        if in_pieces and words:
            words[-1] += piece
        else:
            words.append(piece)
    before = ""
    if in_pieces:
        if words[-1].startswith("--"):
            words[-1:] = words[-1].split("=", 1)
        before, assigned, words[-1] = words[-1].rpartition("=")
        before += assigned
    environ.update({"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1), _BEFORE: before})


def _fitting(names: Iterable[str], incomplete: str) -> list[str]:
    """Those that begin so, without what bash has already."""
    before = os.environ.get(_BEFORE, "")
    return [name.removeprefix(before) for name in names if name.startswith(before + incomplete)]


def run_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Labels of the runs of this folder, and ids once one is begun."""
    from orchestrator.workspace import DEFAULT_DATABASE, Workspace

    try:
        workspace = Workspace.at(database=str(ctx.params.get("database") or DEFAULT_DATABASE))
        if not workspace.has_database:
            return []
        from db.connect import open_store
        from db.queries import run_records

        with open_store(workspace.database, read_only=True) as store:
            known = run_records(store).values()
    except (OrchestrateError, OSError):
        return []
    names = [record.label for record in known] + [record.run_id for record in known if incomplete]
    return _fitting(dict.fromkeys(names), incomplete)


def study_names(incomplete: str) -> list[str]:
    """Starter starter_studies."""
    from orchestrator.config import starter_studies

    return [name for name in starter_studies.names() if name.startswith(incomplete)]


def cluster_names(incomplete: str) -> list[str]:
    """What ``--cluster`` takes: shipped profiles, and files here or in a folder here."""
    folder, slash, begun = incomplete.rpartition("/")
    files: list[str] = []
    with contextlib.suppress(OSError):
        where = Path(folder + slash or ".")
        found = (where.glob(f"{glob.escape(begun)}{rest}") for rest in ("*.toml", "*/*.toml"))
        files = sorted(folder + slash + str(path.relative_to(where)) for path in itertools.chain(*found))
    return [*profile_names(incomplete), *files]


def settings(incomplete: str) -> list[str]:
    """``KEY=`` of ``--set``; of the only key that is meant, what it may be: installed names, or its default.

    With a default there are two words, so that a shell stops behind the ``=`` that they share.
    """
    from orchestrator.config.keys import KEYS

    key, assigned, _ = (os.environ.get(_BEFORE, "") + incomplete).partition("=")
    meant = [name for name in KEYS if (name == key if assigned else name.startswith(key))]
    if len(meant) > 1:
        return [f"{name}=" for name in meant]
    return _fitting([text for name in meant for text in _worded(name)], incomplete)


def _worded(key: str) -> list[str]:
    from orchestrator.config.keys import DEFAULTS
    from orchestrator.plugins import Plugins
    from orchestrator.toml_file import show
    from workloads.contract import EXECUTION_KEYS

    if key in ("model", "dataset", "strategy"):
        return [f"{key}={name.removesuffix('*')}" for name in Plugins.installed().names(key)]
    default = DEFAULTS[key]
    if default is None or key in EXECUTION_KEYS:
        return [f"{key}="]
    return [f"{key}=", f"{key}={default if isinstance(default, str) else show(default)}"]


def column(incomplete: str) -> list[str]:
    """A column of results."""
    from db.queries import SUMMARY_COLUMNS

    return [name for name in SUMMARY_COLUMNS if name.startswith(incomplete)]


def columns(incomplete: str) -> list[str]:
    """The last of several columns with commas between."""
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in column(last)]


def profile_names(incomplete: str) -> list[str]:
    """Shipped profiles of clusters."""
    from orchestrator.cluster import cluster_file

    return [name for name in cluster_file.shipped() if name.startswith(incomplete)]
