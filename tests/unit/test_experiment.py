"""``experiment.toml`` is read as it was meant, or refused with every mistake in its place."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import experiment, keys
from orchestrator.config.experiment import ExperimentSpec
from orchestrator.config.keys import StrategyChoice, StrategyMatch
from orchestrator.errors import ExperimentError, InputError
from orchestrator.plugins import Plugins
from workloads.contract import EXECUTION_KEYS, Hardware, TrainConfig
from workloads.registry import Option

GOOD = """
name = "study"
[defaults]
model = "cnn"
dataset = "digits"
strategy = "eager"
hardware = "cpu:1"
[matrix]
seed = [0, 1]
"""


def parse(text: str, *sets: str, plugins: Plugins | None = None) -> ExperimentSpec:
    return experiment.parse(text, "experiment.toml", sets, plugins=plugins)


def mistakes(text: str, *sets: str, plugins: Plugins | None = None) -> dict[str, tuple[str, str]]:
    """Place -> (what, hint) of every mistake."""
    with pytest.raises(ExperimentError) as caught:
        parse(text, *sets, plugins=plugins)
    assert caught.value.exit_code == 2
    return {m.where.removeprefix("experiment.toml: "): (m.what, m.hint) for m in caught.value.mistakes}


def with_pipeline() -> Plugins:
    """The installed plug-ins and a strategy that has options of every type."""
    installed = Plugins.installed()
    options = (
        Option(name="balance", default=(), minimum=1, summary=""),
        Option(name="chunks", default=4, minimum=1, summary=""),
        Option(name="checkpoint", default="except_last", choices=("always", "never", "except_last"), summary=""),
        Option(name="ratio", default=0.5, minimum=0, summary=""),
        Option(name="deferred", default=False, summary=""),
    )
    gpipe = dataclasses.replace(installed.strategies["eager"], name="gpipe", options=options)
    return Plugins({**installed.strategies, "gpipe": gpipe}, installed.models, installed.datasets)


def test_the_grammar_of_the_design() -> None:
    """Every table of the grammar at once, each value typed and in file order."""
    spec = parse(
        """
        name = "my-study"
        description = "why"
        notes = "assumed"
        [defaults]
        epochs = 5
        dataset = "digits"
        time_limit = "2h"
        mem = "24G"
        [matrix]
        seed = [0, 1, 2]
        model = ["cnn", "vit_tiny"]
        [[zip]]
        name = "devices"
        strategy = ["eager", "ddp", { name = "ddp", bucket_cap_mb = 50 }]
        hardware = ["a100:1", "a100:2", "a100:4x2"]
        [[when]]
        if = { strategy = "ddp", seed = [1, 2] }
        set = { batch_size = 512 }
        [[exclude]]
        match = { model = "vit_tiny", hardware = "a100:2x1" }
        why = "does not fit"
        [[include]]
        model = "resnet50"
        strategy = "eager"
        hardware = "a100:1"
        lr = 1
        [[published]]
        match = { model = "cnn", strategy = "eager" }
        test_accuracy = 0.991
        total_time_s = 390.95
        peak_memory_bytes = 740000000
        on = "1 x T4"
        notes = "no seed given"
        """
    )
    assert (spec.name, spec.description, spec.notes) == ("my-study", "why", ("assumed",))
    assert spec.defaults == {"epochs": 5, "dataset": "digits", "time_limit": 7200, "mem": 24 * 2**30}
    (product,) = spec.products
    assert [[*axis[0]] for axis in product] == [["seed"], ["model"], ["strategy", "hardware"]]
    assert product[2][2] == {
        "strategy": StrategyChoice("ddp", (("bucket_cap_mb", 50),)),
        "hardware": Hardware("a100", 4, 2),
    }
    assert spec.whens[0].conditions == {"strategy": frozenset({StrategyMatch("ddp")}), "seed": frozenset({1, 2})}
    assert spec.whens[0].values == {"batch_size": 512}
    assert spec.excludes[0].match["hardware"] == frozenset({Hardware("a100", 2)})
    assert spec.includes[0]["lr"] == 1.0 and isinstance(spec.includes[0]["lr"], float)
    assert spec.published[0].published.figures == {
        "test_accuracy": 0.991,
        "total_time_s": 390.95,
        "peak_memory_bytes": 740000000.0,
    }
    assert (spec.published[0].published.on, spec.published[0].published.notes) == ("1 x T4", "no seed given")


def test_several_matrices_share_the_zips_of_the_file_and_keep_their_own() -> None:
    """``[[matrix]]`` twice: each product has its axes, its own zips, then the common one."""
    spec = parse(
        """
        name = "two"
        defaults = { dataset = "digits" }
        [[matrix]]
        model = ["cnn"]
        zip = [{ lr = [0.1, 0.2], batch_size = [64, 128] }]
        [[matrix]]
        model = ["vit_tiny", "resnet18"]
        [[zip]]
        strategy = ["eager", "ddp"]
        hardware = ["cpu:1", "cpu:2"]
        """
    )
    assert [[tuple(axis[0]) for axis in product] for product in spec.products] == [
        [("model",), ("lr", "batch_size"), ("strategy", "hardware")],
        [("model",), ("strategy", "hardware")],
    ]


def test_every_training_key_is_allowed_in_defaults() -> None:
    """The keys of the file are the fields of the contract, so that a value has one name everywhere."""
    fields = {f.name for f in dataclasses.fields(TrainConfig)} - {"strategy_options"}
    assert set(keys.KEYS) == fields | set(EXECUTION_KEYS)


def test_all_mistakes_are_reported_together_each_with_its_place() -> None:
    """One run of the command is enough to correct a file."""
    found = mistakes(
        """
        name = "study"
        lr = 0.1
        zap = 1
        [defaults]
        epocs = 3
        epochs = 1.0
        batch_size = -5
        time_limit = 04:00:00
        mem = "24"
        nesterov = "yes"
        partition = "public"
        name = "again"
        strategy_options = {}
        [matrix]
        model = ["cnn", "vit_tniy"]
        lr = [0.1, true, nan, inf, "0.1", -1, 0]
        seed = []
        strategy = ["ddp", "dpd", { name = "ddp", bucket_cap_mb = 0, static = true }, 7, { chunks = 2 }]
        hardware = "a100"
        dataset = 3
        optimizer = ["adm"]
        momentum = [1.5, [0.1]]
        train_fraction = [0.0, 1.5]
        [[when]]
        if = { strategy = "dpd", lr = "x" }
        sets = { batch_size = 512 }
        [[exclude]]
        match = { model = "vit", strategy = ["ddp", { name = "ddp", static = true }] }
        [[include]]
        lr = 2
        model = "cnn"
        [[published]]
        match = { model = "cnn" }
        on = "T4"
        test_accuracy = 99.1
        """
    )
    expected = {
        "lr": ('unknown key "lr"', "write training keys in [defaults] or [matrix]"),
        "zap": ('unknown key "zap"', 'did you mean "zip"?'),
        "defaults.epocs": ('unknown key "epocs"', 'did you mean "epochs"?'),
        "defaults.epochs": ("1.0 is not a whole number", "write 1"),
        "defaults.batch_size": ("-5 is out of range", "write a value of at least 1"),
        "defaults.time_limit": ("this is a TOML time of day", 'quote it: "04:00:00"'),
        "defaults.mem": ('"24" is not an amount of memory', 'write a text such as "24G"'),
        "defaults.nesterov": ('"yes" is not true or false', ""),
        "defaults.partition": ('unknown key "partition"', "use cluster.toml"),
        "defaults.name": ('unknown key "name"', "write name at the top of the file, above the first [table]"),
        "defaults.strategy_options": ('unknown key "strategy_options"', "write options with the strategy"),
        "matrix.model[1]": ('there is no model "vit_tniy"', 'did you mean "vit_tiny"?'),
        "matrix.lr[1]": ("true is not a number", ""),
        "matrix.lr[2]": ("nan is not a finite number", ""),
        "matrix.lr[3]": ("inf is not a finite number", ""),
        "matrix.lr[4]": ('"0.1" is not a number', "write 0.1 without quotes"),
        "matrix.lr[5]": ("-1 is out of range", "write a value of more than 0"),
        "matrix.lr[6]": ("0 is out of range", "write a value of more than 0"),
        "matrix.seed": ("an empty list: the product over it has no cell", "add a value"),
        "matrix.strategy[1]": ('there is no strategy "dpd"', 'did you mean "ddp"?'),
        "matrix.strategy[2].bucket_cap_mb": ("0 is out of range", "write a value of at least 1"),
        "matrix.strategy[2].static": ('unknown key "static"', 'did you mean "static_graph"?'),
        "matrix.strategy[3]": ("7 is not a strategy", 'write "ddp", or { name = "ddp", OPTION = VALUE }'),
        "matrix.strategy[4]": ("a strategy without a name", 'write "ddp", or { name = "ddp", OPTION = VALUE }'),
        "matrix.hardware": ('"a100" is not hardware', "write KIND:DEVICES"),
        "matrix.dataset": ("3 is not a text", 'put the text in quotes: "3"'),
        "matrix.optimizer[0]": ('"adm" is not one of sgd, adam, adamw', 'did you mean "adam"?'),
        "matrix.momentum[0]": ("1.5 is out of range", "write a value of at most 1"),
        "matrix.momentum[1]": ("a list is not a number", "write one value"),
        "matrix.train_fraction[0]": ("0.0 is out of range", "write a value of more than 0"),
        "matrix.train_fraction[1]": ("1.5 is out of range", "write a value of at most 1"),
        "when[0].if.strategy": ('there is no strategy "dpd"', 'did you mean "ddp"?'),
        "when[0].if.lr": ('"x" is not a number', ""),
        "when[0].sets": ('unknown key "sets"', 'did you mean "set"?'),
        "when[0]": ('"set" is missing', 'add "set"'),
        "exclude[0].match.model": ('there is no model "vit"', ""),
        "exclude[0].match.strategy[1].static": ('unknown key "static"', 'did you mean "static_graph"?'),
        "exclude[0]": ('"why" is missing', 'add "why"'),
        "include[0]": ("no hardware for these cells", "add hardware here or under [defaults]"),
        "published[0].test_accuracy": ("99.1 is not an accuracy from 0 to 1", "write 0.991"),
    }
    assert set(found) == set(expected)
    for place, (what, hint) in expected.items():
        assert found[place][0] == what, place
        assert hint in found[place][1], place


def test_the_message_shows_file_key_and_fix_on_lines_of_their_own() -> None:
    """What the command line prints is exactly this."""
    with pytest.raises(ExperimentError) as caught:
        parse(GOOD.replace("seed = [0, 1]", "lr = [0.1, true]\nepochs = [2.0]"))
    assert caught.value.text() == (
        "experiment.toml: matrix.epochs[0]: 2.0 is not a whole number\n"
        "  fix: write 2\n"
        "experiment.toml: matrix.lr[1]: true is not a number"
    )


@pytest.mark.parametrize(
    ("text", "place", "what", "hint"),
    [
        ("", "experiment.toml", "nothing to run: no [matrix], no [[zip]] and no [[include]]", "add [matrix]"),
        ("[matrix]", "matrix", "an empty matrix: it has no axis", "add an axis such as seed = [0, 1]"),
        ("matrix = []", "experiment.toml", "nothing to run", "add [matrix]"),
        ("matrix = 3", "matrix", "3 is not a table", ""),
        ("[[matrix]]\nseed=1\n[[matrix]]", "matrix[1]", "an empty matrix: it has no axis", ""),
        ("defaults = 3\n[matrix]\nseed=1", "defaults", "3 is not a table", ""),
        ("[zip]\nseed=[1]", "zip", "a table is not a list", "two brackets on each side, such as [[zip]]"),
        ("[[zip]]\nname='x'", "zip[0]", "no list here", "lists of equal length"),
        ("[[zip]]\nseed=[1,2]\nlr=[0.1]", "zip[0]", "lists of unequal length: seed has 2, lr has 1", "[defaults]"),
        ("[matrix]\nseed=1\n[[zip]]\nseed=[1]", "zip[0].seed", "seed is an axis of matrix too", "remove one"),
        ("[matrix]\nzip=[{lr=[1]},{lr=[1]}]", "matrix.zip[1].lr", "lr is an axis of matrix.zip[0] too", "remove one"),
        ("[matrix]\nseed=1\n[[when]]\nif={}\nset={lr=1}", "when[0].if", "an empty table", "name at least one key"),
        ("[matrix]\nseed=1\n[[exclude]]\nmatch={}\nwhy='x'", "exclude[0].match", "an empty table", ""),
        ("[matrix]\nseed=1\n[[exclude]]\nmatch={lr=1}\nwhy=' '", "exclude[0].why", "an empty text", "write a value"),
        ("[matrix]\nseed=1\n[[published]]\nmatch={lr=1}\non='x'", "published[0]", "no figure here", "test_acc"),
        ("[matrix]\nseed=1\n'a b'=2", 'matrix."a b"', 'unknown key "a b"', ""),
        ("[matrix]\nseed=4294967296", "matrix.seed", "4294967296 is out of range", "at most 4294967295"),
        *(
            (f'[matrix]\nhardware="{given}"', "matrix.hardware", f'"{given}" is not hardware', f'write "{right}"')
            for given, right in {"CPU:1": "cpu:1", "Gpu:2x2": "gpu:2x2"}.items()
        ),
        ("[matrix]\nworkers=1979-05-27", "matrix.workers", "1979-05-27 is not a whole number", ""),
        ("[matrix]\ndataset=1979-05-27", "matrix.dataset", "1979-05-27 is not a text", 'quote it: "1979-05-27"'),
    ],
)
def test_mistakes_of_structure(text: str, place: str, what: str, hint: str) -> None:
    """Errors of tables rather than of values have their places, too."""
    required = 'name = "x"\n'
    defaults = '\n[defaults]\nmodel="cnn"\ndataset="digits"\nstrategy="eager"\nhardware="cpu:1"\n'
    found = mistakes(required + text + ("" if "defaults" in text else defaults))
    assert what in found[place][0]
    assert hint in found[place][1]


def test_a_cell_needs_model_dataset_strategy_and_hardware() -> None:
    """A missing key is one mistake for each table that lacks it."""
    found = mistakes('name = "x"\n[[matrix]]\nseed = 1\nmodel = "cnn"\n[[matrix]]\nseed = 2')
    assert found["matrix[0]"] == ("no hardware for these cells", "add hardware here or under [defaults]")
    with pytest.raises(ExperimentError) as caught:
        parse('name = "x"\n[matrix]\nseed = 1')
    assert [re.findall(r"no (\w+)", m.what)[0] for m in caught.value.mistakes] == [
        "model",
        "dataset",
        "strategy",
        "hardware",
    ]


@pytest.mark.parametrize(
    ("text", "where", "what", "hint"),
    [
        ("a = 04:00", "line 1, column 6", "not TOML: Expected newline", 'put the text in quotes: a = "04:00"'),
        ("x = 1\ntime_limit = 1:00:00 # an hour", "line 2, column 15", "not TOML", 'time_limit = "1:00:00"'),
        ("hardware = a100:2", "line 1, column 12", "not TOML: Invalid value", 'hardware = "a100:2"'),
        ("[a]\n[a]", "line 2, column 3", "not TOML: Cannot declare ('a',) twice", ""),
        (f"[matrix]\nseed = {'[' * 150}1{']' * 150}", "matrix.seed[0]", "nested too deeply", "no key takes"),
        ("[matrix]\nlr = [1, 18446744073709551616]", "matrix.lr[1]", "a whole number of more than 64 bits", "no key"),
        (f"[matrix]\nlr = 1\nseed = {'9' * 5000}", "line 3", "a whole number of more than 64 bits", "no key takes"),
        (f"[defaults]\nmem = 0x{'f' * 5000}", "defaults.mem", "a whole number of more than 64 bits", "no key takes"),
        ("x = [1,", "end of file", "not TOML: Invalid value", ""),
        ('x = """', "end of file", "not TOML", ""),
    ],
)
def test_text_that_is_not_toml(text: str, where: str, what: str, hint: str) -> None:
    """A syntax error gives line and column, and unquoted texts the line as it should be."""
    found = mistakes(text)
    assert what in found[where][0]
    assert hint in found[where][1]


