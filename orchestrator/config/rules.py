"""Rules of the product itself: what no strategy, model or data set can do, and why. Pure; reads declarations only.

A cell that breaks one is excluded, not refused, because a product of axes easily contains it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config.keys import StrategyChoice, Value
from orchestrator.plugins import Plugins
from workloads import registry
from workloads.contract import Hardware, Topology
from workloads.registry import DatasetDeclaration, DatasetShape, ModelDeclaration, StrategyDeclaration

READ = (
    "strategy",
    "hardware",
    "model",
    "dataset",
    "image_size",
    "stem",
    "dropout",
    "batch_size",
    "drop_last",
    "epochs",
    "steps",
    "batch_norm",
    "train_fraction",
    "precision",
    "channels_last",
    "compile",
    "cudnn_benchmark",
    "pretrained",
    "loader",
    "augment",
    "optimizer",
    "momentum",
    "nesterov",
)
"""The keys that any rule reads: cells that agree in them share one verdict."""


@dataclass(frozen=True, slots=True)
class Breach:
    """The first rule that a cell breaks."""

    rule: str
    """``strategy eager``, ``model vit_tiny``, ``batch_norm``."""
    why: str


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the rules look at."""

    values: Mapping[str, Value]
    strategy: StrategyDeclaration
    choice: StrategyChoice
    model: ModelDeclaration
    dataset: DatasetDeclaration
    shape: DatasetShape | None
    hardware: Hardware

    @property
    def options(self) -> registry.Options:
        """Of the strategy, its defaults filled in."""
        return _options(self.strategy, self.choice)


class Rules:
    """The product's rules over one set of declarations."""

    def __init__(self, plugins: Plugins, data_root: Path | None) -> None:
        self._plugins = plugins
        self._data_root = data_root

    def breach(self, values: Mapping[str, Value]) -> Breach | None:
        """The first rule that the values of a cell break."""
        return _first_breach(self._facts(values))

    def has_no_batch_norm(self, model: str) -> bool:
        """Whether a model is known to have none, so that ``batch_norm`` means nothing for it."""
        declaration = registry.find(self._plugins.models, model)
        return declaration is not None and declaration.has_batch_norm is False

    def ranks(self, choice: StrategyChoice, hardware: Hardware) -> int:
        """Processes that a strategy starts on some hardware."""
        declaration = registry.find(self._plugins.strategies, choice.name)
        assert declaration is not None, "the experiment file was checked"
        per_device = declaration.topology(_options(declaration, choice)) is Topology.PROCESS_PER_DEVICE
        return hardware.devices if per_device else 1

    def _facts(self, values: Mapping[str, Value]) -> _Facts:
        choice, hardware = values["strategy"], values["hardware"]
        assert isinstance(choice, StrategyChoice) and isinstance(hardware, Hardware)
        model_name, dataset_name = str(values["model"]), str(values["dataset"])
        strategy = registry.find(self._plugins.strategies, choice.name)
        model = registry.find(self._plugins.models, model_name)
        dataset = registry.find(self._plugins.datasets, dataset_name)
        assert strategy is not None and model is not None and dataset is not None, "the experiment file was checked"
        return _Facts(
            values,
            strategy,
            choice,
            model,
            dataset,
            dataset.shape(self._data_root, dataset_name),
            hardware,
        )


def _options(declaration: StrategyDeclaration, choice: StrategyChoice) -> dict[str, registry.OptionValue]:
    return {option.name: option.default for option in declaration.options} | dict(choice.options)


def _first_breach(facts: _Facts) -> Breach | None:
    """Rules in the order in which they help most: hardware before model before batch."""
    if facts.strategy.framework == registry.NO_FRAMEWORK:
        why = facts.strategy.unsupported_hardware(facts.hardware, facts.options) or facts.strategy.unsupported_training(
            facts.values, facts.options
        )
        return Breach(f"strategy {facts.strategy.name}", why) if why else None
    for rule, why in (
        (
            f"strategy {facts.strategy.name}",
            facts.strategy.unsupported_hardware(facts.hardware, facts.options)
            or facts.strategy.unsupported_training(facts.values, facts.options)
            or (facts.strategy.unsupported_batch_norm(facts.options) if facts.model.has_batch_norm else "")
            or _layers(facts),
        ),
        (f"model {facts.values['model']}", _framework(facts) or _samples(facts) or _image_size(facts)),
        (f"dataset {facts.values['dataset']}", facts.dataset.ignored_key(facts.values)),
        ("pretrained", _pretrained(facts)),
        facts.model.ignored_key(facts.values),
        ("precision", _precision(facts)),
        ("compile", _compile(facts)),
        ("cudnn_benchmark", _cudnn_benchmark(facts)),
        ("nesterov", _nesterov(facts)),
        ("batch_size", _batch_size(facts)),
        ("batch_norm", _batch_norm(facts)),
    ):
        if why:
            return Breach(rule, why)
    return None


