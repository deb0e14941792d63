"""What no strategy, model or data set can train, on any target. Reads declarations only.

A cell that breaks a rule is excluded and no error, because a product of axes easily contains such cells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.rules.rule import Candidate, Exclusion, Rule, first_exclusion
from workloads import registry

TRAINING_RULES: list[Rule[Candidate]] = []
"""In the order in which their reasons help most, which is that of this file: hardware before model before batch."""


def training_exclusion(cell: Candidate) -> Exclusion | None:
    """The first rule of :data:`TRAINING_RULES` that excludes a cell."""
    loads = cell.strategy.framework != registry.NO_FRAMEWORK
    return first_exclusion((rule for rule in TRAINING_RULES if loads or not rule.needs_framework), cell, cell.values)


Reason = Callable[[Candidate], str]


def _rule(name: str, *reads: str, needs_framework: bool = True) -> Callable[[Reason], Reason]:
    """Append the decorated function to :data:`TRAINING_RULES`."""

    def append(reason: Reason) -> Reason:
        TRAINING_RULES.append(Rule(name, reads, reason, needs_framework))
        return reason

    return append


@_rule("strategy {strategy.name}", "strategy", "hardware", needs_framework=False)
def _hardware(cell: Candidate) -> str:
    return cell.strategy.unsupported_hardware(cell.hardware, cell.options)


@_rule("strategy {strategy.name}", "strategy", needs_framework=False)
def _training(cell: Candidate) -> str:
    return cell.strategy.unsupported_training(cell.values, cell.options)


@_rule("strategy {strategy.name}", "strategy", "model")
def _batch_norm_layers(cell: Candidate) -> str:
    return cell.strategy.unsupported_batch_norm(cell.options) if cell.model.has_batch_norm else ""


@_rule("strategy {strategy.name}", "strategy", "model", "hardware")
def _layers(cell: Candidate) -> str:
    strategy, model = cell.strategy, cell.values["model"]
    if strategy.needs_layers and cell.model.layers is None:
        return f"{strategy.name} cuts a model into parts, and {model} cannot be cut"
    if cell.model.num_layers is None:
        return ""
    try:
        why = strategy.unsupported_layers(cell.model.num_layers(model), cell.hardware, cell.options)
    except ValueError:  # the family has no such model, which the rule of its image size reports
        return ""
    return f"{strategy.name} cannot cut {model}: {why}" if why else ""


@_rule("model {model}", "strategy", "model")
def _framework(cell: Candidate) -> str:
    if cell.strategy.framework in cell.model.frameworks:
        return ""
    return f"{cell.values['model']} is not written for {cell.strategy.framework}, which {cell.strategy.name} needs"


@_rule("model {model}", "model", "dataset")
def _samples(cell: Candidate) -> str:
    model, dataset = cell.model.samples, cell.dataset.samples
    if model is dataset:
        return ""
    return f"{cell.values['model']} is for {model}, and the data set {cell.values['dataset']} holds {dataset}"


@_rule("model {model}", "model", "dataset", "image_size")
def _image_size(cell: Candidate) -> str:
    requested, own = cell.values["image_size"], cell.shape and (cell.shape.image_size or cell.shape.positions)
    if requested is None and own is None:
        return ""
    try:
        cell.model.input_size(cell.values["model"], requested, own or 0)
    except ValueError as error:
        return str(error)
    return ""


@_rule("dataset {dataset}", "dataset", *registry.IMAGE_KEYS)
def _keys_of_images(cell: Candidate) -> str:
    return next(iter(cell.dataset.ignored_keys(cell.values).values()), "")


@_rule("pretrained", "pretrained", "model", "dataset", "stem", "image_size")
def _pretrained(cell: Candidate) -> str:
    if not cell.values["pretrained"]:
        return ""
    model, weights = cell.values["model"], cell.model.weights
    if weights is None:
        return f"there are no pretrained weights for {model}"
    if cell.values["stem"] != "imagenet":
        return f'the pretrained weights of {model} are for stem = "imagenet"'
    if cell.shape and cell.shape.channels != 3:
        return f"the pretrained weights of {model} are for colour images, and {cell.values['dataset']} has gray ones"
    size = cell.values["image_size"] or (cell.shape.image_size if cell.shape else None)
    if size is not None and size < weights.smallest_px:
        return f"the pretrained weights of {model} are for {weights.smallest_px} px and more: set image_size"
    return ""


@_rule("stem", "model", "stem", "dropout")
def _stem(cell: Candidate) -> str:
    return cell.model.ignored_keys(cell.values).get("stem", "")


@_rule("dropout", "model", "stem", "dropout")
def _dropout(cell: Candidate) -> str:
    return cell.model.ignored_keys(cell.values).get("dropout", "")


@_rule("precision", "precision", "hardware")
def _precision(cell: Candidate) -> str:
    tf32_on_cpu = cell.values["precision"] == "tf32" and cell.hardware.is_cpu
    return "tf32 is a mode of NVIDIA GPUs: on CPU use fp32" if tf32_on_cpu else ""


@_rule("compile", "compile", "strategy", "hardware")
def _compile(cell: Candidate) -> str:
    how = cell.values["compile"]
    if how == "off":
        return ""
    if how != "default" and cell.hardware.is_cpu:
        return f'compile = "{how}" records the work of an NVIDIA GPU: on CPU use "off" or "default"'
    return cell.strategy.unsupported_compile(how, cell.options)


@_rule("cudnn_benchmark", "cudnn_benchmark", "strategy", "hardware")
def _cudnn_benchmark(cell: Candidate) -> str:
    if not cell.values["cudnn_benchmark"]:
        return ""
    if cell.hardware.is_cpu:
        return "cudnn_benchmark is for NVIDIA GPUs: on CPU there is no cuDNN"
    return "" if cell.strategy.framework == "torch" else "cudnn_benchmark is a setting of torch"


@_rule("nesterov", "optimizer", "nesterov", "momentum")
def _nesterov(cell: Candidate) -> str:
    without = cell.values["optimizer"] == "sgd" and cell.values["nesterov"] and not cell.values["momentum"]
    return "nesterov needs a momentum above 0" if without else ""


@_rule("batch_size", "batch_size", "strategy", "hardware", "drop_last", "train_fraction", "dataset")
def _batch_size(cell: Candidate) -> str:
    batch_size, num_train = cell.values["batch_size"], cell.num_train
    ranks = cell.hardware.devices if cell.strategy.splits_batch else 1
    if batch_size < ranks:
        return f"batch_size {batch_size} is less than one sample for each of {ranks} ranks"
    if cell.values["drop_last"] and num_train is not None and num_train < batch_size:
        return f"drop_last leaves no step: {num_train} training images are fewer than batch_size {batch_size}"
    return ""


_OF_BATCHES = ("batch_size", "strategy", "hardware", "drop_last", "train_fraction", "dataset")


@_rule("batch_norm", "batch_norm", "steps", "model", *_OF_BATCHES)
def _batch_norm(cell: Candidate) -> str:
    if not cell.model.has_batch_norm:  # None: only the job can look into the model, and checks the same there
        return ""
    return cell.strategy.unsupported_batches(cell.values, cell.options, cell.hardware, cell.num_train)


@dataclass(frozen=True, slots=True)
class IgnoredKeys:
    """Keys that change nothing in some cells; they get their defaults there, so that they do not affect a run's id."""

    keys: tuple[str, ...]
    applies: Callable[[Candidate], bool]
    where: str
    """In words, with keys in braces."""


IGNORED_KEYS = (
    IgnoredKeys(("momentum", "nesterov"), lambda cell: cell.values["optimizer"] != "sgd", "without sgd"),
    IgnoredKeys(("workers",), lambda cell: cell.values["loader"] != "dataloader", "without the dataloader loader"),
    IgnoredKeys(("epochs",), lambda cell: cell.values["steps"] is not None, "beside steps"),
    IgnoredKeys(("batch_norm",), lambda cell: cell.model.has_batch_norm is False, "for {model}"),
)
