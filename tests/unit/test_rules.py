"""Rules name the keys that they read; cells that agree in what was read share one answer, plug-ins' reads included."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from orchestrator.config import experiment
from orchestrator.config.keys import DEFAULTS, KEYS, StrategyChoice
from orchestrator.planning import matrix
from orchestrator.plugins import Plugins
from orchestrator.rules.rule import Candidate, Memo, RecordedValues
from orchestrator.rules.training_rules import IGNORED_KEYS, TRAINING_RULES
from workloads.contract import Hardware

PLUGINS = Plugins.installed()
CELL = {
    "model": "cnn",
    "dataset": "digits",
    "hardware": Hardware("cpu", 1),
    "strategy": StrategyChoice("eager"),
    "cpus": 1,
}


@pytest.mark.parametrize("decays", [[0.0, 0.1], [0.1, 0.0]])
def test_a_plugin_may_read_any_key(decays: list[float]) -> None:
    """Whichever value comes first: the answer for one cell is not that for another with a different value."""

    def no_decay(train: Mapping[str, Any], _options: object) -> str:
        return "it cannot decay weights" if train["weight_decay"] else ""

    eager = dataclasses.replace(PLUGINS.strategies["eager"], name="fake", unsupported_training=no_decay)
    plugins = dataclasses.replace(PLUGINS, strategies={"fake": eager})
    text = f"""
    [defaults]
    model = "cnn"
    dataset = "digits"
    strategy = "fake"
    hardware = "cpu:1"
    [matrix]
    seed = [0, 1]
    weight_decay = {decays}
    """
    spec = experiment.parse(text, "experiment.toml", plugins=plugins)
    found = matrix.expand(spec, default_cpus=lambda *_: 1, plugins=plugins)
    assert [(cell.train.seed, cell.train.weight_decay) for cell in found.cells] == [(0, 0.0), (1, 0.0)]
    assert [(cell.fields["seed"], cell.fields["weight_decay"]) for cell in found.excluded] == [(0, 0.1), (1, 0.1)]
    assert {(cell.rule, cell.why) for cell in found.excluded} == {("strategy fake", "it cannot decay weights")}


def test_a_memo_evaluates_once_for_each_combination_of_what_was_read() -> None:
    calls: list[tuple[int, int]] = []

    def function(values: Mapping[str, Any]) -> int:
        answer: int = values["a"] if values["a"] else values["b"]
        calls.append((values["a"], answer))
        return answer

    memo = Memo(function, ["a"])
    cells = [{"a": a, "b": b, "c": c} for c in (7, 8) for a in (1, 0) for b in (2, 3)]
    assert [memo(cell) for cell in cells] == [1, 1, 2, 3] * 2
    # Reading b drops the answer for a = 1, which is then worked out for each b.
    assert sorted(calls) == [(0, 2), (0, 3), (1, 1), (1, 1), (1, 1)]


def test_rules_declare_what_they_read() -> None:
    """On the values of every kind of cell, none of our rules reads a key that it does not name."""
    others: dict[str, list[Any]] = {
        "model": sorted(name for name in PLUGINS.models if "*" not in name),
        "dataset": sorted(name for name in PLUGINS.datasets if "*" not in name),
        "strategy": [StrategyChoice(name) for name in PLUGINS.strategies],
        "hardware": [Hardware("gpu", 4)],
        "compile": ["default", "graphs"],
        "optimizer": ["adam"],
    }
    for key, default in DEFAULTS.items():
        others.setdefault(key, [not default if isinstance(default, bool) else default])
    assert set(others) == set(KEYS)
    for values in [
        {
            **DEFAULTS,
            **CELL,
            "pretrained": True,
            "cudnn_benchmark": True,
            "nesterov": True,
            "drop_last": True,
            key: value,
        }
        for key, found in others.items()
        for value in found
    ]:
        for rule in TRAINING_RULES:
            recorded = RecordedValues(values)
            rule.reason(dataclasses.replace(Candidate.of(values, PLUGINS, None), values=recorded))
            declared = set(KEYS) if rule.reads == ("strategy",) else set(rule.reads)  # declarations may read any key
            assert recorded.read <= declared, rule


def test_ignored_keys_are_keys_with_a_default() -> None:
    assert {key for ignored in IGNORED_KEYS for key in ignored.keys} <= set(DEFAULTS)
