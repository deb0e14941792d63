"""Expansion of an experiment: its cells, each once, and the excluded ones with their reasons."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from orchestrator.config import experiment
from orchestrator.config.experiment import Published
from orchestrator.errors import ExperimentError
from orchestrator.planning import matrix
from orchestrator.planning.matrix import Matrix
from orchestrator.plugins import Plugins
from workloads.contract import Execution, Hardware, TrainConfig
from workloads.registry import DatasetShape, Option, StrategyDeclaration

HEAD = """
name = "study"
[defaults]
model = "cnn"
dataset = "digits"
strategy = "eager"
hardware = "cpu:1"
batch_size = 64
"""


def cores(hardware: Hardware, ranks: int) -> int:
    """A stand-in whose result depends on hardware and ranks."""
    return 10 * hardware.devices + ranks


def expand(text: str, *sets: str, plugins: Plugins | None = None, data_root: Path | None = None) -> Matrix:
    spec = experiment.parse(HEAD + text, "experiment.toml", sets, plugins=plugins)
    return matrix.expand(spec, default_cpus=cores, plugins=plugins, data_root=data_root)


def labels(text: str, *sets: str) -> list[str]:
    return [cell.label for cell in expand(text, *sets).cells]


def reasons(text: str, plugins: Plugins | None = None) -> list[tuple[str, str]]:
    return [(excluded.rule, excluded.why) for excluded in expand(text, plugins=plugins).excluded]


def test_cells_come_in_file_order_with_the_last_axis_fastest() -> None:
    """Own axes of a matrix, its own zips, the zips of the file, then the includes."""
    text = """
    [[matrix]]
    model = ["cnn", "vit_tiny"]
    zip = [{ lr = [0.1, 0.2], batch_size = [32, 64] }]
    [[matrix]]
    seed = [5]
    [[include]]
    model = "resnet18"
    [[zip]]
    strategy = ["eager", "ddp"]
    hardware = ["cpu:1", "cpu:2"]
    """
    assert labels(text) == [
        "cnn-eager-cpu1-s0-batch_size=32",
        "cnn-ddp-cpu2-s0-batch_size=32",
        "cnn-eager-cpu1-s0-batch_size=64",
        "cnn-ddp-cpu2-s0-batch_size=64",
        "vit_tiny-eager-cpu1-s0-batch_size=32",
        "vit_tiny-ddp-cpu2-s0-batch_size=32",
        "vit_tiny-eager-cpu1-s0-batch_size=64",
        "vit_tiny-ddp-cpu2-s0-batch_size=64",
        "cnn-eager-cpu1-s5",
        "cnn-ddp-cpu2-s5",
        "resnet18-eager-cpu1-s0",
    ]


def test_a_zip_that_stands_before_the_matrix_varies_slowest() -> None:
    """So that a file can put all baselines first."""
    text = '[[zip]]\nstrategy = ["eager", "ddp"]\nhardware = ["cpu:1", "cpu:2"]\n[matrix]\nseed = [0, 1]'
    assert labels(text) == ["cnn-eager-cpu1-s0", "cnn-eager-cpu1-s1", "cnn-ddp-cpu2-s0", "cnn-ddp-cpu2-s1"]


def test_a_cell_has_every_value_where_it_belongs() -> None:
    """Identity in ``train``, limits in ``execution``, options beside the strategy, ``cpus`` resolved."""
    (cell,) = expand(
        """
        time_limit = "90m"
        mem = "8G"
        checkpoint_every = 2
        hang_timeout_s = 30
        retries = 3
        [[include]]
        strategy = { name = "ddp", bucket_cap_mb = 50 }
        hardware = "cpu:2"
        lr = 1
        """
    ).cells
    expected = TrainConfig(
        model="cnn",
        dataset="digits",
        strategy="ddp",
        strategy_options={"bucket_cap_mb": 50},
        hardware=Hardware("cpu", 2),
        cpus=22,
        batch_size=64,
        lr=1.0,
    )
    assert (cell.train, cell.run_id) == (expected, expected.run_id())
    assert cell.execution == Execution(
        time_limit_s=5400, mem_bytes=8 * 2**30, checkpoint_every=2, hang_timeout_s=30, retries=3
    )
    assert cell.label == "cnn-ddp(bucket_cap_mb=50)-cpu2-s0"


def test_labels_name_only_keys_that_distinguish_cells() -> None:
    """Neither keys that follow from the model or another key in the label, nor keys that another matrix varies."""
    text = """
    [[matrix]]
    model = ["cnn", "vit_tiny"]
    repeat = [0, 1]
    zip = [{ batch_size = [8, 16], cpus = [1, 2] }]
    [[matrix]]
    model = "resnet18"
    dataset = "synthetic"
    steps = 20
    lr = [0.1, 0.2]
    """
    found = labels(text)
    assert found[:2] == ["cnn-eager-cpu1-s0-repeat=0-batch_size=8", "cnn-eager-cpu1-s0-repeat=0-batch_size=16"]
    assert found[-2:] == ["resnet18-eager-cpu1-s0-lr=0.1", "resnet18-eager-cpu1-s0-lr=0.2"]
    assert len(set(found)) == len(found) == 10


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '[matrix]\nseed = 0\n[[when]]\nif.model = "cnn"\nset.momentum = 0.5\n[[include]]\nmomentum = 0.9',
            ["-momentum=0.5", "-momentum=0.9"],
        ),
        (
            '[matrix]\ntime_limit = ["1h", "2h"]\n[[when]]\nif = { time_limit = "1h" }\nset = { lr = 0.5 }',
            ["-lr=0.5", "-lr=0.05"],
        ),
        ("[[matrix]]\nepochs = [1, 2]\n[[matrix]]\nsteps = [3, 4]", ["-epochs=1", "-epochs=2", "-steps=3", "-steps=4"]),
    ],
    ids=["when against include", "an execution key decides", "epochs mean nothing beside steps"],
)
def test_labels_distinguish_cells_that_conditions_or_steps_change(text: str, expected: list[str]) -> None:
    assert labels(text) == [f"cnn-eager-cpu1-s0{end}" for end in expected]


def test_the_order_of_axes_comments_and_limits_change_no_run_id() -> None:
    """Identity covers only what changes the training."""
    first = expand('[matrix]\nseed = [0, 1, 2]\nlr = [1, 2]\nmodel = ["cnn", "vit_tiny"]')
    second = expand(
        '# a comment\ntime_limit = "9h"\n[matrix]\nmodel = ["vit_tiny", "cnn"]\nlr = [2.0, 1.0]\nseed = [2, 0, 1]'
    )
    assert len(first.cells) == 12
    assert {cell.run_id for cell in first.cells} == {cell.run_id for cell in second.cells}


def test_run_ids_are_the_hash_of_the_identity_written_as_sorted_json() -> None:
    """The fast path makes the same text as ``json``, for every type of value."""
    import hashlib

    config = TrainConfig(
        model='a "b" é',
        dataset="d\\",
        strategy="s",
        strategy_options={"z": (1, 2), "a": True, "b": 1.5},
        hardware=Hardware("cpu", 1),
        cpus=1,
        lr=1e-07,
        nesterov=True,
        steps=3,
        dropout=0.0,
    )
    text = json.dumps(config.identity(), sort_keys=True, separators=(",", ":"))
    assert config.run_id() == hashlib.sha256(text.encode()).hexdigest()[:16]
    with pytest.raises(ValueError, match="nan"):
        dataclasses.replace(config, lr=float("nan")).run_id()


def test_when_blocks_apply_in_file_order_and_see_each_other() -> None:
    """A later block sees what an earlier one set; values that no condition reads are replaced in every cell."""
    cells = expand(
        """
        [matrix]
        model = ["cnn", "vit_tiny"]
        lr = [0.1, 0.2]
        [[when]]
        if = { model = "vit_tiny" }
        set = { lr = 0.3, optimizer = "adam" }
        [[when]]
        if = { optimizer = ["adam", "adamw"] }
        set = { weight_decay = 0.01 }
        """
    )
    assert [(c.train.model, c.train.lr, c.train.weight_decay) for c in cells.cells] == [
        ("cnn", 0.1, 0.0),
        ("cnn", 0.2, 0.0),
        ("vit_tiny", 0.3, 0.01),
    ]
    assert (cells.merged, cells.merged_labels) == (
        1,
        {"vit_tiny-eager-cpu1-s0": 1},
    )


def test_when_matches_hardware_and_a_strategy_whatever_its_options() -> None:
    cells = expand(
        """
        [[zip]]
        strategy = ["eager", "ddp", { name = "ddp", bucket_cap_mb = 1 }]
        hardware = ["cpu:1", "cpu:2", "cpu:2"]
        [[when]]
        if = { strategy = "ddp", hardware = ["cpu:2", "cpu:4"] }
        set = { cpus = 4 }
        """
    ).cells
    assert [cell.train.cpus for cell in cells] == [11, 4, 4]
    assert [cell.label for cell in cells] == [
        "cnn-eager-cpu1-s0",
        "cnn-ddp-cpu2-s0",
        "cnn-ddp(bucket_cap_mb=1)-cpu2-s0",
    ]


def test_an_include_keeps_its_own_values_and_is_not_excluded() -> None:
    """Conditional blocks fill what it leaves open; ``exclude`` is for the product."""
    cells = expand(
        """
        [matrix]
        lr = [0.1, 0.2]
        [[when]]
        if = { model = "cnn" }
        set = { epochs = 7, label_smoothing = 0.1 }
        [[exclude]]
        match = { lr = 0.2 }
        why = "diverges"
        [[include]]
        lr = 0.2
        epochs = 3
        """
    )
    assert [(c.train.lr, c.train.epochs, c.train.label_smoothing) for c in cells.cells] == [
        (0.1, 7, 0.1),
        (0.2, 3, 0.1),
    ]
    (excluded,) = cells.excluded
    assert (excluded.rule, excluded.why) == ("exclude[0]", "diverges")
    assert excluded.fields == {
        "model": "cnn",
        "dataset": "digits",
        "strategy": "eager",
        "hardware": "cpu:1",
        "cpus": 11,
        "seed": 0,
        "repeat": 0,
        "batch_size": 64,
        "lr": 0.2,
        "epochs": 7,
        "label_smoothing": 0.1,
    }


def test_excluded_cells_name_their_options() -> None:
    (excluded,) = expand(
        '[matrix]\nstrategy = [{ name = "ddp", bucket_cap_mb = 1 }]\n[[exclude]]\nmatch = { seed = 0 }\nwhy = "x"'
    ).excluded
    assert (excluded.fields["strategy"], excluded.fields["strategy_options"]) == ("ddp", {"bucket_cap_mb": 1})


def test_a_condition_may_name_options_of_a_strategy() -> None:
    """A named option also matches its default where a cell has none; other options do not matter."""
    cells = expand(
        """
        [matrix]
        strategy = [
          "ddp",
          { name = "ddp", static_graph = true },
          { name = "ddp", bucket_cap_mb = 1 },
          { name = "ddp", bucket_cap_mb = 1, static_graph = true },
        ]
        hardware = "cpu:2"
        [[when]]
        if = { strategy = { name = "ddp", static_graph = false } }
        set = { lr = 0.5 }
        [[exclude]]
        match = { strategy = ["fsdp", { name = "ddp", bucket_cap_mb = 1, static_graph = true }] }
        why = "said twice"
        [[published]]
        match = { strategy = { name = "ddp", static_graph = true } }
        test_accuracy = 0.9
        on = "paper"
        """
    )
    assert [(c.label, c.train.lr, len(c.published)) for c in cells.cells] == [
        ("cnn-ddp-cpu2-s0", 0.5, 0),
        ("cnn-ddp(static_graph=true)-cpu2-s0", 0.05, 1),
        ("cnn-ddp(bucket_cap_mb=1)-cpu2-s0", 0.5, 0),
    ]
    (excluded,) = cells.excluded
    assert excluded.fields["strategy_options"] == {"bucket_cap_mb": 1, "static_graph": True}


def test_no_cells_remain_where_all_are_excluded() -> None:
    everything = expand('[matrix]\nseed = [0, 1]\n[[exclude]]\nmatch = { model = "cnn" }\nwhy = "no"')
    assert (everything.cells, len(everything.excluded)) == ([], 2)


def test_duplicates_are_one_run_with_the_figures_of_both() -> None:
    """Merged; the first one's execution settings are used, with a note where they differ."""
    cells = expand(
        """
        [matrix]
        lr = [0.1, 0.1]
        [[include]]
        lr = 0.1
        time_limit = "9h"
        [[published]]
        match = { time_limit = "9h" }
        test_accuracy = 0.5
        on = "T4"
        """
    )
    assert (len(cells.cells), cells.merged, cells.merged_labels) == (1, 2, {"cnn-eager-cpu1-s0": 2})
    assert cells.cells[0].execution.time_limit_s == 3600
    assert cells.cells[0].published == (Published({"test_accuracy": 0.5}, "T4"),)
    assert cells.notes == ["cnn-eager-cpu1-s0 is requested twice with different execution settings: the first are used"]