@pytest.mark.parametrize("value", ["[" * 1500 + "1" + "]" * 1500, "{a=" * 500 + "1" + "}" * 500])
def test_too_deep_nesting_is_reported(value: str) -> None:
    """With its line where the parser fails, with its key where the parser goes deeper."""
    ((place, told),) = mistakes(f"x = 1\ny = {value}").items()
    assert place == "line 2" or place.startswith("y")
    assert told == ("nested too deeply", "no key takes lists or tables nested so deeply")


@pytest.mark.parametrize(
    "value",
    [
        '{ name = "gpipe", balance = [1, 1], chunks = 8, checkpoint = "always", ratio = 1, deferred = true }',
        '{ chunks = 8, deferred = true, ratio = 1.0, checkpoint = "always", balance = [1, 1], name = "gpipe" }',
    ],
)
def test_options_are_typed_and_their_order_does_not_matter(value: str) -> None:
    """Two ways to write one strategy are one strategy."""
    spec = parse(GOOD + f"strategy = {value}", plugins=with_pipeline())
    (choice,) = [row["strategy"] for row in spec.products[0][1]]
    assert choice == StrategyChoice(
        "gpipe",
        (("balance", (1, 1)), ("checkpoint", "always"), ("chunks", 8), ("deferred", True), ("ratio", 1.0)),
    )
    assert str(choice) == "gpipe(balance=[1,1],checkpoint=always,chunks=8,deferred=true,ratio=1.0)"


