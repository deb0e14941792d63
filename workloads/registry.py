"""Declarations of strategies, models and data sets, and how they are found. Imports no framework.

A strategy, model or data set is one file in ``workloads/strategies``, ``workloads/models`` or ``workloads/datasets``
that binds the name ``DECLARATION``; the file's stem is the plug-in's name. Other packages add theirs through the
entry-point groups ``orchestrate.strategies``, ``.models`` and ``.datasets``, each entry naming a declaration.
A declaration is data, and functions that import their framework when called, so that login nodes need no framework.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from workloads.contract import Hardware, Topology, TrainConfig

if TYPE_CHECKING:
    from workloads.datasets.shared.image_data import ImageData
    from workloads.datasets.shared.sequence_data import SequenceData
    from workloads.models.shared.weights import Weights as Weights

PLUGIN_PACKAGES = ("strategies", "models", "datasets")
"""Our packages, and the last words of entry-point groups."""
TENSORFLOW = "tensorflow"
"""The framework whose models are ``ModelDeclaration.keras_layers``."""

WEIGHTS = "weights/"
"""Prefix that names a model's pretrained weights in place of a data set."""
NO_FRAMEWORK = "none"
"""The framework of strategies that load neither model nor data."""


class Samples(StrEnum):
    """Kind of samples; that of a model and its data set must agree."""

    IMAGES = "images"
    """Each with a class."""
    SEQUENCES = "sequences"
    """Of symbols; the class of a position is the next symbol."""