def test_ignored_keys_do_not_affect_identity() -> None:
    """Momentum with Adam, workers of the resident loader, epochs beside steps: defaults in identity, with a note."""
    cells = expand('[matrix]\noptimizer = ["sgd", "adam"]\nmomentum = [0.0, 0.5]\nworkers = 4\nsteps = 10\nepochs = 3')
    assert [(c.train.optimizer, c.train.momentum, c.train.workers, c.train.epochs) for c in cells.cells] == [
        ("sgd", 0.0, 0, 10),
        ("sgd", 0.5, 0, 10),
        ("adam", 0.9, 0, 10),
    ]
    assert cells.merged == 1
    assert cells.notes == [
        "workers is ignored without the dataloader loader: it does not affect a run's identity there",
        "epochs is ignored beside steps: it does not affect a run's identity there",
        "momentum is ignored without sgd: it does not affect a run's identity there",
    ]


def test_published_figures_belong_to_the_cells_that_match() -> None:
    cells = expand(
        """
        [matrix]
        model = ["cnn", "vit_tiny"]
        seed = [0, 1]
        [[published]]
        match = { model = "cnn" }
        total_time_s = 390.95
        on = "1 x T4"
        [[published]]
        match = { seed = 1 }
        test_accuracy = 0.9
        on = "A100"
        """
    ).cells
    assert [[p.on for p in cell.published] for cell in cells] == [["1 x T4"], ["1 x T4", "A100"], [], ["A100"]]


