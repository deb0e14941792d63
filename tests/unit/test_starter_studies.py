"""The four published studies: their cells, the targets that can run them, and the extensions in their comments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from orchestrator.cluster import cluster_file, resources
from orchestrator.cluster.profile import ClusterProfile
from orchestrator.config import experiment, starter_studies
from orchestrator.environment.interpreter import Packages
from orchestrator.planning import matrix
from orchestrator.planning.matrix import Cell, Matrix
from workloads import registry
from workloads.contract import Hardware

EXTENSIONS = "# Extensions that its authors proposed"
STUDIES = [name for name in starter_studies.names() if EXTENSIONS in starter_studies.read(name)]
ON_GPUS_ONLY = "data_parallel needs GPUs"


@dataclass(frozen=True)
class Gpu:
    name: str


@dataclass(frozen=True)
class Machine:
    """With two A100 and two A30, so that every published row has its cell."""

    gpus: tuple[Gpu, ...] = (Gpu("NVIDIA A100-SXM4-80GB"),) * 2 + (Gpu("NVIDIA A30"),) * 2
    cores: tuple[int, ...] = tuple(range(8))


def expand(text: str, *sets: str, profile: ClusterProfile | None = None) -> Matrix:
    spec = experiment.parse(text, "experiment.toml", list(sets))
    return matrix.expand(spec, default_cpus=resources.default_cpus(profile))


def with_extensions(name: str) -> str:
    """A study with its extensions, whose # are removed."""
    head, _, rest = starter_studies.read(name).partition(EXTENSIONS)
    return head + "\n".join(line.removeprefix("# ") for line in rest.splitlines()[1:] if line != "#")


def refusals(cells: Sequence[Cell], profile: ClusterProfile | None, machine: Machine | None) -> dict[str, str]:
    found = {}
    for cell in cells:
        strategy = registry.strategies()[cell.train.strategy]
        shape = resources.place(cell.train, cell.execution, strategy, profile, machine)
        if isinstance(shape, str):
            found[cell.label] = shape
    return found


def listed(found: Matrix) -> str:
    """A line for each cell, its published figures below."""
    lines = []
    for cell in found.cells:
        lines.append(cell.label)
        for published in cell.published:
            figures = ", ".join(f"{name} {value:.10g}" for name, value in published.figures.items())
            notes = f"; {published.notes}" if published.notes else ""
            lines.append(f"    {published.on}: {figures}{notes}")
    return "\n".join([*lines, ""])


def test_the_four_studies_are_shipped() -> None:
    assert STUDIES == ["frameworks", "fsdp", "gpipe-horovod", "mnist-dp-ddp"]


@pytest.mark.parametrize("name", STUDIES)
def test_golden_cells(name: str, golden: Callable[[str, str], None]) -> None:
    """Each published row once, with its figures, and the fair variants."""
    golden(f"studies/{name}.txt", listed(expand(starter_studies.read(name), profile=cluster_file.load("sol"))))


@pytest.mark.parametrize("name", STUDIES)
def test_each_published_row_is_one_cell(name: str) -> None:
    found = expand(starter_studies.read(name))
    rules = experiment.parse(starter_studies.read(name), "x").published
    assert sum(len(cell.published) for cell in found.cells) == len(rules)
    assert all(len(cell.published) <= 1 for cell in found.cells)


@pytest.mark.parametrize("name", STUDIES)
def test_published_figures_match_only_the_cells_of_their_row_with_all_extensions(name: str) -> None:
    """Neither with another batch size nor with other options of the same strategy. Pretrained weights, an extension,
    change none of the figures that the study published, nor does the share of the data, which miniatures set."""

    def rows(found: Matrix) -> list[tuple[str, dict[str, Any]]]:
        return [(f"{p.on} {p.figures}", work(cell)) for cell in found.cells for p in cell.published]

    def work(cell: Cell) -> dict[str, Any]:
        elsewhere = {"hardware", "cpus", "seed", "repeat", "pretrained", "train_fraction", "test_fraction"}
        return {key: value for key, value in cell.train.to_json().items() if key not in elsewhere}

    theirs = dict(rows(expand(starter_studies.read(name))))
    extended = rows(expand(with_extensions(name)))
    assert len(extended) >= len(theirs) > 0
    for figures, done in extended:
        assert done == theirs[figures]


@pytest.mark.parametrize("name", STUDIES)
def test_sol_can_run_every_cell_and_every_extension(name: str) -> None:
    """No cell is excluded, by a rule or for lack of hardware; no extension repeats a cell or has ignored keys."""
    sol = cluster_file.load("sol")
    found = expand(with_extensions(name), profile=sol)
    assert len(found.cells) > len(expand(starter_studies.read(name), profile=sol).cells)
    assert (found.excluded, found.merged, found.notes) == ([], 0, [])
    assert refusals(found.cells, sol, None) == {}


@pytest.mark.parametrize("name", STUDIES)
def test_a_machine_with_the_cards_runs_every_cell(name: str) -> None:
    assert refusals(expand(starter_studies.read(name)).cells, None, Machine()) == {}


@pytest.mark.torch
@pytest.mark.parametrize("name", STUDIES)
def test_no_package_is_missing_when_all_extras_are_installed(name: str) -> None:
    """For which plan would report "not available"."""
    here = Packages.of(None)
    for cell in expand(starter_studies.read(name)).cells:
        parts = (
            registry.strategies()[cell.train.strategy],
            registry.find(registry.models(), cell.train.model),
            registry.find(registry.datasets(), cell.train.dataset),
        )
        assert not here.missing(package for part in parts if part for package in part.packages), cell.label


@pytest.mark.parametrize("name", STUDIES)
def test_two_cores_run_every_cell_in_miniature(name: str) -> None:
    """The command at the top of the file: one kind of device, the same numbers, with published figures."""
    found = expand(starter_studies.read(name), "hardware=cpu", "epochs=1", "train_fraction=0.004", "test_fraction=0.02")
    assert all(ON_GPUS_ONLY in excluded.why for excluded in found.excluded)
    assert {cell.train.hardware for cell in found.cells} == {Hardware("cpu", 1), Hardware("cpu", 2)}
    assert refusals(found.cells, None, Machine(gpus=(), cores=(0, 1))) == {}
    assert sum(bool(cell.published) for cell in found.cells) >= 4
    every = {cell.train.strategy for cell in expand(starter_studies.read(name)).cells}
    assert every - {cell.train.strategy for cell in found.cells} <= {"data_parallel"}


@pytest.mark.parametrize("name", STUDIES)
def test_the_head_of_a_study_names_commands_that_work(name: str) -> None:
    """As far as they can be checked without devices."""
    head = starter_studies.read(name).partition("\n\nname")[0]
    lines = [line for line in head.splitlines() if "orchestrate submit --local" in line]
    (command,) = lines
    sets = [word for word in command.split() if "=" in word]
    assert [text.partition("=")[0] for text in sets] == ["hardware", "epochs", "train_fraction", "test_fraction"]
    assert expand(starter_studies.read(name), *sets).cells
