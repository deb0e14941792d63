"""Sequence data: every sequence once, a loss over all positions, and the rules that separate it from images."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.config import experiment
from orchestrator.planning import matrix
from workloads import registry
from workloads.contract import Hardware, TrainConfig
from workloads.datasets import characters
from workloads.engines import settings
from workloads.errors import DatasetError, InputError
from workloads.models import wide_transformer

CONFIG = TrainConfig(
    model="char_transformer", dataset="characters", strategy="eager", hardware=Hardware("cpu", 1), cpus=1, batch_size=8
)


def load() -> object:
    return characters.DECLARATION.load(None, "characters", CONFIG)


def test_characters_match_their_declared_shape() -> None:
    """As many sequences in every edition, test sequences spread over the text, readable by the names of classes."""
    np = pytest.importorskip("numpy")
    data = characters.DECLARATION.load(None, "characters", CONFIG)
    shape = characters.DECLARATION.shape(None, "characters")
    assert shape is not None and shape.image_size is None
    assert data.train.shape == (shape.num_train, characters.POSITIONS + 1) == (3150, 129)
    assert data.test.shape == (shape.num_test, 129) == (350, 129)
    assert len(data.class_names) == shape.classes == 97
    assert data.train.max() < 97 and data.train.dtype == np.uint8
    text = "".join(data.class_names[symbol] for symbol in data.train[:20].reshape(-1))
    assert "statement" in text and "\n" in text
    assert data.digest and data.digest == load().digest  # type: ignore[attr-defined]


def test_a_character_outside_ascii_is_one_symbol() -> None:
    assert list(characters.encode("a\né\x00b")) == [66, 0, 96, 96, 67]
    assert "".join(characters.SYMBOLS[n] for n in characters.encode("a b~\n")) == "a b~\n"


def test_a_python_without_the_text_is_a_problem_and_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a run and in it; and an edition that is too short."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    (problem,) = characters.DECLARATION.check(None, "characters")
    assert (problem.where, problem.what) == ("pydoc_data.topics", "this Python lacks the module")

    def gone(_name: str) -> None:
        raise ImportError("No module named 'pydoc_data'")

    monkeypatch.setattr(importlib, "import_module", gone)
    with pytest.raises(DatasetError, match="this Python lacks the text of characters") as caught:
        load()
    assert "install the whole standard library of Python" in caught.value.text()
    monkeypatch.setattr(importlib, "import_module", lambda _name: SimpleNamespace(topics={"a": "short"}))
    with pytest.raises(DatasetError, match="5 characters, 451500 needed"):
        load()


@pytest.mark.torch
@pytest.mark.parametrize("world", [1, 2, 3, 30])
def test_each_sequence_occurs_once_at_any_world_size(world: int) -> None:
    """21 sequences: their numbers are their symbols, and the answers are the symbols that follow."""
    torch = pytest.importorskip("torch")
    np = pytest.importorskip("numpy")
    from workloads import loaders
    from workloads.datasets.shared.sequence_data import SequenceData
    from workloads.loaders.protocol import Batch, Loader, Shard

    symbols = np.arange(21, dtype=np.uint8)[:, None] + np.arange(5, dtype=np.uint8)
    data = SequenceData(symbols, symbols, ("a",), digest="of a test")

    def make(rank: int, ranks: int) -> Loader:
        return loaders.make(
            data,
            CONFIG,
            image_size=data.size,
            device=torch.device("cpu"),
            dtype=torch.float64,
            shard=Shard(rank, ranks),
        )

    def counted(batch: Batch) -> list[int]:
        assert batch.x.dtype == batch.y.dtype == torch.int64
        assert batch.x.shape == (max(1, batch.num_local), data.size)
        assert torch.equal(batch.y, batch.x + 1)
        found: list[int] = batch.x[: batch.num_local, 0].tolist()
        return found

    alone = [counted(batch) for batch in make(0, 1).train(3)]
    ranks = [make(rank, world) for rank in range(world)]
    steps = list(zip(*([counted(batch) for batch in rank.train(3)] for rank in ranks), strict=True))
    assert [list(itertools.chain.from_iterable(step)) for step in steps] == alone
    assert sorted(itertools.chain.from_iterable(alone)) == list(range(21)) != list(itertools.chain.from_iterable(alone))
    tested = [[n for batch in rank.test() for n in counted(batch)] for rank in ranks]
    assert list(itertools.chain.from_iterable(tested)) == list(range(21))
    with pytest.raises(InputError, match="the loader 'dataloader' is for images"):
        loaders.make(
            data,
            dataclasses.replace(CONFIG, loader="dataloader"),
            image_size=data.size,
            device=torch.device("cpu"),
            dtype=torch.float64,
            shard=Shard(0, 1),
        )


@pytest.mark.torch
def test_the_loss_of_a_sequence_is_the_mean_over_its_positions() -> None:
    torch = pytest.importorskip("torch")
    from workloads.engines import recipe

    logits = torch.randn(3, 7, 5, dtype=torch.float64)
    y = torch.randint(0, 7, (3, 5))
    each = [torch.nn.functional.cross_entropy(logits[i].T, y[i]) for i in range(3)]
    assert torch.isclose(recipe.loss_sum(CONFIG, logits, y), sum(each), rtol=1e-14)


@pytest.mark.torch
def test_no_position_sees_what_follows() -> None:
    """What a transformer answers at a position does not change with later symbols."""
    torch = pytest.importorskip("torch")
    model = registry.models()["char_transformer"].build(CONFIG, 1, 97, 16).eval()
    x = torch.randint(0, 97, (2, 16))
    changed = x.clone()
    changed[:, 9:] = (x[:, 9:] + 1) % 97
    with torch.no_grad():
        first, second = model(x), model(changed)
    assert first.shape == (2, 97, 16)
    assert torch.equal(first[:, :, :9], second[:, :, :9]) and not torch.equal(first[:, :, 9:], second[:, :, 9:])


@pytest.mark.torch
def test_a_wide_transformer_has_the_memory_of_its_name() -> None:
    """By its weights when it is built; within a few per cent above, from small to larger than any card."""
    declaration = registry.find(registry.models(), "wide_transformer/0.02GB")
    assert declaration is not None and declaration.num_parameters is not None
    built = declaration.build(dataclasses.replace(CONFIG, model="wide_transformer/0.02GB"), 1, 97, 128)
    of_blocks = declaration.num_parameters("wide_transformer/0.02GB")
    assert of_blocks <= sum(p.numel() for p in built.parameters()) < 1.1 * of_blocks
    for memory_gb in (1, 12, 96, 160, 640):
        width, depth = wide_transformer.size(f"wide_transformer/{memory_gb}GB")
        assert 1 <= 16 * 12 * width**2 * depth / (memory_gb * 1e9) < 1.1
        assert 64 < width / depth < 192


EXPERIMENT = """
[defaults]
model = "{model}"
dataset = "{dataset}"
strategy = "eager"
hardware = "cpu:1"
[matrix]
seed = 0
{more}
"""


@pytest.mark.parametrize(
    ("model", "dataset", "more", "rule", "why"),
    [
        ("cnn", "characters", "", "model cnn", "cnn is for images, and the data set characters holds sequences"),
        (
            "char_transformer",
            "digits",
            "",
            "model char_transformer",
            "char_transformer is for sequences, and the data set digits holds images",
        ),
        *(
            (
                "char_transformer",
                "characters",
                f"{key} = {value}",
                "dataset characters",
                f"{key} is for images, and characters holds sequences",
            )
            for key, value in {
                "image_size": "32",
                "augment": '"flip"',
                "loader": '"dataloader"',
                "channels_last": "true",
            }.items()
        ),
        (
            "wide_transformer/huge",
            "characters",
            "",
            "model wide_transformer/huge",
            "wide_transformer/huge contains no memory size: write wide_transformer/96GB, with any number above 0",
        ),
        (
            "wide_transformer/1000001GB",
            "characters",
            "",
            "model wide_transformer/1000001GB",
            "wide_transformer/1000001GB exceeds every machine: write wide_transformer/1000000GB at most",
        ),
        (
            "wide_transformer/0GB",
            "characters",
            "",
            "model wide_transformer/0GB",
            "wide_transformer/0GB contains no memory size: write wide_transformer/96GB, with any number above 0",
        ),
    ],
)
def test_keys_and_models_for_images_are_excluded_for_sequences(
    model: str, dataset: str, more: str, rule: str, why: str, tmp_path: Path
) -> None:
    spec = experiment.parse(EXPERIMENT.format(model=model, dataset=dataset, more=more), "x")
    found = matrix.expand(spec, default_cpus=lambda _hardware, ranks: ranks, data_root=tmp_path)
    assert [(excluded.rule, excluded.why) for excluded in found.excluded] == [(rule, why)]
    fine = experiment.parse(EXPERIMENT.format(model="char_transformer", dataset="characters", more=""), "x")
    assert len(matrix.expand(fine, default_cpus=lambda _hardware, ranks: ranks).cells) == 1


def test_keys_and_models_for_images_are_errors_in_the_job_for_sequences() -> None:
    train = dataclasses.replace(CONFIG, augment="flip")
    job: Any = SimpleNamespace(spec=SimpleNamespace(train=train))
    with pytest.raises(InputError, match=r"experiment.toml: augment is for images, and characters holds sequences"):
        settings.load_data(job)
