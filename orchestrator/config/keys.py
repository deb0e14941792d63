"""The keys of ``experiment.toml`` that describe one training run, with the type and range of each.

Every key is a field of ``TrainConfig`` or ``Execution``, whose metadata say what the key may hold. Three pydantic
models check the same keys as single values (``Values``), as axes (``Axes``) and as conditions (``Match``).
"""

from __future__ import annotations

import dataclasses
import unicodedata
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

from annotated_types import Interval
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    create_model,
)

from orchestrator.plugins import Plugins, nearest
from orchestrator.toml_file import TomlTable, explain, invalid, invalid_values, quantity, show
from orchestrator.units import LARGEST, parse_memory, parse_time_limit
from workloads import registry
from workloads.contract import Execution, Hardware, TrainConfig
from workloads.registry import Option, OptionValue, StrategyDeclaration


class StrategyChoice(NamedTuple):
    """A strategy with the options that differ from its own defaults, in the order of their names."""

    name: str
    options: tuple[tuple[str, OptionValue], ...] = ()

    def __str__(self) -> str:
        if not self.options:
            return self.name
        return f"{self.name}({','.join(f'{key}={_option_text(value)}' for key, value in self.options)})"


class StrategyMatch(NamedTuple):
    """The strategy of a condition: a name, and some options."""

    name: str
    options: tuple[tuple[str, OptionValue, OptionValue], ...] = ()
    """(option, wanted value, default)"""

    def matches(self, choice: StrategyChoice) -> bool:
        """Whether a choice is of this strategy with these options, whatever its others are."""
        chosen = dict(choice.options)
        return self.name == choice.name and all(chosen.get(key, default) == v for key, v, default in self.options)


Value = bool | int | float | str | StrategyChoice | Hardware | None
"""Value of a key once it is checked; ``None`` only for a key that nobody set."""


def _option_text(value: OptionValue) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return ("false", "true")[value] if isinstance(value, bool) else str(value)


def text(value: str) -> str:
    """Check for control characters and line ends, which break tables, logs and ``#SBATCH`` lines."""
    for character in value:
        if unicodedata.category(character) in {"Cc", "Cs", "Zl", "Zp"}:
            raise invalid(
                f"{show(value)} contains the control character {character!r}", "write it on one line, without tabs"
            )
    if not value.strip():
        raise invalid("an empty text", "write a value, or remove the key")
    return value


Text = Annotated[str, AfterValidator(text)]


def _declared(kind: str, name: str, info: ValidationInfo) -> Any:
    """The declaration that a key names."""
    plugins: Plugins = info.context["plugins"] if info.context else Plugins.installed()
    found = registry.find(plugins.of(kind), name)
    if found is None:
        names = [known.replace("/*", "/NAME") for known in plugins.names(kind)]  # a family: NAME is one of its members
        hint = nearest(name, names) or f"there are: {', '.join(names) or 'none'}"
        several = "write one name; several go into a list in [matrix]"
        raise invalid(f"there is no {kind} {show(name)}", several if "," in name else hint)
    return found


def _plugin(kind: str) -> Any:
    def check(value: str, info: ValidationInfo) -> str:
        _declared(kind, text(value), info)
        return value

    return Annotated[str, AfterValidator(check)]


def _strategy(value: object, info: ValidationInfo) -> StrategyChoice:
    name, options = _named(value, info)
    return StrategyChoice(name, tuple((key, given) for key, given, default in options if given != default))


def _strategy_match(value: object, info: ValidationInfo) -> StrategyMatch:
    return StrategyMatch(*_named(value, info))


def _named(value: object, info: ValidationInfo) -> tuple[str, tuple[tuple[str, OptionValue, OptionValue], ...]]:
    """Read a strategy's name, or a table with ``name`` and options: the name, and each (option, value, default)."""
    if isinstance(value, str):
        name, options = value, {}
    elif isinstance(value, dict) and isinstance(value.get("name"), str):
        name, options = value["name"], {key: given for key, given in value.items() if key != "name"}
    else:
        what = "a strategy without a name" if isinstance(value, dict) else f"{show(value)} is not a strategy"
        raise invalid(what, 'write "ddp", or { name = "ddp", OPTION = VALUE }')
    declaration: StrategyDeclaration = _declared("strategy", name, info)
    try:
        checked = _options_model(declaration).model_validate(options).model_dump(exclude_unset=True)
    except ValidationError as error:
        known = [option.name for option in declaration.options]
        listed = f"the options of {name} are: {', '.join(known)}" if known else f"{name} has no options"
        raise invalid_values(explain(error, lambda place: nearest(str(place[-1]), known) or listed)) from error
    given = {key: tuple(v) if isinstance(v, list) else v for key, v in checked.items()}
    defaults = declaration.options_with_defaults({})
    return name, tuple((key, given[key], defaults[key]) for key in sorted(given))


@cache
def _options_model(declaration: StrategyDeclaration) -> type[BaseModel]:
    fields: dict[str, Any] = {option.name: (_option_type(option), option.default) for option in declaration.options}
    return create_model(f"options of {declaration.name}", __base__=TomlTable, **fields)