def test_conditions_that_match_no_cell_are_reported() -> None:
    """A typing error in a value would otherwise go unnoticed."""
    cells = expand(
        """
        [matrix]
        seed = [0, 1]
        [[when]]
        if = { seed = 0 }
        set = { lr = 1 }
        [[when]]
        if = { model = "vit_tiny" }
        set = { lr = 1 }
        [[exclude]]
        match = { seed = 3 }
        why = "x"
        [[published]]
        match = { seed = 4 }
        test_accuracy = 0.5
        on = "x"
        """,
        "epochs=2",
    )
    assert cells.notes == [
        "--set epochs=2 adds a default",
        "when[1] matches no cell",
        "exclude[0] matches no cell",
        "published[0] matches no cell",
    ]


@pytest.mark.parametrize("name", ['a "b"', "$HOME; x", "é\u00a0实", "it's", "a b" * 200])
def test_labels_keep_every_character_and_are_never_shortened(name: str) -> None:
    dataset = f"imagefolder/{name}"
    found = labels(f'[matrix]\ndataset = ["digits", {json.dumps(dataset, ensure_ascii=False)}]')
    assert found == ["cnn-eager-cpu1-s0-dataset=digits", f"cnn-eager-cpu1-s0-dataset={dataset}"]


@pytest.mark.parametrize(
    ("hardware", "short"), [("cpu:2", "cpu2"), ("a100:2", "a100x2"), ("a100:4x2", "a100x4x2"), ("gpu:8", "gpu8")]
)
def test_labels_show_the_hardware(hardware: str, short: str) -> None:
    assert labels(f'[matrix]\nstrategy = "ddp"\nhardware = "{hardware}"') == [f"cnn-ddp-{short}-s0"]


