"""Published weights that ``pretrained = true`` starts from, in ``$ORCHESTRATE_DATA/weights/``.

Only ``orchestrate data prepare weights/MODEL`` downloads. A job checks the file's digest and loads it into the
model that it built from the seed: all parameters but those of the classifier, since the data set has other classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads.datasets.shared.file_tasks import Progress, require_root
from workloads.datasets.shared.published import PublishedFile, fetch, prepare_lock
from workloads.errors import DatasetError
from workloads.lazy import lazy_imports
from workloads.registry import WEIGHTS, Problem

with lazy_imports(__name__):
    import torch
    from torch import nn

FOLDER = "weights"
TORCHVISION = "https://download.pytorch.org/models/"


@dataclass(frozen=True, slots=True)
class Weights:
    """Pretrained weights of one model; ``prepare`` and ``check`` are called like those of a data set."""

    file: PublishedFile
    classifier: str
    """The last layer, as the model names it."""
    rename: Callable[[str], str] = str
    """(name in the file) -> name in the model; empty for buffers that the model computes itself."""
    smallest_px: int = 1
    """Below this image size the parameters have other shapes."""
    packages: tuple[str, ...] = ()

    def path(self, root: Path) -> Path:
        return root / FOLDER / self.file.name

    def check(self, root: Path | None, name: str) -> list[Problem]:
        """Report missing files; contents are not read."""
        fix = f"orchestrate data prepare {WEIGHTS}{name.removeprefix(WEIGHTS)}"
        if root is None:
            return [Problem(where="ORCHESTRATE_DATA", what="no data folder is set, which holds weights", fix=fix)]
        if not self.path(root).is_file():
            return [Problem(where=str(self.path(root)), what="pretrained weights are missing", fix=fix)]
        return []

    def prepare(self, root: Path | None, name: str, progress: Progress) -> None:
        """Fetch and verify. Raises DatasetError."""
        path = self.path(require_root(root, name))
        if self.file.fault(path):
            with prepare_lock(path.parent, name, "weights", progress):
                fetch(self.file, path, progress)
        progress(f"{name}: {path} is whole")

    def load(self, module: nn.Module, root: Path | None, name: str) -> None:
        """Load them into a new model. Raises DatasetError: the file is missing, damaged, or of another model."""
        path = self.path(require_root(root, name))
        if fault := self.file.fault(path):
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
                state[own] = value  # in place, to keep the state dict's _metadata, by which modules convert old formats
        try:
            missing, unknown = module.load_state_dict(state, strict=False)
        except RuntimeError as error:
            why = str(error)  # of shapes that differ
        else:
            # torch counts batches in batch norm since 0.4.1; older files lack num_batches_tracked.
            counted = [key for key in missing if not key.endswith("num_batches_tracked")]
            left_out = [key for key in counted if not key.startswith(f"{self.classifier}.")]
            why = f"left out: {left_out[:3]}, unknown: {list(unknown)[:3]}" if left_out or unknown else ""
        if why:
            raise DatasetError(f"not the weights of {name}", where=str(path), why=why)


def torchvision(file_name: str, classifier: str, **more: Any) -> Weights:
    """Return the weights in a file of torchvision, whose name ends in the first digits of its SHA-256."""
    digest = file_name.rpartition("-")[2].partition(".")[0]
    return Weights(PublishedFile(file_name, digest, urls=(TORCHVISION + file_name,)), classifier, **more)