OptionValue = bool | int | float | str | tuple[int, ...]
Options = Mapping[str, OptionValue]


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a strategy, such as DDP's bucket size."""

    name: str
    """Ends with its unit, as in ``bucket_cap_mb``."""
    default: OptionValue
    """Its type is the option's type."""
    summary: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None

    @property
    def type(self) -> Any:
        return type(self.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyDeclaration:
    """A strategy of parallel training. The functions ``unsupported_*`` return a reason, or an empty text."""

    name: str
    summary: str
    """One sentence for ``--help`` and the docs' table."""
    framework: str = "torch"
    """``torch``, ``tensorflow`` or :data:`NO_FRAMEWORK`: which engine runs it."""
    topology: Callable[[Options], Topology]
    splits_batch: bool
    """Whether each rank takes its own part of the global batch (data parallel) or all ranks see the whole batch."""
    packages: tuple[str, ...] = ("torch",)
    """Distributions the job's interpreter must have, as ``importlib.metadata`` names them; ``one|other`` is either."""
    options: tuple[Option, ...] = ()
    batch_norm_treatment: str
    """What batch norm sees under this strategy (``per_rank``, ``whole_batch``, ``per_micro_batch``)."""
    create: Callable[[], Callable[..., Any]]
    """Imports the framework and returns the class, one of ``strategies.shared.protocol`` or
    ``strategies.shared.keras_protocol``; called in the job only."""
    needs_layers: bool = False
    """Whether it needs a model that can be cut into layers."""
    micro_batches: Callable[[Options], int] = lambda _options: 1
    """Number of micro-batches that a step cuts a rank's samples into, as ``torch.chunk`` does; batch norm sees one."""
    equal_micro_batches: bool = False
    """Whether micro-batches must have equal sizes, so that an odd batch is padded, which batch norm would see."""
    divides_state: Callable[[Options], bool] = lambda _options: False
    """Whether each device holds only a part of weights, gradients and optimiser state, so that a model may be larger
    than one device."""
    equal_under: tuple[str, ...] = ("sgd", "adam", "adamw")
    """Optimisers with which it learns what eager learns, apart from batch norm."""
    contract_options: tuple[Options, ...] = field(default=({},), hash=False)
    """Sets of options with which contract tests compare it with eager; together they reach all of its code."""

    unsupported_hardware: Callable[[Hardware, Options], str] = lambda _hardware, _options: ""
    """Why it cannot run on that hardware."""
    unsupported_training: Callable[[Mapping[str, Any], Options], str] = lambda _train, _options: ""
    """(keys of ``experiment.toml`` to values, options) -> why it cannot train like that. It may read any key."""
    unsupported_layers: Callable[[int, Hardware, Options], str] = lambda _layers, _hardware, _options: ""
    """Why it cannot cut a model with that many layers into its parts."""
    unsupported_compile: Callable[[str, Options], str] = lambda _how, _options: "it cannot be compiled or recorded"
    """Why it cannot train with that value of ``compile`` (``default``, ``graphs`` or ``default_graphs``). Where it can,
    its class is a :class:`workloads.strategies.shared.protocol.PreparingStrategy` too."""
    unsupported_batch_norm: Callable[[Options], str] = lambda _options: ""
    """Why it cannot train a model that has batch norm, live or frozen."""

    def options_with_defaults(self, given: Options) -> dict[str, OptionValue]:
        """All options of the strategy: those given, and the defaults of the others."""
        return {option.name: option.default for option in self.options} | dict(given)

    def num_ranks(self, hardware: Hardware, options: Options) -> int:
        """Processes that it starts on some hardware."""
        return hardware.devices if self.topology(options) is Topology.PROCESS_PER_DEVICE else 1

    def unsupported_batches(
        self, train: Mapping[str, Any], options: Options, hardware: Hardware, num_train: int | None
    ) -> str:
        """Why live batch norm cannot normalise such batches, in plan and job alike; empty when it can.

        ``num_train`` is the number of samples of an epoch, None where it is not known yet.
        """
        if train["batch_norm"] == "frozen":
            return ""
        batch_size, steps = train["batch_size"], train["steps"]
        shares = hardware.devices if self.splits_batch else 1
        micro_batches = self.micro_batches(options)
        who = f"one of {shares} ranks" if shares > 1 else "a step"
        if micro_batches > 1:
            who = f"one of {micro_batches} micro-batches"
        if _smallest_part(batch_size // shares, micro_batches) < 2:
            return (
                f"batch_size {batch_size} leaves {who} with a single sample, which batch norm cannot normalise: "
                f'raise batch_size, or set batch_norm = "frozen"'
            )
        if self.equal_micro_batches and batch_size // shares % micro_batches:
            return (
                f"batch_size {batch_size} cannot be cut into {micro_batches} equal micro-batches, and batch norm would "
                "see the padding: set another batch_size"
            )
        full_batches, last = divmod(num_train or 0, batch_size)
        if num_train is None or train["drop_last"] or last == 0 or (steps is not None and steps <= full_batches):
            return ""
        problem = ""
        if self.equal_micro_batches:
            problem = "is padded to whole micro-batches, which batch norm would see"
        elif _smallest_part(last // shares, micro_batches) < 2:
            problem = f"leaves {who} with a single one or none, which batch norm cannot normalise"
        fix = "set drop_last = true, or another batch_size"
        return problem and f"the last batch of an epoch has {last} of {batch_size} samples and {problem}: {fix}"


def _smallest_part(samples: int, parts: int) -> int:
    """Return the samples in the last part of ``torch.chunk``; the others are equal, and few samples make fewer."""
    size = -(-samples // parts)
    return samples - size * (-(-samples // size) - 1) if samples else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDeclaration:
    """A model, or a family of models, that any strategy of its frameworks can train."""

    name: str
    """``NAME``, or ``FAMILY/*`` for every model of a family (``timm/*``)."""
    summary: str
    frameworks: tuple[str, ...]
    packages: tuple[str, ...]
    """Distributions that its torch form needs; that of Keras needs those of the strategy only."""
    image_size: Callable[[str, int], int] = lambda _name, wished: wished
    """(model name, requested image size or that of the data set) -> pixels a side of its input; positions, of
    sequences. Raises ValueError with the reason when it cannot take that size. See :meth:`input_size`."""
    build: Callable[[TrainConfig, int, int, int], Any]
    """(config, input channels, classes, pixels a side or positions) -> the framework's module, on CPU, initialised from
    the global random state that the engine seeded; dropout already set from ``config.dropout``. Imports the framework.
    Its output is (samples, classes), or (samples, classes, positions)."""
    keras_layers: Callable[[Any, TrainConfig, int], list[Any]] | None = None
    """(``workloads.models.keras_forms.layers.Maker``, config, classes) -> the model as Keras layers in order, as many
    as :attr:`layers` has, parameters named as the torch form's. Imports the framework."""
    samples: Samples = Samples.IMAGES
    layers: Callable[[Any], list[Any]] | None = None
    """(module of ``build``) -> its layers in order, each taking the output of the one before, sharing the model's
    modules; for strategies that cut a model into parts. None: it cannot be cut. Raises InputError when one member of a
    family cannot. See ``workloads.models.shared.layer_lists``."""
    num_layers: Callable[[str], int] | None = None
    """(model name) -> number of :attr:`layers`, for the planner; None: not known without building it."""
    has_batch_norm: bool | None = None
    """None: not known without building it."""
    has_dropout: bool | None = None
    """Whether it has a layer for ``dropout``; else a rate above 0 is an error. None: not known without building it."""
    weights: Weights | None = None
    """Weights for ``pretrained``; None: there are none."""
    uses_stem: bool = False
    """Whether it uses ``stem``; for others a non-default one is an error."""
    num_parameters: Callable[[str], int] | None = None
    """(model name) -> approximate number; for models so large that the planner should warn where they do not fit."""

    def input_size(self, name: str, requested: int | None, own: int) -> int:
        """Pixels a side, or positions, of a model's input for the ``requested`` size, else the data set's ``own``.

        Raises:
            ValueError: with the reason, when it cannot take that size, or takes another size than was requested.
        """
        size = self.image_size(name, own if requested is None else requested)
        if requested not in (None, size):
            raise ValueError(f"{name} takes images of {size} px, not {requested}: write {size}, or remove image_size")
        return size

    def ignored_keys(self, train: Mapping[str, Any]) -> dict[str, str]:
        """Keys that are set and would change nothing of this model, each with the reason."""
        what = {}
        if train["stem"] != "imagenet" and not self.uses_stem:
            what["stem"] = f'ignores stem = "{train["stem"]}"'
        if train["dropout"] and self.has_dropout is False:
            what["dropout"] = f"has no dropout layer and ignores dropout = {train['dropout']}"
        return {key: f"{train['model']} {why}: set it in a [[when]] for other models" for key, why in what.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An error of a data set on disk."""

    where: str
    what: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetDeclaration:
    """A data set. ``name`` below is the full name as written (``imagefolder/cifar10``)."""

    name: str
    """``NAME``, or ``FAMILY/*`` (``imagefolder/*``)."""
    summary: str
    packages: tuple[str, ...]
    needs_root: bool
    """Whether it is below the data root; embedded and synthetic sets are not."""
    shape: Callable[[Path | None, str], DatasetShape | None]
    """(data root, name) -> its shape; None when that requires reading much."""
    check: Callable[[Path | None, str], list[Problem]] = lambda _root, _name: []
    """Cheap check before anything is queued: presence and sizes, not contents."""
    digest: Callable[[Path | None, str], str]
    """Digest of the content as it is now, empty when that takes long to find out; it may read a manifest."""
    prepare: Callable[[Path | None, str, Callable[[str], None]], None] = lambda _root, name, progress: progress(
        f"{name}: needs no preparation"
    )
    """Fetch, verify, decode: all that makes ``load`` quick and offline. Reports progress in sentences. Idempotent, safe
    in two processes at once, never leaves half a data set. Raises DatasetError."""
    load: Callable[[Path | None, str, TrainConfig], ImageData | SequenceData]
    """In the job: verified arrays or files. Raises DatasetError that names the damaged file."""
    samples: Samples = Samples.IMAGES
    folder: Callable[[Path, str], Path] | None = None
    """(data root, name) -> the folder below the root that holds all of it, so that jobs may copy it to a node's disk;
    it may raise what ``load`` raises. None: jobs copy nothing."""
    members: Callable[[Path | None], list[str]] | None = None
    """Of a family: full names of the members that are below the data root now."""

    def ignored_keys(self, train: Mapping[str, Any]) -> dict[str, str]:
        """Keys that are set and would change nothing of this data, each with the reason."""
        if self.samples is Samples.IMAGES:
            return {}
        return {
            key: f"{key} is for images, and {train['dataset']} holds {self.samples}"
            for key, default in IMAGE_KEYS.items()
            if train[key] != default
        }


IMAGE_KEYS: Mapping[str, OptionValue | None] = {
    "image_size": None,
    "augment": "none",
    "loader": "resident",
    "channels_last": False,
}
"""Keys that other data ignores, with their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetShape:
    """Sizes of a data set."""

    image_size: int | None
    """Pixels a side of a stored image, and of a model's input unless ``image_size`` is set. None for sequences."""
    channels: int | None
    """None for sequences."""
    classes: int
    num_train: int
    num_test: int
    positions: int | None = None
    """Of a sequence; None for images."""


Declaration = TypeVar("Declaration", StrategyDeclaration, ModelDeclaration, DatasetDeclaration)
Value = TypeVar("Value")


@cache
def entry_points() -> tuple[importlib.metadata.EntryPoint, ...]:
    """The plug-ins of other packages, of every group; cached, as it reads a file of each installed distribution."""
    every = importlib.metadata.entry_points()
    return tuple(point for package in PLUGIN_PACKAGES for point in every.select(group=f"orchestrate.{package}"))


def _entry_points_of(package: str) -> list[importlib.metadata.EntryPoint]:
    return [point for point in entry_points() if point.group == f"orchestrate.{package}"]


def _found(package: str, kind: type[Declaration]) -> dict[str, Declaration]:
    declarations: dict[str, Declaration] = {}
    folder = importlib.import_module(f"workloads.{package}").__path__
    for name in sorted(module.name for module in pkgutil.iter_modules(folder)):
        declaration = getattr(importlib.import_module(f"workloads.{package}.{name}"), "DECLARATION", None)
        if isinstance(declaration, kind):
            declarations[declaration.name] = declaration
    for point in _entry_points_of(package):
        declaration = point.load()
        if not isinstance(declaration, kind):
            raise TypeError(f"entry point {point.value} of group {point.group} is not a {kind.__name__}")
        declarations[declaration.name] = declaration
    return declarations


strategies = cache(partial(_found, "strategies", StrategyDeclaration))
"""Return all strategies by name."""
models = cache(partial(_found, "models", ModelDeclaration))
"""Return all models and model families by name."""
datasets = cache(partial(_found, "datasets", DatasetDeclaration))
"""Return all data sets and data set families by name."""


def find(declarations: Mapping[str, Value], name: str) -> Value | None:
    """The value of a name, or of its family (``timm/resnet18`` is of ``timm/*``); None where there is neither."""
    exact = declarations.get(name)
    if exact is not None and not name.endswith("/*"):
        return exact
    family, slash, member = name.partition("/")
    return declarations.get(f"{family}/*") if slash and member else None


def require(declarations: Mapping[str, Value], name: str) -> Value:
    """The value that :func:`find` finds for a name of a checked experiment."""
    found = find(declarations, name)
    assert found is not None, "the experiment file was checked"
    return found


@cache
def _packages(package: str) -> dict[str, str]:
    return {point.load().name: point.module.partition(".")[0] for point in _entry_points_of(package)}


def foreign_packages(train: TrainConfig) -> tuple[str, ...]:
    """Top-level packages of other distributions that a run's strategy, model and data set come from."""
    names = zip(PLUGIN_PACKAGES, (train.strategy, train.model, train.dataset), strict=True)
    return tuple(sorted({found for package, name in names if (found := find(_packages(package), name))}))


def weights(name: str) -> Weights | None:
    """The pretrained weights that ``weights/MODEL`` names; None for another name, or a model that has none."""
    declaration = models().get(name.removeprefix(WEIGHTS)) if name.startswith(WEIGHTS) else None
    return declaration.weights if declaration else None