def test_eager_on_several_devices_is_excluded_and_ddp_on_one_is_not() -> None:
    """The 18-cell plan: three models, two strategies, one and two GPUs of two kinds."""
    cells = expand(
        """
        [matrix]
        model = ["cnn", "resnet18", "vit_tiny"]
        strategy = ["eager", "ddp"]
        hardware = ["a100:1", "a100:2", "a30:2"]
        """
    )
    assert len(cells.cells) == 12
    assert {(e.fields["strategy"], e.fields["hardware"], e.rule) for e in cells.excluded} == {
        ("eager", "a100:2", "strategy eager"),
        ("eager", "a30:2", "strategy eager"),
    }
    assert all(e.why for e in cells.excluded) and len(cells.excluded) == 6


@pytest.mark.parametrize(
    ("text", "rule", "why"),
    [
        ('model = "vit_tiny"\nimage_size = 30', "model vit_tiny", "30 is no multiple of 4"),
        *(
            (
                f"image_size = {size}",
                "model cnn",
                f"cnn takes images of 28 px, not {size}: write 28, or remove image_size",
            )
            for size in (1, 32, 100_000)
        ),
        (
            'model = "resnet18"\ndropout = 0.2',
            "dropout",
            "resnet18 has no dropout layer and ignores dropout = 0.2: set it in a [[when]] for other models",
        ),
        ('stem = "cifar"', "stem", 'cnn ignores stem = "cifar": set it in a [[when]] for other models'),
        ('precision = "tf32"', "precision", "tf32 is a mode of NVIDIA GPUs: on CPU use fp32"),
        ("nesterov = true\nmomentum = 0.0", "nesterov", "nesterov needs a momentum above 0"),
        (
            'strategy = "ddp"\nhardware = "cpu:4"\nbatch_size = 3',
            "batch_size",
            "batch_size 3 is less than one sample for each of 4 ranks",
        ),
        (
            "drop_last = true\nbatch_size = 1438",
            "batch_size",
            "drop_last leaves no step: 1437 training images are fewer than batch_size 1438",
        ),
        (
            "drop_last = true\nbatch_size = 720\ntrain_fraction = 0.5",
            "batch_size",
            "drop_last leaves no step: 718 training images are fewer than batch_size 720",
        ),
        (
            'strategy = "ddp"\nhardware = "cpu:4"\nbatch_size = 7',
            "batch_norm",
            "batch_size 7 leaves one of 4 ranks with a single sample, which batch norm cannot normalise: "
            'raise batch_size, or set batch_norm = "frozen"',
        ),
        ("batch_size = 1", "batch_norm", "batch_size 1 leaves a step with a single sample"),
        (
            'strategy = "ddp"\nhardware = "cpu:2"\nbatch_size = 239',
            "batch_norm",
            "the last batch of an epoch has 3 of 239 samples and leaves one of 2 ranks with a single one or none, "
            "which batch norm cannot normalise: set drop_last = true, or another batch_size",
        ),
        ("batch_size = 1436", "batch_norm", "the last batch of an epoch has 1 of 1436 samples and leaves a step with"),
    ],
)
def test_rules_exclude_what_cannot_be_trained(text: str, rule: str, why: str) -> None:
    """With the reason, before anything is queued."""
    ((found_rule, found_why),) = reasons(f"[matrix]\n{text}")
    assert found_rule == rule
    assert why in found_why


