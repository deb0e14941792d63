"""Look after data sets.

Example: orchestrate data list
"""

from __future__ import annotations

import difflib
import importlib.metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli import options, output
from orchestrator.cli.refresh import default_cluster
from orchestrator.errors import InputError, OperationError, OrchestrateError, PartlyDoneError
from orchestrator.workspace import Workspace
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from workloads import registry

ORDER = 150

app = typer.Typer()


@app.command("list")
def list_(
    format: output.FormatOption = output.Format.TABLE,  # noqa: A002
    json: output.JsonFormatOption = False,
    data: options.DataOption = None,
) -> None:
    """List the data sets, and whether they are usable.

    Example: orchestrate data list --json
    """
    root = _data_root(data)
    columns = ["dataset", "usable", "image_size", "channels", "classes", "num_train", "num_test", "summary"]
    output.print_rows([_row(root, name) for name in _known_names(root)], columns, output.resolve_format(format, json))


@app.command()
def check(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Data sets; all known ones by default.")
    ] = None,
    format: output.FormatOption = output.Format.TABLE,  # noqa: A002
    json: output.JsonFormatOption = False,
    data: options.DataOption = None,
) -> None:
    """Check that data sets exist and are complete, without reading all of them.

    The exit code is 1 when something must be fixed.

    Example: orchestrate data check mnist imagefolder/cifar10
    """
    root = _data_root(data)
    declarations = _declarations(names or _known_names(root))
    found = [
        {"dataset": name, "where": problem.where, "what": problem.what, "fix": problem.fix}
        for name, declaration in declarations.items()
        for problem in declaration.check(root, name)
    ]
    style = output.resolve_format(format, json)
    if found or style.for_machines:
        output.print_rows(found, ["dataset", "where", "what", "fix"], style)
    output.print_message(f"data sets checked: {len(declarations)}; problems: {len(found)}")
    if found:
        raise typer.Exit(1)


@app.command()
def prepare(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME", help="Data sets, such as mnist or imagefolder/cifar10, and weights/MODEL."),
    ],
    data: options.DataOption = None,
) -> None:
    """Download, verify and decode data sets, so that jobs need no network and start at once; safe to repeat.

    Example: orchestrate data prepare mnist --data ~/data

    Example: orchestrate data prepare imagefolder/cifar10

    Example: orchestrate data prepare weights/resnet50
    """
    root = _data_root(data)
    failures = []
    declarations = _declarations(names)
    for name, declaration in declarations.items():
        try:
            _require_packages(declaration, name)
            declaration.prepare(root, name, output.print_message)
        except OrchestrateError as error:
            if len(declarations) == 1:
                raise
            output.print_message(error.text())
            failures.append(name)
    if failures:
        what = f"{len(failures)} of {len(declarations)} data sets could not be prepared: {', '.join(failures)}"
        if len(failures) == len(declarations):
            raise OperationError(what)
        raise PartlyDoneError(what, hint=f"fix what is named above, then orchestrate data prepare {' '.join(failures)}")


def _data_root(data: Path | None) -> Path | None:
    """Return the data folder of the option or the environment, else of the cluster file that ``plan`` reads here."""
    workspace = Workspace.at(data_root=data)
    if workspace.data_root is not None:
        return workspace.data_root
    try:
        profile = default_cluster()
    except OrchestrateError:
        return None  # the verbs that need a cluster report it
    return workspace.with_data(profile.data if profile else "").data_root


def _known_names(root: Path | None) -> list[str]:
    """Return every data set, and of families such as ``imagefolder/*`` the members on disk."""
    names = []
    for name, declaration in registry.datasets().items():
        if not name.endswith("/*"):
            names.append(name)
        elif declaration.members is not None:
            names += declaration.members(root)
    return names


def _declarations(names: list[str]) -> dict[str, registry.DatasetDeclaration | registry.Weights]:
    """Return the declarations of data sets and pretrained weights; raise InputError for a name that is neither."""
    known = registry.datasets()
    found = {name: registry.weights(name) or registry.find(known, name) for name in names}
    for name, declaration in found.items():
        if declaration is None:
            weights = [registry.WEIGHTS + model for model, d in registry.models().items() if d.weights]
            near = difflib.get_close_matches(name, [*known, *weights], n=1)
            raise InputError(
                f"no data set is named {name!r}",
                why=f"there are {', '.join([*known, *weights])}",
                hint=f"did you mean {near[0]}?" if near else "a folder of images is imagefolder/NAME",
            )
    return {name: declaration for name, declaration in found.items() if declaration is not None}


def _require_packages(declaration: registry.DatasetDeclaration | registry.Weights, name: str) -> None:
    for package in declaration.packages:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise OperationError(
                f"{name} needs the package {package}, which is not installed here",
                hint="pip install 'orchestrate-hpc[torch]', or prepare it where jobs run",
            ) from None


def _row(root: Path | None, name: str) -> dict[str, Any]:
    declaration = registry.find(registry.datasets(), name)
    assert declaration is not None, "it was listed"
    shape = declaration.shape(root, name)
    row: dict[str, Any] = {"dataset": name, "usable": not declaration.check(root, name), "summary": declaration.summary}
    columns = ("image_size", "channels", "classes", "num_train", "num_test") if shape is not None else ()
    return row | {column: getattr(shape, column) for column in columns}
