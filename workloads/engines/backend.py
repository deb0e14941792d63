"""What the training loop calls on a framework: the torch and the TensorFlow engine each implement it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from workloads.engines.evaluation import Evaluation
from workloads.measurement import timing

Value = TypeVar("Value")


class StepRecorder(Protocol):
    """Keeps times and losses of steps, as :class:`workloads.measurement.timing.Recorder` does."""

    def start_epoch(self, step: int) -> None: ...

    def record(self, loss: Any, samples: int) -> None: ...

    def finish_epoch(self) -> None: ...


class Backend(Protocol):
    """One rank's framework. Calls are collective: all ranks make them in the same order."""

    num_train: int
    num_test: int
    steps_per_epoch: int

    def batches(self, epoch: int, /) -> Iterable[Any]:
        """Yield the batches of an epoch (0-based); each has ``num_global``, its samples over all ranks."""

    def train_step(self, batch: Any, /) -> Any:
        """Start a step without waiting for it; returns this rank's share of the summed loss, for the recorder."""

    def seed(self, seed: int, /) -> object:
        """Seed the random numbers that steps draw from now on, such as dropout's."""

    def settle(self) -> float:
        """Wait for all devices to finish, then return the host's clock in seconds."""

    def maximum(self, values: Sequence[float], /) -> list[float]:
        """Return the maximum over ranks of each value."""

    def gather(self, value: Value, /) -> list[Value]:
        """Return every rank's value, in order of rank, on all ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Return the whole model and optimizer; rank 0's is kept."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Load what rank 0's :meth:`state_dict` returned."""

    def save(self, path: Path, run_id: str, state: dict[str, Any], progress: dict[str, Any], /) -> None:
        """See :func:`workloads.engines.checkpoint.save`."""

    def load(self, path: Path, run_id: str, /) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """See :func:`workloads.engines.checkpoint.load`."""

    def recorder(self, deliver: Callable[[timing.StepTimes], None]) -> StepRecorder:
        """Return a recorder for the steps of one epoch."""

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next step."""

    def rate(self) -> float:
        """Return the optimizer's learning rate."""

    def evaluate(self, between_batches: Callable[[], None]) -> Evaluation:
        """Evaluate the whole test set, each sample once."""

    def memory_bytes(self) -> tuple[int, int]:
        """Return (allocated now, peak) of this rank."""