def test_an_option_at_its_default_is_dropped() -> None:
    """So that naming a default does not change the run."""
    spec = parse(GOOD + 'strategy = [{ name = "gpipe", chunks = 4, ratio = 0.5 }]', plugins=with_pipeline())
    assert spec.products[0][1] == ({"strategy": StrategyChoice("gpipe")},)


@pytest.mark.parametrize(
    ("options", "place", "what", "hint"),
    [
        ("balance = [1, 0]", ".balance[1]", "0 is out of range", "at least 1"),
        ("balance = 2", ".balance", "2 is not a list", ""),
        ("chunks = 8.0", ".chunks", "8.0 is not a whole number", "write 8"),
        ("chunks = true", ".chunks", "true is not a whole number", ""),
        ("chunk = 8", ".chunk", 'unknown key "chunk"', 'did you mean "chunks"?'),
        (
            "zzz = 8",
            ".zzz",
            'unknown key "zzz"',
            "the options of gpipe are: balance, chunks, checkpoint, ratio, deferred",
        ),
        ('checkpoint = "allways"', ".checkpoint", '"allways" is not one of always, never, except_last', '"always"'),
        ("ratio = -1", ".ratio", "-1 is out of range", "at least 0"),
        ("deferred = 1", ".deferred", "1 is not true or false", ""),
    ],
)
def test_invalid_options(options: str, place: str, what: str, hint: str) -> None:
    """An invalid option is found in the file, not in the job."""
    found = mistakes(GOOD + f'strategy = [{{ name = "gpipe", {options} }}]', plugins=with_pipeline())
    assert found[f"matrix.strategy[0]{place}"][0] == what
    assert hint in found[f"matrix.strategy[0]{place}"][1]