def test_what_a_model_can_train_is_not_excluded() -> None:
    """The one size of a model that has one, and no dropout where there is none."""
    fine = ["image_size = 28", 'model = "resnet18"\ndropout = 0.0', 'model = "vgg16"\nimage_size = 64']
    assert [reasons(f"[matrix]\nseed = [0]\n{text}") for text in fine] == [[]] * 3


def test_batch_norm_is_ignored_where_a_model_has_none() -> None:
    found = expand('[matrix]\nmodel = ["vgg16", "resnet18"]\nimage_size = 32\nbatch_norm = ["batch", "frozen"]')
    assert [(cell.train.model, cell.train.batch_norm) for cell in found.cells] == [
        ("vgg16", "batch"),
        ("resnet18", "batch"),
        ("resnet18", "frozen"),
    ]
    assert found.notes == ["batch_norm is ignored for vgg16: it does not affect a run's identity there"]


@pytest.mark.parametrize(
    "text",
    [
        'strategy = "ddp"\nhardware = "cpu:2"\nbatch_size = 239\ndrop_last = true',
        'strategy = "ddp"\nhardware = "cpu:2"\nbatch_size = 239\nbatch_norm = "frozen"',
        'strategy = "ddp"\nhardware = "cpu:2"\nbatch_size = 239\nmodel = "vit_tiny"',
        'strategy = "ddp"\nhardware = "cpu:2"\nbatch_size = 239\nsteps = 6',
        'strategy = "ddp"\nhardware = "cpu:2"\nbatch_size = 239\nmodel = "timm/resnet10t"',
        "batch_size = 239",
        "batch_size = 2000",
        'strategy = "ddp"\nhardware = "gpu:1"',
        'precision = "tf32"\nhardware = "gpu:1"',
        'nesterov = true\nmomentum = 0.0\noptimizer = "adam"',
        'model = "resnet18"\nstem = "cifar"',
        'dataset = "imagefolder/x"\nbatch_size = 239\ndrop_last = true',
    ],
)
def test_rules_do_not_exclude_what_can_be_trained(text: str) -> None:
    assert reasons(f"[matrix]\n{text}") == []


def test_an_include_that_breaks_a_rule_is_excluded_too() -> None:
    assert [rule for rule, _ in reasons('[[include]]\nhardware = "cpu:2"')] == ["strategy eager"]


def test_excludes_of_the_file_come_before_rules() -> None:
    text = '[matrix]\nhardware = ["cpu:2"]\n[[exclude]]\nmatch = { hardware = "cpu:2" }\nwhy = "mine"'
    assert reasons(text) == [("exclude[0]", "mine")]


