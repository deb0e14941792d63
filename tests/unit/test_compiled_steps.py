"""Compiled and captured steps: what compiled code computes, and what preparing must leave unchanged."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from workloads.loaders.protocol import Batch  # noqa: E402 (needs torch)
from workloads.strategies.shared import compiled_steps  # noqa: E402


def _batch(samples: int = 6) -> Batch:
    values = torch.randn(samples, 4, dtype=torch.float64)
    return Batch(values, torch.zeros(samples, dtype=torch.int64), samples, samples)


class _Training:
    """A small model with batch norm and momenta, trained by :class:`compiled_steps.StepRunner`."""

    def __init__(self, how: str, optimizer: str = "adam") -> None:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Tanh())
        self.module: Any = module.double()
        make = torch.optim.Adam if optimizer == "adam" else torch.optim.SGD
        more = {} if optimizer == "adam" else {"momentum": 0.9}
        self.optimizer: Any = make(self.module.parameters(), lr=0.1, fused=True, **more)
        self.models: list[Any] = []
        task: Any = SimpleNamespace(config=SimpleNamespace(compile=how), device=torch.device("cpu"))
        self.tensors = [*self.module.parameters(), *self.module.buffers()]
        self.runner = compiled_steps.StepRunner(task, self._step, self.module, self.optimizer, self.tensors)

    def _step(self, model: Any, batch: Batch) -> Any:
        self.models.append(model)
        self.optimizer.zero_grad()
        loss = model(batch.x).square().sum()
        (loss / batch.num_global).backward()
        self.optimizer.step()
        return loss.detach()

    def whole_state(self) -> list[Any]:
        states = [v for state in self.optimizer.state.values() for v in state.values()]
        return [*self.module.state_dict().values(), *states]


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        yield


@pytest.mark.filterwarnings("default")
def test_compiled_code_equals_the_model_as_written() -> None:
    """With a real compiler, in float64; whole batches run compiled code, an odd one between them does not."""
    plain, fast = _Training("off", "sgd"), _Training("default", "sgd")
    torch.manual_seed(1)
    batches = [_batch(), _batch(), _batch(5), _batch()]
    fast.runner.prepare(batches[0])
    assert len(fast.models) == 1
    losses = [[float(training.runner(batch)) for batch in batches] for training in (plain, fast)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)
    assert losses[0][-1] < losses[0][0]
    ran_compiled = [model is not fast.module for model in fast.models[1:]]
    assert ran_compiled == [True, True, False, True]
    for one, other in zip(plain.whole_state(), fast.whole_state(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_preparing_restores_parameters_and_state(optimizer: str, steps_before: int) -> None:
    """In place, because a captured step addresses the memory; also momenta, loaded ones and those created meanwhile."""
    training, twin = _Training("off", optimizer), _Training("off", optimizer)
    torch.manual_seed(1)
    batches = [_batch() for _ in range(6)]
    for batch in batches[:steps_before]:
        training.runner(batch)
        twin.runner(batch)
    tensors = training.tensors
    before = [tensor.detach().clone() for tensor in tensors]
    addresses = [tensor.data_ptr() for tensor in tensors]
    with compiled_steps.preserved(tensors, training.optimizer):
        for batch in batches[2:4]:
            training.runner(batch)
        assert not torch.equal(before[0], tensors[0])
    assert all(map(torch.equal, before, tensors))
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    for batch in batches[4:]:
        assert torch.equal(training.runner(batch), twin.runner(batch))
    assert all(map(torch.equal, training.whole_state(), twin.whole_state()))


def test_a_captured_update_reads_its_learning_rate_from_a_tensor() -> None:
    training = _Training("off")
    rate = torch.zeros(())
    (group,) = training.optimizer.param_groups
    with compiled_steps._learning_rate_on_device(training.optimizer, rate, capturing=True):
        assert group["lr"] is rate and rate.item() == pytest.approx(0.1) and group["capturable"]
    assert (group["lr"], group["capturable"]) == (0.1, False)


def test_without_a_compiler_the_error_names_what_is_needed() -> None:
    """In a process of its own: torch remembers which compiler it found."""
    code = (
        "import torch\nfrom workloads.strategies.shared import compiled_steps\n"
        "from workloads.errors import InputError\n"
        "try:\n    with compiled_steps.compiler_errors_explained():\n"
        "        compiled_steps.compile_for_one_shape(torch.nn.Tanh())(torch.ones(3, 2)).sum()\n"
        "except InputError as error:\n    print(error)"
    )
    env = {"CXX": "/nowhere/c++", "PATH": "/nowhere", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert "torch.compile cannot compile the model here" in done.stdout, done.stderr
    assert "fix: it needs a C++ compiler in the job's PATH" in done.stdout
    assert 'or set compile = "off"' in done.stdout
