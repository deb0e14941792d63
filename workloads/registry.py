"""What a plug-in declares, and how declarations are found. Imports no framework.

A strategy, model or data set is one file in ``workloads/strategies``, ``workloads/models`` or ``workloads/datasets``
that binds the name ``DECLARATION``; the file's stem is the plug-in's name. Packages elsewhere add their own through the
entry-point groups ``orchestrate.strategies``, ``.models`` and ``.datasets``, each entry naming a declaration.
A declaration is data plus functions that import their framework when called, so the login side reads it anywhere.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from workloads.contract import Hardware, Topology, TrainConfig

if TYPE_CHECKING:
    from workloads.datasets.shared.image_data import ImageData
    from workloads.datasets.shared.sequence_data import SequenceData
    from workloads.models.shared.weights import Weights as Weights

PLUGIN_PACKAGES = ("strategies", "models", "datasets")
"""Packages of ours, and the last words of entry-point groups."""
TENSORFLOW = "tensorflow"
"""The framework whose models are ``ModelDeclaration.keras_layers``."""

WEIGHTS = "weights/"
"""Before a model's name where data sets are named: its pretrained weights."""
NO_FRAMEWORK = "none"
"""The framework of a strategy that loads neither model nor data: any of them goes with it."""


class Samples(StrEnum):
    """What a data set holds and a model is fed; the two must agree."""

    IMAGES = "images"
    """With a class each."""
    SEQUENCES = "sequences"
    """Of symbols; of each position, the symbol that follows is the class."""


