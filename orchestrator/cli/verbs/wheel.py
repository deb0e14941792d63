"""Build Horovod for the installed torch, once, and print where the wheel is.

Example: orchestrate wheel horovod --nccl --python .venv/bin/python --install
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli import output

ORDER = 160


class Package(StrEnum):
    """What can be built."""

    HOROVOD = "horovod"


def wheel(
    package: Annotated[Package, typer.Argument(help="Which package.")],
    nccl: Annotated[
        bool | None,
        typer.Option(
            "--nccl/--cpu", help="With or without GPUs; as the installed torch, unless said.", show_default=False
        ),
    ] = None,
    python: Annotated[
        Path, typer.Option("--python", help="The interpreter of your jobs, which has torch.", show_default=False)
    ] = Path(sys.executable),
    sdist: Annotated[
        Path | None, typer.Option("--sdist", help="The source archive, on a machine without network.")
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            "--cache",
            help="Where wheels are kept; ~/.cache/orchestrate, unless said.",
            envvar="ORCHESTRATE_CACHE",
        ),
    ] = None,
    install: Annotated[bool, typer.Option("--install", help="Also install it into that interpreter.")] = False,
    json: output.JsonOption = False,
) -> None:
    from orchestrator.environment import wheel_cache, wheels
    from orchestrator.environment.horovod_recipe import HOROVOD

    wanted = None if nccl is None else wheels.Flavour.NCCL if nccl else wheels.Flavour.CPU
    order = wheels.Order.of({Package.HOROVOD: HOROVOD}[package], wheels.Target.ask(python), wanted)
    made = wheel_cache.obtain(order, wheel_cache.cache_folder(cache), sdist=sdist, say=output.talk)
    if install:
        wheel_cache.install(made.path, order.target)
        output.talk(f"installed into {order.target.python}")
    if json:
        facts = {"wheel": made.path, "built": made.built, "flavour": order.flavour, "torch": order.target.torch}
        output.facts({**facts, "python": order.target.python, "installed": install})
    else:
        typer.echo(made.path)