def test_the_hint_for_a_strategy_without_options() -> None:
    found = mistakes(GOOD + 'strategy = { name = "eager", chunks = 2 }')
    assert found["matrix.strategy.chunks"] == ('unknown key "chunks"', "eager has no options")


def test_a_scalar_is_an_axis_of_one() -> None:
    assert parse(GOOD + "lr = 1").products[0][1] == ({"lr": 1.0},)


@pytest.mark.parametrize(("text", "value"), [("1", 1.0), ("1.0", 1.0), ("-0.0", 0.0), ("1e-3", 0.001)])
def test_equal_numbers_have_one_form_before_they_are_hashed(text: str, value: float) -> None:
    """1 and 1.0 are the same, and so are 0.0 and -0.0."""
    weight_decay = parse(GOOD + f"weight_decay = {text}").products[0][1][0]["weight_decay"]
    assert isinstance(weight_decay, float) and str(weight_decay) == str(value)


@pytest.mark.parametrize(
    "name", ["a b", 'it\'s "quoted"', "$HOME; touch /tmp/x", "`id` * ? # %", "résumé-实验", "a=b,c", "🙂", "-rf"]
)
def test_a_name_is_kept_byte_for_byte(name: str, tmp_path: Path) -> None:
    """Every printable character is allowed in a name."""
    quoted = name.replace("\\", "\\\\").replace('"', '\\"')
    path = tmp_path / "experiment.toml"
    path.write_bytes(GOOD.replace('"study"', f'"{quoted}"').encode())
    assert experiment.load(path).name == name