def _framework(facts: _Facts) -> str:
    if facts.strategy.framework in facts.model.frameworks:
        return ""
    return f"{facts.values['model']} is not written for {facts.strategy.framework}, which {facts.strategy.name} needs"


def _layers(facts: _Facts) -> str:
    strategy, model = facts.strategy, str(facts.values["model"])
    if strategy.needs_layers and facts.model.layers is None:
        return f"{strategy.name} cuts a model into parts, and {model} cannot be cut"
    if facts.model.num_layers is None:
        return ""
    try:
        why = strategy.unsupported_layers(facts.model.num_layers(model), facts.hardware, facts.options)
    except ValueError:  # of a name that no model of the family has, which is the model's rule to tell
        return ""
    return f"{strategy.name} cannot cut {model}: {why}" if why else ""


def _samples(facts: _Facts) -> str:
    model, dataset = facts.model.samples, facts.dataset.samples
    if model is dataset:
        return ""
    return f"{facts.values['model']} is for {model}, and the data set {facts.values['dataset']} holds {dataset}"


def _image_size(facts: _Facts) -> str:
    shape = facts.shape
    wished, own = facts.values["image_size"], shape and (shape.image_size or shape.positions)
    assert wished is None or isinstance(wished, int)
    if wished is None and own is None:
        return ""
    try:
        facts.model.input_size(str(facts.values["model"]), wished, own or 0)
    except ValueError as error:
        return str(error)
    return ""


def _pretrained(facts: _Facts) -> str:
    if not facts.values["pretrained"]:
        return ""
    model, weights = facts.values["model"], facts.model.weights
    if weights is None:
        return f"there are no pretrained weights for {model}"
    if facts.values["stem"] != "imagenet":
        return f'the pretrained weights of {model} are for stem = "imagenet"'
    if facts.shape and facts.shape.channels != 3:
        return f"the pretrained weights of {model} are for colour images, and {facts.values['dataset']} has gray ones"
    size = facts.values["image_size"] or (facts.shape.image_size if facts.shape else None)
    if isinstance(size, int) and size < weights.smallest_px:
        return f"the pretrained weights of {model} are for {weights.smallest_px} px and more: set image_size"
    return ""


def _precision(facts: _Facts) -> str:
    tf32_on_cpu = facts.values["precision"] == "tf32" and facts.hardware.is_cpu
    return "tf32 is a mode of NVIDIA GPUs: on CPU use fp32" if tf32_on_cpu else ""


def _compile(facts: _Facts) -> str:
    how = str(facts.values["compile"])
    if how == "off":
        return ""
    if how != "default" and facts.hardware.is_cpu:
        return f'compile = "{how}" records the work of an NVIDIA GPU: on CPU use "off" or "default"'
    return facts.strategy.unsupported_compile(how, facts.options)


def _cudnn_benchmark(facts: _Facts) -> str:
    if not facts.values["cudnn_benchmark"]:
        return ""
    if facts.hardware.is_cpu:
        return "cudnn_benchmark is for NVIDIA GPUs: on CPU there is no cuDNN"
    return "" if facts.strategy.framework == "torch" else "cudnn_benchmark is a setting of torch"


def _nesterov(facts: _Facts) -> str:
    without = facts.values["optimizer"] == "sgd" and facts.values["nesterov"] and not facts.values["momentum"]
    return "nesterov needs a momentum above 0" if without else ""


def _shares(facts: _Facts) -> int:
    """Parts that every global batch is split into."""
    return facts.hardware.devices if facts.strategy.splits_batch else 1


def _num_train(facts: _Facts) -> int | None:
    """As the loaders count them: ``workloads.loaders.order.subset``."""
    fraction = facts.values["train_fraction"]
    assert isinstance(fraction, float)
    return max(1, round(fraction * facts.shape.num_train)) if facts.shape else None


def _batch_size(facts: _Facts) -> str:
    batch_size, shares, num_train = facts.values["batch_size"], _shares(facts), _num_train(facts)
    assert isinstance(batch_size, int)
    if batch_size < shares:
        return f"batch_size {batch_size} is less than one sample for each of {shares} ranks"
    if facts.values["drop_last"] and num_train is not None and num_train < batch_size:
        return f"drop_last leaves no step: {num_train} training images are fewer than batch_size {batch_size}"
    return ""


def _batch_norm(facts: _Facts) -> str:
    if not facts.model.has_batch_norm:  # of a model of which nobody knows yet, the job tells
        return ""
    return facts.strategy.unsupported_batches(facts.values, facts.options, facts.hardware, _num_train(facts))
