"""Published weights that ``pretrained = true`` starts from, below ``$ORCHESTRATE_DATA/weights/``. Not a model itself.

``orchestrate data prepare weights/MODEL`` is the only one that downloads. A job reads the file it finds there, whose
digest must be the published one, into the model as it was built from the seed: all but the classifier, which stays new
because the data set has other classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.datasets.shared.published import Published, fetch, writing
from workloads.errors import DatasetError
from workloads.registry import WEIGHTS, Problem

if TYPE_CHECKING:
    from torch import nn

FOLDER = "weights"
TORCHVISION = "https://download.pytorch.org/models/"
LIMIT_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Weights:
    """One model's. ``prepare`` and ``check`` are called as those of a data set."""

    file: Published
    classifier: str
    """The last layer, as the model names it."""
    rename: Callable[[str], str] = str
    """(name in the file) -> the model's own; empty for what the model works out itself."""
    smallest_px: int = 1
    """Below this image size the model has another shape."""
    packages: tuple[str, ...] = ()

    def path(self, root: Path) -> Path:
        return root / FOLDER / self.file.name

    def check(self, root: Path | None, name: str) -> list[Problem]:
        """Cheap look: presence, not content."""
        fix = f"orchestrate data prepare {WEIGHTS}{name.removeprefix(WEIGHTS)}"
        if root is None:
            return [Problem(where="ORCHESTRATE_DATA", what="no folder for data is set, which holds weights", fix=fix)]
        if not self.path(root).is_file():
            return [Problem(where=str(self.path(root)), what="pretrained weights are missing", fix=fix)]
        return []

    def prepare(self, root: Path | None, name: str, progress: Callable[[str], None]) -> None:
        """Fetch and verify. Raises DatasetError."""
        if root is None:
            raise _no_root(name)
        path = self.path(root)
        if self.file.fault(path):
            with writing(path.parent, name, "weights", progress):
                if self.file.fault(path):  # asked again: another process may have done it while this one waited
                    fetch(self.file, path, progress)
        progress(f"{name}: {path} is whole")

    def load(self, module: nn.Module, root: Path | None, name: str) -> None:
        """Put them into a model, as it was built.

        Raises:
            DatasetError: they are missing, damaged, or of another model; the file is named.
        """
        import torch

        if root is None:
            raise _no_root(name)
        path = self.path(root)
        fault = self.file.fault(path)
        if fault:
            raise DatasetError(
                "missing or damaged weights",
                where=str(path),
                why=fault,
                hint=f"orchestrate data prepare {WEIGHTS}{name}, where there is a network",
            )
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        for given in list(state):
            own, value = self.rename(given), state.pop(given)
            if own and not own.startswith(f"{self.classifier}."):
                state[own] = value  # in place: what torch notes about its format stays with it
        try:
            missing, unknown = module.load_state_dict(state, strict=False)
        except RuntimeError as error:
            raise _other_model(path, name, str(error)) from error
        # Files from before batch norm counted its batches lack the counts.
        left_out = [key for key in missing if not key.startswith(f"{self.classifier}.")]
        left_out = [key for key in left_out if not key.endswith("num_batches_tracked")]
        if left_out or unknown:
            raise _other_model(path, name, f"left out: {left_out[:3]}, unknown: {list(unknown)[:3]}")


def torchvision(file_name: str, classifier: str, **more: Any) -> Weights:
    """Of a file whose name ends in the first digits of its SHA-256, as torchvision's do."""
    digest = file_name.rpartition("-")[2].partition(".")[0]
    return Weights(Published(file_name, (TORCHVISION + file_name,), "sha256", digest, LIMIT_BYTES), classifier, **more)


def _no_root(name: str) -> DatasetError:
    return DatasetError(
        f"{name} needs a folder for data, and none is set",
        where="ORCHESTRATE_DATA",
        hint="export ORCHESTRATE_DATA=/path/to/data, give --data, or set data in cluster.toml",
    )


def _other_model(path: Path, name: str, why: str) -> DatasetError:
    return DatasetError(f"not the weights of {name}", where=str(path), why=why)