OptionValue = bool | int | float | str | tuple[int, ...]
Options = Mapping[str, OptionValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a strategy, such as DDP's bucket size."""

    name: str
    """With its unit, as in ``bucket_cap_mb``."""
    type: type[bool] | type[int] | type[float] | type[str] | type[tuple[int, ...]]
    default: OptionValue
    summary: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyDeclaration:
    """A way of parallel training, as the planner sees it."""

    name: str
    summary: str
    """One sentence for ``--help`` and the docs' table."""
    framework: str
    """``torch``, ``tensorflow`` or :data:`NO_FRAMEWORK`: which engine runs it."""
    topology: Callable[[Options], Topology]
    splits_batch: bool
    """Whether each rank takes its own part of the global batch (data parallel) or all ranks see the whole batch."""
    packages: tuple[str, ...]
    """Distributions the job's interpreter must have, as ``importlib.metadata`` names them; ``one|other`` is either."""
    options: tuple[Option, ...] = ()
    batch_norm_treatment: str
    """What batch norm sees under this strategy (``per_rank``, ``whole_batch``, ``per_micro_batch``)."""
    create: Callable[[], Callable[..., Any]]
    """Imports the framework and returns the class, one of ``strategies.shared.protocol`` or
    ``strategies.shared.keras_protocol``; called in the job only."""
    unsupported_hardware: Callable[[Hardware, Options], str] = lambda _hardware, _options: ""
    """Why this strategy cannot run on that hardware; empty when it can."""
    unsupported_training: Callable[[Mapping[str, Any], Options], str] = lambda _train, _options: ""
    """Why it cannot train like that (keys of ``TrainConfig`` to values); empty when it can. It may read ``precision``,
    ``channels_last``, ``loader``, ``optimizer`` and ``epochs``."""
    needs_layers: bool = False
    """Whether the model must be one that can be cut into a list of layers."""
    unsupported_layers: Callable[[int, Hardware, Options], str] = lambda _layers, _hardware, _options: ""
    """Why it cannot cut a model of so many layers into its parts; empty when it can."""
    micro_batches: Callable[[Options], int] = lambda _options: 1
    """Into how many micro-batches a step cuts what a rank has of a batch, as ``torch.chunk`` cuts; batch norm sees
    one."""
    divides_state: Callable[[Options], bool] = lambda _options: False
    """Whether each device holds its part only of weights, gradients and optimiser state, so that models larger than one
    device can be trained."""
    equal_micro_batches: bool = False
    """Whether those must be of equal size, so that samples are made up for an odd batch; batch norm would see them."""
    contract_options: tuple[Options, ...] = field(default=({},), hash=False)
    """Sets of options under which contract tests compare it with eager; together they reach all of its code."""
    unsupported_compile: Callable[[str, Options], str] = lambda _how, _options: "it cannot be compiled or recorded"
    """(``default``, ``graphs`` or ``default_graphs``) -> why it cannot train with that value of ``compile``; empty when
    it can, and then its class is a :class:`workloads.strategies.shared.protocol.PreparingStrategy` too."""
    equal_under: tuple[str, ...] = ("sgd", "adam", "adamw")
    """Optimisers under which it learns what eager learns, batch norm aside."""
    unsupported_batch_norm: Callable[[Options], str] = lambda _options: ""
    """Why it cannot train a model that has batch norm, live or frozen; empty when it can."""

    def options_with_defaults(self, given: Options) -> dict[str, OptionValue]:
        """All options of the strategy: those given, and the defaults of the others."""
        return {option.name: option.default for option in self.options} | dict(given)

    def num_ranks(self, hardware: Hardware, options: Options) -> int:
        """Processes that it starts on some hardware."""
        return hardware.devices if self.topology(options) is Topology.PROCESS_PER_DEVICE else 1

    def unsupported_batches(
        self, train: Mapping[str, Any], options: Options, hardware: Hardware, num_train: int | None
    ) -> str:
        """Why batches like these are not for live batch norm, in plan and job alike; empty when they are.

        Args:
            train: keys of ``TrainConfig`` to values.
            options: all of this strategy's, the defaults filled in.
            hardware: what it trains on.
            num_train: samples of an epoch; None where that is not known yet.
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
                "see the samples that make up for it: set another batch_size"
            )
        if num_train is None or train["drop_last"]:
            return ""
        full_batches, last = divmod(num_train, batch_size)
        if last == 0 or (steps is not None and steps <= full_batches):
            return ""
        if self.equal_micro_batches:
            return (
                f"the last batch of an epoch has {last} of {batch_size} samples and is filled up to whole "
                "micro-batches, which batch norm would see: set drop_last = true, or another batch_size"
            )
        if _smallest_part(last // shares, micro_batches) >= 2:
            return ""
        return (
            f"the last batch of an epoch has {last} of {batch_size} samples and leaves {who} with a single one or "
            "none, which batch norm cannot normalise: set drop_last = true, or another batch_size"
        )


def _smallest_part(samples: int, parts: int) -> int:
    """Samples in the last part as ``torch.chunk`` cuts: into equal ones, the last smaller; fewer of few samples."""
    size = -(-samples // parts)
    return samples - size * (-(-samples // size) - 1) if samples else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDeclaration:
    """A model that any strategy of its frameworks can train."""

    name: str
    """``NAME``, or ``FAMILY/*`` for every model of a family (``timm/*``)."""
    summary: str
    frameworks: tuple[str, ...]
    packages: tuple[str, ...]
    """Distributions that the torch form needs; that of Keras needs none but those of the strategy."""
    image_size: Callable[[str, int], int] = lambda _name, wished: wished
    """(model name, data set's or wished image size) -> pixels a side the model is fed; positions, of sequences. Raises
    ValueError with the reason when the model cannot take that size. See :meth:`input_size`."""
    build: Callable[[TrainConfig, int, int, int], Any]
    """(config, input channels, classes, pixels a side or positions) -> the framework's module, on CPU, initialised from
    the global random state that the engine seeded; dropout already set from ``config.dropout``. Imports the framework.
    It answers (samples, classes), or (samples, classes, positions)."""
    keras_layers: Callable[[Any, TrainConfig, int], list[Any]] | None = None
    """(``workloads.models.keras_forms.layers.Maker``, config, classes) -> the model as Keras layers in order, as many
    as :attr:`layers` has, parameters named as the torch form's. Imports the framework."""
    samples: Samples = Samples.IMAGES
    layers: Callable[[Any], list[Any]] | None = None
    """(what ``build`` made) -> its layers in order, each fed by the one before, sharing the model's modules; for
    strategies that cut a model into parts. None: this model cannot be cut. Raises InputError when one member of a
    family cannot. See ``workloads.models.shared.layer_lists``."""
    num_layers: Callable[[str], int] | None = None
    """(model name) -> how many :attr:`layers` has, for the planner; None: not known without building it."""
    has_batch_norm: bool | None = None
    """None: not known without building it."""
    has_dropout: bool | None = None
    """Whether ``dropout`` finds a layer; where there is none a rate above 0 is refused. None: not known likewise."""
    weights: Weights | None = None
    """What ``pretrained`` starts from; None: it is refused."""
    uses_stem: bool = False
    """Whether ``stem`` means something for this model; others refuse a non-default one."""
    num_parameters: Callable[[str], int] | None = None
    """(model name) -> about how many it has; for models so large that the planner should tell where they do not fit."""

    def input_size(self, name: str, wished: int | None, own: int) -> int:
        """Pixels a side, or positions, that a model is fed.

        Args:
            name: of the model.
            wished: ``image_size``; None where nobody set it.
            own: of the data set.

        Raises:
            ValueError: with the reason, when it cannot take that size, or would be fed another than was wished.
        """
        size = self.image_size(name, own if wished is None else wished)
        if wished not in (None, size):
            raise ValueError(
                f"{name} is fed images of {size} px, never of {wished}: write {size}, or leave image_size out"
            )
        return size

    def ignored_keys(self, train: Mapping[str, Any]) -> dict[str, str]:
        """Keys that are set and would change nothing of this model, each with the reason."""
        model, stem, dropout = train["model"], train["stem"], train["dropout"]
        ignored = {}
        if stem != "imagenet" and not self.uses_stem:
            ignored["stem"] = f'{model} ignores stem = "{stem}": set it in a [[when]] for other models'
        if dropout and self.has_dropout is False:
            ignored["dropout"] = (
                f"{model} has no dropout layer and ignores dropout = {dropout}: set it in a [[when]] for other models"
            )
        return ignored

    def packages_for(self, framework: str) -> tuple[str, ...]:
        """Distributions that its form for a framework needs."""
        return self.packages if framework == "torch" else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something wrong with a data set on disk."""

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
    """Whether it lies below the data root; embedded and synthetic sets do not."""
    shape: Callable[[Path | None, str], DatasetShape | None]
    """(data root, name) -> its shape; None when it cannot be told without reading much."""
    check: Callable[[Path | None, str], list[Problem]] = lambda _root, _name: []
    """Cheap check before anything is queued: presence and sizes, not contents."""
    digest: Callable[[Path | None, str], str]
    """Digest of the content as it is now, empty when that takes long to find out; it may read a manifest."""
    prepare: Callable[[Path | None, str, Callable[[str], None]], None] = lambda _root, name, progress: progress(
        f"{name}: needs no preparation"
    )
    """Fetch, verify, decode: whatever makes ``load`` quick and offline. Reports progress as sentences. Idempotent, safe
    when two processes run it at once, never leaves half a data set. Raises DatasetError."""
    load: Callable[[Path | None, str, TrainConfig], ImageData | SequenceData]
    """In the job: verified arrays or files. Raises DatasetError naming the damaged file."""
    samples: Samples = Samples.IMAGES
    folder: Callable[[Path, str], Path] | None = None
    """(data root, name) -> the folder below the root that holds all of it, so that jobs may copy it to a node's own
    disk; it may raise what ``load`` raises. None: nothing is copied."""
    members: Callable[[Path | None], list[str]] | None = None
    """Of a family: the full names of what lies below the data root now."""

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
"""Keys that mean nothing for other data, with what they hold where nobody set them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetShape:
    """What the planner needs to know of a data set."""

    image_size: int | None
    """Pixels a side of a stored image; the size a model is fed unless ``image_size`` says otherwise. None for
    sequences."""
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
    """The plug-ins of other packages, of every group; looked for once, as each look reads a file a distribution."""
    every = importlib.metadata.entry_points()
    return tuple(point for package in PLUGIN_PACKAGES for point in every.select(group=f"orchestrate.{package}"))


def _found(package: str, kind: type[Declaration]) -> dict[str, Declaration]:
    module: ModuleType = importlib.import_module(f"workloads.{package}")
    declarations: dict[str, Declaration] = {}
    for entry in sorted(pkgutil.iter_modules(module.__path__), key=lambda m: m.name):
        plugin = importlib.import_module(f"workloads.{package}.{entry.name}")
        declaration = getattr(plugin, "DECLARATION", None)
        if isinstance(declaration, kind):
            declarations[declaration.name] = declaration
    for point in entry_points():
        if point.group != f"orchestrate.{package}":
            continue
        declaration = point.load()
        if not isinstance(declaration, kind):
            raise TypeError(f"entry point {point.value} of group orchestrate.{package} is not a {kind.__name__}")
        declarations[declaration.name] = declaration
    return declarations


@cache
def strategies() -> dict[str, StrategyDeclaration]:
    """All strategies by name."""
    return _found("strategies", StrategyDeclaration)


@cache
def models() -> dict[str, ModelDeclaration]:
    """All models and model families by name."""
    return _found("models", ModelDeclaration)


@cache
def datasets() -> dict[str, DatasetDeclaration]:
    """All data sets and data set families by name."""
    return _found("datasets", DatasetDeclaration)


def find(declarations: Mapping[str, Value], name: str) -> Value | None:
    """What there is of a name, or of its family (``timm/resnet18`` is of ``timm/*``)."""
    exact = declarations.get(name)
    if exact is not None and not name.endswith("/*"):
        return exact
    family, slash, member = name.partition("/")
    return declarations.get(f"{family}/*") if slash and member else None


@cache
def _packages(package: str) -> dict[str, str]:
    points = [point for point in entry_points() if point.group == f"orchestrate.{package}"]
    return {point.load().name: point.module.partition(".")[0] for point in points}


def foreign_packages(train: TrainConfig) -> tuple[str, ...]:
    """Top-level packages of other distributions that a run's strategy, model and data set come from."""
    names = zip(PLUGIN_PACKAGES, (train.strategy, train.model, train.dataset), strict=True)
    return tuple(sorted({found for package, name in names if (found := find(_packages(package), name))}))


def weights(name: str) -> Weights | None:
    """The pretrained weights that ``weights/MODEL`` names; None for another name, or a model that has none."""
    declaration = models().get(name.removeprefix(WEIGHTS)) if name.startswith(WEIGHTS) else None
    return declaration.weights if declaration else None