@pytest.mark.parametrize(
    ("escaped", "shown"), [("a\\nb", "\\n"), ("a\\tb", "\\t"), ("\\u0000", "\\x00"), ("a\\u2028b", "\\u2028")]
)
def test_a_name_of_several_lines_is_an_error(escaped: str, shown: str) -> None:
    """A line end would break tables and ``#SBATCH`` lines."""
    what, hint = mistakes(GOOD.replace("study", escaped))["name"]
    assert what.endswith(f"contains the control character '{shown}'")
    assert hint == "write it on one line, without tabs"


def test_a_file_without_a_name_is_called_experiment() -> None:
    assert parse(GOOD.replace('name = "study"', "")).name == "experiment"


def test_windows_files_are_read(tmp_path: Path) -> None:
    """A byte order mark and CRLF change nothing."""
    path = tmp_path / "experiment.toml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert dataclasses.replace(experiment.load(path), path=None, digest="", where="") == dataclasses.replace(
        parse(GOOD), digest="", where=""
    )


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_bytes(b'name = "x"\n# caf\xe9\n')
    with pytest.raises(ExperimentError) as caught:
        experiment.load(path)
    assert caught.value.text() == f"{path}: line 2: byte 0xe9 is not UTF-8\n  fix: save the file as UTF-8"


