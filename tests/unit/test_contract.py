"""Run ids, and the JSON forms of all that crosses between login node and job."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from workloads.contract import (
    Execution,
    Expectation,
    Hardware,
    RecoveryRecord,
    ResourceShape,
    RunResult,
    RunSpec,
    State,
    Submission,
    TrainConfig,
)
from workloads.contract.flat import from_flat

BASE = {"model": "cnn", "dataset": "digits", "strategy": "ddp", "hardware": Hardware("cpu", 2), "cpus": 2}


def test_identity_of_a_known_run_is_pinned() -> None:
    """A changed hash would orphan all earlier results."""
    assert TrainConfig(**BASE).run_id() == "a9ff36a397d39cd3"


def test_identity_has_required_fields_seed_repeat_and_non_defaults() -> None:
    identity = TrainConfig(**BASE, lr=0.1).identity()
    assert identity == {"v": 1, **BASE, "hardware": "cpu:2", "seed": 0, "repeat": 0, "lr": 0.1}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(TrainConfig)])
def test_every_field_is_identity(field: str) -> None:
    """Changing any one field gives another run."""
    config = TrainConfig(**BASE)
    value = getattr(config, field)
    other = {
        "strategy_options": {"x": 1},
        "steps": 5,
        "dropout": 0.1,
        "image_size": 64,
        "hardware": Hardware("cpu", 3),
    }.get(field)
    if other is None:
        other = (not value) if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else value + "x"
    assert dataclasses.replace(config, **{field: other}).run_id() != config.run_id()


def test_a_value_equal_to_the_default_is_the_same_run() -> None:
    """A field added later with a default orphans no earlier result."""
    assert TrainConfig(**BASE, epochs=10).run_id() == TrainConfig(**BASE).run_id()


@pytest.mark.parametrize(
    ("text", "kind", "per_node", "nodes", "devices", "gpus"),
    [
        ("a100:2", "a100", 2, 1, 2, 2),
        ("a100:4x2", "a100", 4, 2, 8, 8),
        ("cpu:3", "cpu", 3, 1, 3, 0),
        ("a100.20gb:1", "a100.20gb", 1, 1, 1, 1),
    ],
)
def test_hardware_text_round_trip(text: str, kind: str, per_node: int, nodes: int, devices: int, gpus: int) -> None:
    hardware = Hardware.parse(text)
    assert (hardware.kind, hardware.devices_per_node, hardware.nodes) == (kind, per_node, nodes)
    assert (hardware.devices, hardware.gpus, str(hardware)) == (devices, gpus, text)


def test_x1_is_the_same_hardware() -> None:
    assert str(Hardware.parse("a100:2x1")) == "a100:2"


@pytest.mark.parametrize(
    "text", ["", "a100", "a100:0", "a100:02", ":2", "a100:2x0", "a100:2 ", "a 100:1", "a100:-1", "a100:2x2x2"]
)
def test_hardware_rejects_other_forms_and_shows_the_right_one(text: str) -> None:
    with pytest.raises(ValueError, match='"a100:4x2"'):
        Hardware.parse(text)


def _spec() -> RunSpec:
    train = TrainConfig(**BASE, strategy_options={"balance": (1, 1)})
    return RunSpec(
        run_id=train.run_id(),
        label="résumé-实验 $HOME; 'x'",
        experiment="e",
        train=train,
        execution=Execution(time_limit_s=60),
        expect=Expectation(ranks=2, nodes=1, gpus_per_node=0, cpus_per_rank=1),
        target="local",
        data_root="",
    )


def test_spec_survives_json_byte_for_byte() -> None:
    spec = _spec()
    assert RunSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


SHAPE = ResourceShape(target="sol", gpu="a100", ranks_per_node=2, gpus_per_node=2, ask_gpus_per_node=2, time_limit_s=60)


def test_a_shape_keeps_its_key_and_json() -> None:
    """Scripts on disk are named by the key; fields of recovery are in the JSON only where it set them."""
    assert SHAPE.key() == SHAPE.script_key == "c86931f214cad970"
    assert not {"arguments", "script"} & SHAPE.to_json().keys()
    longer = dataclasses.replace(SHAPE, arguments={"time": "1:00"}, script=SHAPE.key())
    assert longer.script_key == SHAPE.key() != longer.key()
    for shape in (SHAPE, longer):
        assert from_flat(ResourceShape, json.loads(json.dumps(shape.to_json()))) == shape
    assert from_flat(ResourceShape, {**SHAPE.to_json(), "unheard_of": 1}) == SHAPE


@pytest.mark.parametrize(
    "recovery", [None, RecoveryRecord(failure="timeout", action="raise_time", attempt=1, number=1)]
)
def test_submission_round_trip(recovery: RecoveryRecord | None) -> None:
    submission = Submission(token="t", target="sol", attempt=2, snapshot="s", shape=SHAPE, recovery=recovery)
    assert Submission.from_json({**json.loads(json.dumps(submission.to_json())), "job_id": "7"}) == submission
    with pytest.raises(ValueError, match="not a submission: "):
        Submission.from_json({"token": "t"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spec_version": 99}, "spec_version 99"),
        ({"train": {"model": "cnn", "speed": 1}}, "speed"),
        ({"expect": {}}, "not a run spec"),
    ],
)
def test_a_foreign_spec_is_rejected_with_the_reason(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunSpec.from_json({**_spec().to_json(), **change})


@pytest.mark.parametrize(("value", "word"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_a_non_finite_loss_becomes_null_and_marks_the_run_as_diverged(value: float, word: str) -> None:
    data = RunResult(
        run_id="a9ff36a397d39cd3", attempt=1, state=State.SUCCEEDED, train_loss=value, test_accuracy=0.1
    ).to_json()
    text = json.dumps(data, allow_nan=False)
    assert data["train_loss"] is None
    assert data["nonfinite"] == {"train_loss": word}
    assert data["diverged"] is True
    back = RunResult.from_json(json.loads(text))
    assert back.diverged and back.test_accuracy == 0.1


def test_a_result_of_an_unknown_state_is_rejected() -> None:
    with pytest.raises(ValueError, match="not a run result"):
        RunResult.from_json({"spec_version": 1, "run_id": "x", "attempt": 1, "state": "wonderful"})


def test_live_and_ended_states_do_not_overlap() -> None:
    for state in State:
        assert not (state.live and state.ended_badly)
    assert {s for s in State if not s.live and not s.ended_badly} == {State.PLANNED, State.SUCCEEDED}