def _option_type(option: Option) -> Any:
    if option.type is str and option.choices:
        return _choice(*option.choices)
    if option.type in {bool, str}:
        return option.type
    if option.type is float:
        return _real() if option.minimum is None else _real(ge=option.minimum)
    whole = _whole(ge=option.minimum)
    return whole if option.type is int else list.__class_getitem__(whole)


def _choice(*words: str) -> Any:
    def check(value: str) -> str:
        if value not in words:
            raise invalid(f"{show(value)} is not one of {', '.join(words)}", nearest(value, words))
        return value

    return Annotated[str, AfterValidator(check)]


def _whole(**bounds: float | None) -> Any:
    return Annotated[int, Interval(**{"le": LARGEST, **bounds})]


def _real(**bounds: float) -> Any:
    # Adding 0.0 turns -0.0 into 0.0 (IEEE 754): the two are equal and must have one identity.
    return Annotated[float, Interval(**bounds), AllowInfNan(False), AfterValidator(lambda value: value + 0.0)]


def _hardware(value: str) -> Hardware:
    try:
        hardware = Hardware.parse(value)
    except ValueError as error:
        raise invalid(
            f"{show(value)} is not hardware",
            'write KIND:DEVICES or KIND:DEVICESxNODES, such as "cpu:2", "gpu:1", "a100:2" or "a100:4x2"',
        ) from error
    if hardware.kind.lower() in {"cpu", "gpu"} and not hardware.kind.islower():
        right = dataclasses.replace(hardware, kind=hardware.kind.lower())
        raise invalid(f"{show(value)} is not hardware: {hardware.kind} must be in lower case", f'write "{right}"')
    return hardware


_PLUGIN_TYPES: dict[str, Any] = {
    "model": _plugin("model"),
    "dataset": _plugin("dataset"),
    "strategy": Annotated[StrategyChoice, PlainValidator(_strategy)],
    "hardware": Annotated[str, AfterValidator(_hardware)],
}
_UNITS: dict[str, Any] = {
    "time": Annotated[int, quantity(parse_time_limit)],
    "memory": Annotated[int, quantity(parse_memory)],
}


def _field_type(declared: dataclasses.Field[Any]) -> Any:
    """What the key of a field may hold, from its annotation and from what ``contract.train_config.key`` was given."""
    if declared.name in _PLUGIN_TYPES:
        return _PLUGIN_TYPES[declared.name]
    allowed = {name: value for name, value in declared.metadata.items() if name != "name"}
    if "unit" in allowed:
        return _UNITS[allowed["unit"]]
    if "choices" in allowed:
        return _choice(*allowed["choices"])
    kind = str(declared.type).removesuffix(" | None")
    return {"bool": bool, "int": _whole(**allowed), "float": _real(**allowed)}[kind]


_FIELDS: dict[str, dataclasses.Field[Any]] = {
    f.metadata.get("name", f.name): f
    for f in (*dataclasses.fields(TrainConfig), *dataclasses.fields(Execution))
    if f.name != "strategy_options"
}
_TYPES = {name: _field_type(f) for name, f in _FIELDS.items()}

KEYS: tuple[str, ...] = tuple(_FIELDS)
"""All keys of ``[defaults]`` and ``[matrix]``, in the order of the documentation."""

DEFAULTS: dict[str, Any] = {
    name: None if f.default is dataclasses.MISSING else f.default for name, f in _FIELDS.items()
}
"""What a key holds where the file says nothing; ``None`` for ``cpus``: hardware and strategy decide."""

REQUIRED: tuple[str, ...] = ("model", "dataset", "strategy", "hardware")
"""Keys without a default: every cell needs them."""


def as_list(value: Any) -> list[Any]:
    """A single value in place of a list is a list of one."""
    return value if isinstance(value, list) else [value]


def _one_or_more(kind: Any) -> Any:
    return Annotated[list[kind], BeforeValidator(as_list), Field(min_length=1)]


_MATCH_TYPES: dict[str, Any] = {**_TYPES, "strategy": Annotated[StrategyMatch, PlainValidator(_strategy_match)]}
"""A condition leaves the options open that it does not name."""

if TYPE_CHECKING:
    Values: TypeAlias = TomlTable
    Axes: TypeAlias = TomlTable
    Match: TypeAlias = TomlTable
else:
    Values = create_model("Values", __base__=TomlTable, **{key: (kind, None) for key, kind in _TYPES.items()})
    """One value for each key: ``[defaults]``, ``[[include]]``, ``set``."""
    Axes = create_model("Axes", __base__=TomlTable, **{key: (_one_or_more(kind), None) for key, kind in _TYPES.items()})
    """A list of values for each key: ``[matrix]``, ``[[zip]]``."""
    Match = create_model(
        "Match", __base__=TomlTable, **{key: (_one_or_more(kind), None) for key, kind in _MATCH_TYPES.items()}
    )
    """The values that a condition matches: ``if``, ``match``."""