def test_a_missing_file_names_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        experiment.load(tmp_path / "experiment.toml")
    assert caught.value.exit_code == 2
    assert caught.value.what == "there is no experiment file"
    assert caught.value.hint == "orchestrate init --study demo"
    with pytest.raises(InputError) as caught:
        experiment.load(Path("no file.toml"))
    assert caught.value.hint == "orchestrate init --study demo -e 'no file.toml', or another name with -e"


def test_a_folder_is_not_an_experiment_file(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        experiment.load(tmp_path)
    assert caught.value.text() == f"{tmp_path}: cannot read the experiment file: Is a directory"


def rows(spec: ExperimentSpec) -> list[list[Mapping[str, Any]]]:
    return [list(axis) for axis in spec.products[0]]


def test_set_replaces_a_key_everywhere() -> None:
    """Defaults, axes, conditional values and includes: one value afterwards, and a note names the places."""
    text = GOOD + (
        "lr = [0.1, 0.2]\n[[when]]\nif = { seed = 1 }\nset = { lr = 0.3, epochs = 2 }\n"
        "[[include]]\nlr = 0.4\nmodel = 'vit_tiny'\n[[exclude]]\nmatch = { lr = 0.1 }\nwhy = 'x'"
    )
    spec = parse(text, "lr=7")
    assert rows(spec)[1] == [{"lr": 7.0}]
    assert (spec.defaults["lr"], spec.whens[0].values, spec.includes[0]) == (
        7.0,
        {"epochs": 2, "lr": 7.0},
        {"model": "vit_tiny", "lr": 7.0},
    )
    assert spec.excludes[0].match == {"lr": frozenset({0.1})}
    assert spec.overrides == ("--set lr=7 replaces the axis matrix.lr, when[0].set.lr, include[0].lr",)


@pytest.mark.parametrize("key", ["seed=1", "hardware=cpu"])
def test_a_key_that_is_set_twice_is_an_error(key: str) -> None:
    """Also with the same value twice: nobody should have to guess which one is used."""
    with pytest.raises(ExperimentError) as caught:
        parse(GOOD, key, "lr=1", f"{key.partition('=')[0]} = 2")
    name = key.partition("=")[0]
    assert caught.value.text() == f"--set {name} = 2: {name} is given twice\n  fix: remove one of them"


@pytest.mark.parametrize("name", ["imagefolder", "imagefoldr"])
def test_a_family_is_suggested_in_the_form_that_users_write(name: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        parse(GOOD, f"dataset={name}")
    assert 'did you mean "imagefolder/NAME"?' in caught.value.text()


def test_set_collapses_a_zip_to_rows_that_differ() -> None:
    """One list of a zip is replaced, and rows that became equal are merged."""
    text = GOOD + "[[zip]]\nlr = [0.1, 0.2, 0.2]\nbatch_size = [32, 32, 64]"
    assert rows(parse(text, "lr=1"))[1] == [{"lr": 1.0, "batch_size": 32}, {"lr": 1.0, "batch_size": 64}]


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("model=vit_tiny", "model", "vit_tiny"),
        ('model="vit_tiny"', "model", "vit_tiny"),
        ("hardware=a100:2", "hardware", Hardware("a100", 2)),
        ("time_limit=04:00:00", "time_limit", 14400),
        ("time_limit = 2h", "time_limit", 7200),
        ("nesterov=true", "nesterov", True),
        ("strategy={name='ddp', bucket_cap_mb=1}", "strategy", StrategyChoice("ddp", (("bucket_cap_mb", 1),))),
        ("dataset=imagefolder/a=b", "dataset", "imagefolder/a=b"),
    ],
)
def test_set_reads_toml_or_plain_text(text: str, key: str, value: object) -> None:
    """The shell removes quotes, so text and times need none."""
    assert parse(GOOD, text).defaults[key] == value


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("lr=abc", '"abc" is not a number', ""),
        ("lr=[1, 2]", "a list is not a number", "write one value; lists of values to try go into [matrix]"),
        ("learning=1", 'unknown key "learning"', ""),
        ("epoch=1", 'unknown key "epoch"', 'did you mean "epochs"?'),
        ("name=x", 'unknown key "name"', "write name at the top of the file, above the first [table]"),
        ("epochs", "not of the form KEY=VALUE", "write --set lr=0.1"),
        ("=1", "not of the form KEY=VALUE", "write --set lr=0.1"),
        ("seed=1\nlr=2", '"1\\nlr=2" is not a whole number', ""),
        ("model=cnn,vit_tiny", 'there is no model "cnn,vit_tiny"', "several go into a list in [matrix]"),
        ("foo=1", 'unknown key "foo"', "there are: model, dataset, strategy"),
        ("time_limit=04:00", '"04:00" may be 4 hours 0 minutes, or 4 minutes 0 seconds', 'write "04:00:00"'),
    ],
)
def test_set_mistakes_are_located_at_the_option(text: str, what: str, hint: str) -> None:
    found = mistakes(GOOD, text)
    assert what.replace('"1\\nlr=2"', repr("1\nlr=2")) == found[f"--set {text}"][0]
    assert hint in found[f"--set {text}"][1]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("[" * 1500 + "1" + "]" * 1500, "nested too deeply"),
        ("{a=" * 500 + "1" + "}" * 500, "nested too deeply"),
        ("9" * 5000, "a whole number of more than 64 bits"),
        ("-9223372036854775809", "a whole number of more than 64 bits"),
    ],
)
def test_set_rejects_values_that_no_key_takes(value: str, what: str) -> None:
    """With a short message, however long the text is."""
    ((where, (said, hint)),) = mistakes(GOOD, f"lr={value}").items()
    assert where.startswith("--set lr=") and len(where) < 80
    assert (said, hint.split(" takes")[0]) == (what, "no key")


def test_mistakes_of_set_are_reported_together_with_those_of_the_file() -> None:
    found = mistakes(GOOD + "epochs = 0", "lr=abc", "strategy={name='ddp', bucket_cap_mb=0}")
    assert set(found) == {
        "--set lr=abc",
        "--set strategy={name='ddp', bucket_cap_mb=0}: bucket_cap_mb",
        "matrix.epochs",
    }


def test_the_digest_depends_on_the_file_and_on_sets(tmp_path: Path) -> None:
    """So that a plan detects changes of its experiment."""
    path = tmp_path / "experiment.toml"
    path.write_text(GOOD)
    digest = experiment.load(path).digest
    assert experiment.load(path).digest == digest
    others = {experiment.load(path, ["lr=1"]).digest, experiment.load(path, ["lr=1", "epochs=2"]).digest}
    path.write_text(GOOD + "# a comment\n")
    others.add(experiment.load(path).digest)
    assert len(others | {digest}) == 4
