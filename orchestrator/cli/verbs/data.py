"""Look after data sets.

Example: orchestrate data list
"""

from __future__ import annotations

import difflib
import importlib.metadata
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli import output
from orchestrator.cli.options import DataOption
from orchestrator.errors import InputError, OperationError, OrchestrateError, PartlyDoneError
from orchestrator.workspace import Workspace
from workloads import registry

if TYPE_CHECKING:
    from workloads.registry import DatasetDeclaration, Weights

ORDER = 150

app = typer.Typer()

Names = Annotated[
    list[str],
    typer.Argument(metavar="NAME", help="Data sets, such as mnist or imagefolder/cifar10, and weights/MODEL."),
]
SomeNames = Annotated[
    list[str] | None, typer.Argument(metavar="NAME", help="Data sets; without one, all that can be found.")
]


@app.command("list")
def list_(
    format: output.FormatOption = output.Format.TABLE,  # noqa: A002
    json: output.JsonFormatOption = False,
    data: DataOption = None,
) -> None:
    """Show the data sets there are and whether they are usable.

    Example: orchestrate data list --json
    """
    root = _root(data)
    columns = ["dataset", "usable", "image_size", "channels", "classes", "num_train", "num_test", "summary"]
    output.rows([_row(root, name) for name in _all_names(root)], columns, output.chosen(format, json))


@app.command()
def check(
    names: SomeNames = None,
    format: output.FormatOption = output.Format.TABLE,  # noqa: A002
    json: output.JsonFormatOption = False,
    data: DataOption = None,
) -> None:
    """Look whether data sets are there and whole, without reading all of them.

    Ends with exit code 1 when something must be fixed.

    Example: orchestrate data check mnist imagefolder/cifar10
    """
    root = _root(data)
    declarations = _declarations(names or _all_names(root))
    found = [
        {"dataset": name, "where": problem.where, "what": problem.what, "fix": problem.fix}
        for name, declaration in declarations.items()
        for problem in declaration.check(root, name)
    ]
    chosen = output.chosen(format, json)
    if found or chosen.for_machines:
        output.rows(found, ["dataset", "where", "what", "fix"], chosen)
    output.talk(f"data sets checked: {len(declarations)}; problems: {len(found)}")
    if found:
        raise typer.Exit(1)


@app.command()
def prepare(names: Names, data: DataOption = None) -> None:
    """Fetch, verify and decode data sets, so that jobs need no network and start at once; safe to repeat.

    Example: orchestrate data prepare mnist --data ~/data

    Example: orchestrate data prepare imagefolder/cifar10

    Example: orchestrate data prepare weights/resnet50
    """
    root = _root(data)
    failures = []
    declarations = _declarations(names)
    for name, declaration in declarations.items():
        try:
            _insist_on_packages(declaration, name)
            declaration.prepare(root, name, output.talk)
        except OrchestrateError as error:
            if len(declarations) == 1:
                raise
            output.talk(error.text())
            failures.append(name)
    if failures:
        all_failed = len(failures) == len(declarations)
        what = f"{len(failures)} of {len(declarations)} data sets could not be prepared: {', '.join(failures)}"
        raise OperationError(what) if all_failed else PartlyDoneError(what, hint="the others are ready; prepare again")


def _root(data: Path | None) -> Path | None:
    """The data folder: of the option or the environment, else of the cluster file that ``plan`` would take here."""
    workspace = Workspace.at(data_root=data)
    if workspace.data_root is not None:
        return workspace.data_root
    import socket

    from orchestrator.cluster import cluster_file

    named = os.environ.get("ORCHESTRATE_CLUSTER")
    try:
        profile = cluster_file.choose(
            local=False, named=Path(named) if named else None, cwd=Path.cwd(), hostname=socket.gethostname()
        )
    except OrchestrateError:
        return None  # said by the verbs that need a cluster
    return workspace.with_data(profile.data if profile else "").data_root


def _all_names(root: Path | None) -> list[str]:
    """Every single data set, and the members of families that are on disk."""
    names = []
    for name, declaration in registry.datasets().items():
        if not name.endswith("/*"):
            names.append(name)
        elif declaration.members is not None:
            names += declaration.members(root)
    return names


def _declarations(names: list[str]) -> dict[str, DatasetDeclaration | Weights]:
    """Of data sets, and of pretrained weights. Raises InputError for a name that neither has."""
    known = registry.datasets()
    found = {name: registry.weights(name) or registry.find(known, name) for name in names}
    for name, declaration in found.items():
        if declaration is None:
            own = [registry.WEIGHTS + model for model, d in registry.models().items() if d.weights]
            near = difflib.get_close_matches(name, [*known, *own], n=1)
            raise InputError(
                f"no data set is named {name!r}",
                why=f"there are {', '.join([*known, *own])}",
                hint=f"did you mean {near[0]}?" if near else "a folder of images is imagefolder/NAME",
            )
    return {name: declaration for name, declaration in found.items() if declaration is not None}


def _insist_on_packages(declaration: DatasetDeclaration | Weights, name: str) -> None:
    for package in declaration.packages:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise OperationError(
                f"{name} needs the package {package}, which is not installed here",
                hint="pip install 'orchestrate-hpc[torch]', or prepare where jobs run",
            ) from None


def _row(root: Path | None, name: str) -> dict[str, Any]:
    declaration = registry.find(registry.datasets(), name)
    assert declaration is not None, "it was listed"
    shape = declaration.shape(root, name)
    row: dict[str, Any] = {"dataset": name, "usable": not declaration.check(root, name), "summary": declaration.summary}
    if shape is not None:
        for column in ("image_size", "channels", "classes", "num_train", "num_test"):
            row[column] = getattr(shape, column)
    return row
