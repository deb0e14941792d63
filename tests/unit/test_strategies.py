"""What strategies refuse, as the plan tells it: through ``matrix.expand`` with the strategies that are installed."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator import experiment, matrix
from workloads import registry
from workloads.contract import Hardware

CAST = '{ name = "fsdp", mixed_precision = "cast" }'


def _why(strategy: str, hardware: str = "cpu:2", **keys: Any) -> str:
    """Why a cell is excluded; empty when it is planned."""
    written = {key: f'"{v}"' if isinstance(v, str) else str(v).lower() for key, v in keys.items()}
    model = written.pop("model", '"cnn"')
    defaults = "".join(f"{key} = {value}\n" for key, value in written.items())
    text = f'name = "n"\n[defaults]\n{defaults}[matrix]\nmodel = [{model}]\ndataset = ["digits"]\n'
    text += f'strategy = [{strategy}]\nhardware = ["{hardware}"]\n'
    expanded = matrix.expand(experiment.parse(text, "experiment.toml"), default_cpus=lambda _hardware, ranks: ranks)
    return "".join(excluded.why for excluded in expanded.excluded)


@pytest.mark.parametrize(
    ("strategy", "keys", "why"),
    [
        ('"fsdp"', {}, ""),
        ('"fsdp"', {"channels_last": True}, "FSDP2 does not shard channels_last parameters"),
        (CAST, {"precision": "bf16", "model": "vit_tiny"}, ""),
        (CAST, {}, 'mixed_precision = "cast" is for precision = "bf16", not fp32'),
        ('"local_sgd"', {"optimizer": "adam"}, ""),
    ],
)
def test_what_cannot_be_is_excluded_with_its_reason(strategy: str, keys: dict[str, Any], why: str) -> None:
    assert _why(strategy, batch_size=120, drop_last=True, **keys) == why


@pytest.mark.parametrize("name", registry.strategies())
def test_declarations_are_sound(name: str) -> None:
    """Option names are unique, defaults of their own type and among the choices; what contract tests use is
    declared."""
    declaration = registry.strategies()[name]
    assert declaration.name == name
    options = {option.name: option for option in declaration.options}
    assert len(options) == len(declaration.options)
    for option in options.values():
        assert isinstance(option.default, option.type if option.type in (bool, int, float, str) else tuple)
        assert not option.choices or option.default in option.choices
    assert all(options.keys() >= wanted.keys() for wanted in declaration.contract_options)
    assert isinstance(declaration.refuses(Hardware("cpu", 2), {o.name: o.default for o in declaration.options}), str)
