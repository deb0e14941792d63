"""The shipped studies are experiment files that work as they stand."""

from __future__ import annotations

from collections import Counter

import pytest

from orchestrator.config import experiment, starter_studies
from orchestrator.errors import InputError
from orchestrator.planning import matrix
from orchestrator.planning.matrix import Matrix
from workloads.contract import Hardware


def expand(text: str) -> Matrix:
    def one_core_a_rank(_hardware: Hardware, ranks: int) -> int:
        return ranks

    return matrix.expand(experiment.parse(text, "experiment.toml"), default_cpus=one_core_a_rank)


def test_demo_comes_first() -> None:
    """``init`` writes it by default."""
    assert starter_studies.names()[0] == "demo"


@pytest.mark.parametrize("name", starter_studies.names())
def test_every_study_plans_runs_and_has_a_description(name: str) -> None:
    """It has no errors, no condition without a cell, no duplicates."""
    found = expand(starter_studies.read(name))
    assert found.cells and not found.notes and not found.merged
    assert experiment.parse(starter_studies.read(name), "x").name == name
    assert starter_studies.summary(name).endswith(".")


def test_the_demo_is_eager_on_one_core_and_ddp_on_two() -> None:
    """Two models, two seeds, eight runs on real digits."""
    found = expand(starter_studies.read("demo"))
    assert not found.excluded
    assert Counter((c.train.model, c.train.strategy, c.train.hardware, c.train.dataset) for c in found.cells) == {
        (model, strategy, hardware, "digits"): 2
        for model in ("cnn", "vit_tiny")
        for strategy, hardware in (("eager", Hardware("cpu", 1)), ("ddp", Hardware("cpu", 2)))
    }
    assert {cell.label for cell in found.cells} >= {"cnn-eager-cpu1-s0", "vit_tiny-ddp-cpu2-s1"}


def test_the_blocks_that_the_demo_shows_as_comments_work() -> None:
    """Without the ``#`` they are an exclusion, an include with an option and a published figure."""
    head, marker, rest = starter_studies.read("demo").partition("# Not used here")
    assert marker
    blocks = "\n".join(line.removeprefix("# ") for line in rest.splitlines()[1:] if line != "#")
    found = expand(head + blocks)
    assert [e.why for e in found.excluded] == ["too slow"] * 2
    assert [c.label for c in found.cells if c.train.model == "resnet18"] == ["resnet18-ddp(bucket_cap_mb=10)-cpu2-s0"]
    assert [c.train.model for c in found.cells if c.published] == ["cnn", "cnn"]
    assert not found.notes


def test_an_unknown_study_names_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        starter_studies.read("demmo")
    assert caught.value.text() == 'there is no study "demmo"\n  fix: did you mean "demo"?'
    with pytest.raises(InputError, match="there are: demo"):
        starter_studies.read("../clusters/sol")