def test_the_shape_of_a_folder_is_looked_up_below_the_data_root(tmp_path: Path) -> None:
    """Rules that need a shape use the one that the data set's plug-in finds there."""
    installed = Plugins.installed()
    asked: list[tuple[Path | None, str]] = []

    def shape(root: Path | None, name: str) -> DatasetShape:
        asked.append((root, name))
        return DatasetShape(image_size=30, channels=3, classes=2, num_train=100, num_test=10)

    folder = dataclasses.replace(installed.datasets["imagefolder/*"], shape=shape)
    plugins = Plugins(installed.strategies, installed.models, {"imagefolder/*": folder})
    found = matrix.expand(
        experiment.parse(
            HEAD.replace('"digits"', '"imagefolder/mine"') + '[matrix]\nmodel = "vit_tiny"', "x", plugins=plugins
        ),
        default_cpus=cores,
        data_root=tmp_path,
        plugins=plugins,
    )
    assert [e.rule for e in found.excluded] == ["model vit_tiny"]
    assert asked == [(tmp_path, "imagefolder/mine")]


def fake_strategy(**changes: object) -> Plugins:
    installed = Plugins.installed()
    changed: StrategyDeclaration = dataclasses.replace(installed.strategies["eager"], name="fake", **changes)  # type: ignore[arg-type]
    return Plugins({**installed.strategies, "fake": changed}, installed.models, installed.datasets)


def test_a_strategy_sees_its_defaults_and_the_options_given() -> None:
    """torchgpipe's number of GPUs is the length of ``balance``: a reason may depend on options."""
    balance = Option(name="balance", default=(1, 1), summary="")
    plugins = fake_strategy(
        options=(balance,),
        unsupported_hardware=lambda hardware, options: (
            "" if len(options["balance"]) == hardware.devices else f"balance has {len(options['balance'])} parts"
        ),
    )
    text = '[matrix]\nhardware = ["gpu:2", "gpu:3"]\nstrategy = ["fake", { name = "fake", balance = [1, 2, 3] }]'
    found = expand(text, plugins=plugins)
    assert [cell.label for cell in found.cells] == ["cnn-fake-gpu2-s0", "cnn-fake(balance=[1,2,3])-gpu3-s0"]
    assert [e.why for e in found.excluded] == ["balance has 3 parts", "balance has 2 parts"]


def test_a_model_without_the_strategys_framework_is_excluded() -> None:
    found = reasons('[matrix]\nstrategy = "fake"', fake_strategy(framework="jax", unsupported_hardware=lambda *_: ""))
    assert found == [("model cnn", "cnn is not written for jax, which fake needs")]


def test_forty_thousand_cells_are_distinguished() -> None:
    """Every cell of a large product is either excluded or a run of its own; how fast, see benchmarks/plan.py."""
    text = HEAD + (
        f'[matrix]\nmodel = ["cnn", "vit_tiny"]\nlr = [0.1, 0.2, 0.3, 0.4, 0.5]\nseed = {list(range(1000))}\n'
        'strategy = ["eager", "ddp"]\nhardware = ["gpu:1", "gpu:2"]\n'
        '[[when]]\nif = { strategy = "ddp" }\nset = { batch_size = 128 }\n'
        '[[exclude]]\nmatch = { model = "vit_tiny", hardware = "gpu:2" }\nwhy = "x"\n'
    )
    found = matrix.expand(experiment.parse(text, "experiment.toml"), default_cpus=cores)
    assert (len(found.cells), len(found.excluded)) == (25_000, 15_000)
    assert len({cell.run_id for cell in found.cells}) == 25_000


def test_too_large_a_product_is_an_error_before_it_is_expanded() -> None:
    """Its cells would fill the memory of a login node; a million of them may be planned."""
    lists = f"lr = {[n / 1000 for n in range(1, 501)]}\nseed = {list(range(1000))}\nbatch_size = [16, 32, 64]\n"
    text = '[matrix]\nmodel = "cnn"\nstrategy = "eager"\nhardware = "cpu:1"\n' + lists
    with pytest.raises(ExperimentError) as caught:
        expand(text)
    (mistake,) = caught.value.mistakes
    assert mistake.where == "experiment.toml: matrix"
    assert mistake.what == "1,500,000 cells (500 x 1000 x 3), and a plan may have 1,000,000"
    assert "[[zip]]" in mistake.hint
