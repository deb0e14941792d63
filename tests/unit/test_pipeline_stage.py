"""A captured stage computes what the stage as written computes; a stand-in for CUDA graphs repeats the work."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from workloads.strategies.shared.pipeline_stage import Stage  # noqa: E402 (needs torch)

CHUNKS, SAMPLES = 3, 4


def _repeat(work: Callable[[], Any], _pool: list[Any]) -> tuple[Any, Callable[[], None]]:
    """Capture as a graph does: each replay reads static tensors only, and overwrites the tensors of the first run."""
    output = work()
    static = None if output is None else output.detach()

    def replay() -> None:
        new = work()
        if static is not None:
            static.copy_(new.detach())

    return static, replay


def _task() -> Any:
    return SimpleNamespace(forward=lambda model, x: model(x), device=torch.device("cpu"))


def _parts() -> list[Any]:
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh())
    return [first.double(), torch.nn.Sequential(torch.nn.Linear(5, 2)).double()]


def _run(stages: list[Any], chunks: list[Any], order: str) -> list[Any]:
    """Run two stages in one process: all forward passes first, or a backward pass as soon as two micro-batches wait."""
    losses, waiting = [], []
    for x in chunks:
        wire = stages[0](x)
        held = wire.detach().requires_grad_()
        loss = stages[1](held).square().sum()
        losses.append(loss.detach())
        waiting.append((loss, held, wire))
        if order == "1f1b" and len(waiting) == 2:
            _back(*waiting.pop(0))
    for entry in waiting:
        _back(*entry)
    return losses


def _back(loss: Any, held: Any, wire: Any) -> None:
    loss.backward()
    wire.backward(held.grad)


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_captured_stages_equal_stages_as_written(order: str) -> None:
    """Losses and gradients of three steps, with another input and other parameters in each; evaluation in between."""
    plain = [Stage(_task(), part) for part in _parts()]
    captured = copy.deepcopy(plain)
    wires = [torch.zeros(SAMPLES, 3, dtype=torch.float64), torch.zeros(SAMPLES, 5, dtype=torch.float64)]
    wires[1].requires_grad_()
    for stage, wire in zip(captured, wires, strict=True):
        stage.train()
        stage.capture(wire, CHUNKS, _repeat)
    addresses = [p.grad.data_ptr() for stage in captured for p in stage.parameters()]
    for stage in plain:
        stage.train()
    for step in range(3):
        torch.manual_seed(10 + step)
        chunks = list(torch.randn(CHUNKS, SAMPLES, 3, dtype=torch.float64))
        for stages in (plain, captured):
            for stage in stages:
                stage.zero_grad(set_to_none=stages is plain)
        assert _run(plain, chunks, order) == _run(captured, chunks, order)
        pairs = [
            (one, other)
            for stages in zip(plain, captured, strict=True)
            for one, other in zip(*(stage.parameters() for stage in stages), strict=True)
        ]
        with torch.no_grad():
            for one, other in pairs:
                assert torch.equal(one.grad, other.grad) and one.grad.abs().max() > 0
                one -= 0.1 * one.grad
                other -= 0.1 * other.grad
        for stage in captured:
            stage.eval()
        assert torch.equal(captured[0](chunks[0]), plain[0](chunks[0]))
        for stage in captured:
            stage.train()
    assert [p.grad.data_ptr() for stage in captured for p in stage.parameters()] == addresses
