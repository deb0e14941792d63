"""What a shell offers for an argument: runs, columns, keys, studies, clusters. Errors are never shown."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
from collections.abc import Iterable, MutableMapping
from pathlib import Path

import typer

from orchestrator.errors import OrchestrateError
from orchestrator.workspace import DEFAULT_DATABASE, Workspace
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from db import connect, queries
    from orchestrator import plugins, toml_file
    from orchestrator.cluster import cluster_file
    from orchestrator.config import keys, starter_studies
    from workloads import contract

_BEFORE = "_ORCHESTRATE_BEFORE"
"""Environment variable with the part of a word that bash keeps in front of the piece to be completed."""


def join_words(environ: MutableMapping[str, str]) -> None:
    """Join the words that bash splits at each ``=`` (readline's COMP_WORDBREAKS), as in labels and ``--set``.

    Changes COMP_WORDS, one word a line, and COMP_CWORD, as the bash script sets them.
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
        before, equals, words[-1] = words[-1].rpartition("=")
        before += equals
    environ.update({"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1), _BEFORE: before})


def _matching(names: Iterable[str], incomplete: str) -> list[str]:
    """Return the names that begin so, without the part that bash keeps."""
    before = os.environ.get(_BEFORE, "")
    return [name.removeprefix(before) for name in names if name.startswith(before + incomplete)]


def run_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Labels of the runs of this folder, and run ids once one is begun."""
    try:
        workspace = Workspace.at(database=str(ctx.params.get("database") or DEFAULT_DATABASE))
        if not workspace.has_database:
            return []
        with connect.open_store(workspace.database, read_only=True) as store:
            records = queries.run_records(store).values()
    except (OrchestrateError, OSError):
        return []
    names = [record.label for record in records] + [record.run_id for record in records if incomplete]
    return _matching(dict.fromkeys(names), incomplete)


def study_names(incomplete: str) -> list[str]:
    """Starter studies."""
    return [name for name in starter_studies.names() if name.startswith(incomplete)]


def profile_names(incomplete: str) -> list[str]:
    """Shipped profiles of clusters."""
    return [name for name in cluster_file.shipped() if name.startswith(incomplete)]


def cluster_names(incomplete: str) -> list[str]:
    """What ``--cluster`` takes: shipped profiles, and TOML files here or one folder below."""
    folder, slash, begun = incomplete.rpartition("/")
    files: list[str] = []
    with contextlib.suppress(OSError):
        where = Path(folder + slash or ".")
        found = (where.glob(f"{glob.escape(begun)}{rest}") for rest in ("*.toml", "*/*.toml"))
        files = sorted(folder + slash + str(path.relative_to(where)) for path in itertools.chain(*found))
    return [*profile_names(incomplete), *files]


def settings(incomplete: str) -> list[str]:
    """What ``--set`` takes: ``KEY=``, and once only one key matches, its values.

    A key with a default gives two words, so that the shell stops after the ``=`` that they share.
    """
    key, equals, _ = (os.environ.get(_BEFORE, "") + incomplete).partition("=")
    matching = [name for name in keys.KEYS if (name == key if equals else name.startswith(key))]
    if len(matching) > 1:
        return [f"{name}=" for name in matching]
    return _matching([word for name in matching for word in _assignments(name)], incomplete)


def _assignments(key: str) -> list[str]:
    if key in ("model", "dataset", "strategy"):
        return [f"{key}={name.removesuffix('*')}" for name in plugins.Plugins.installed().names(key)]
    default = keys.DEFAULTS[key]
    if default is None or key in contract.EXECUTION_KEYS:
        return [f"{key}="]
    return [f"{key}=", f"{key}={default if isinstance(default, str) else toml_file.show(default)}"]


def column(incomplete: str) -> list[str]:
    """A column of results."""
    return [name for name in queries.SUMMARY_COLUMNS if name.startswith(incomplete)]


def columns(incomplete: str) -> list[str]:
    """The last of several columns with commas between."""
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in column(last)]
