"""Build Horovod for the installed torch, once, and print the path of the wheel.

Example: orchestrate wheel horovod --nccl --python .venv/bin/python --install
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli import output
from workloads.lazy import lazy_imports

with lazy_imports(__name__):
    from orchestrator.environment import horovod_recipe, wheel_cache, wheels

ORDER = 160


class Package(StrEnum):
    """What can be built."""

    HOROVOD = "horovod"


def wheel(
    package: Annotated[Package, typer.Argument(help="Package to build.")],
    nccl: Annotated[
        bool | None,
        typer.Option(
            "--nccl/--cpu",
            help="Build with or without GPU support; as the installed torch by default.",
            show_default=False,
        ),
    ] = None,
    python: Annotated[
        Path, typer.Option("--python", help="Interpreter of your jobs, which has torch.", show_default=False)
    ] = Path(sys.executable),
    sdist: Annotated[
        Path | None, typer.Option("--sdist", help="Source archive, for a machine without network.")
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            "--cache", help="Folder that keeps wheels; ~/.cache/orchestrate by default.", envvar="ORCHESTRATE_CACHE"
        ),
    ] = None,
    install: Annotated[bool, typer.Option("--install", help="Also install it into that interpreter.")] = False,
    json: output.JsonOption = False,
) -> None:
    recipe = {Package.HOROVOD: horovod_recipe.HOROVOD}[package]
    flavour = None if nccl is None else wheels.Flavour.NCCL if nccl else wheels.Flavour.CPU
    build = wheels.WheelSpec.of(recipe, wheels.TargetPython.query(python), flavour)
    made = wheel_cache.get_wheel(build, wheel_cache.cache_folder(cache), sdist=sdist, report=output.print_message)
    if install:
        wheel_cache.install(made.path, build.target)
        output.print_message(f"installed into {build.target.python}")
    if json:
        facts = {"wheel": made.path, "built": made.built, "flavour": build.flavour, "torch": build.target.torch}
        output.print_json({**facts, "python": build.target.python, "installed": install})
    else:
        typer.echo(made.path)
