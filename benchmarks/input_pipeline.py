"""Images per second of our input pipelines and of a Pillow DataLoader, with crop, flip and normalisation at 32 pixels.

    python -m benchmarks.input_pipeline [--rounds 10] [--seconds 1] [--cores 1] [--device cpu] [--json]

The peer is what most published code uses: PyTorch's DataLoader over Pillow images made from arrays (as in torchvision's
CIFAR10) with torchvision's RandomCrop, RandomHorizontalFlip, ToTensor and Normalize, in the training process and with
one worker. All pipelines alternate in one process on the same cores. Ratios are computed within a round; the median
over rounds has a bootstrap 95 % interval. Nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from benchmarks.bootstrap import interval
from workloads import loaders
from workloads.contract import Hardware, TrainConfig
from workloads.datasets.shared.image_data import ImageData, Split
from workloads.loaders.protocol import Shard

IMAGES, SIZE, BATCH = 50_000, 32, 128
TARGET, STRETCH = 4.0, 30.0
PEER = "torchvision, Pillow, no worker"
MINE = "resident"


class PillowImages(Dataset[Any]):
    """Images like torchvision's CIFAR10: arrays in memory, one Pillow image per sample, then the transforms."""

    def __init__(self, data: ImageData) -> None:
        self._images = np.ascontiguousarray(data.train.images.transpose(0, 2, 3, 1))
        self._labels = data.train.labels.tolist()
        self._transform = transforms.Compose(
            [
                transforms.RandomCrop(SIZE, padding=SIZE // 8),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(data.mean, data.std),
            ]
        )

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        return self._transform(Image.fromarray(self._images[index])), self._labels[index]


def random_images() -> ImageData:
    pixels = np.random.default_rng(0).integers(0, 256, (IMAGES, 3, SIZE, SIZE), np.uint8)
    split = Split(np.arange(IMAGES) % 10, pixels)
    test = Split(split.labels[:BATCH], pixels[:BATCH])
    return ImageData.of(split, test, class_names=tuple("0123456789"), digest="random")


def ours(data: ImageData, device: torch.device, kind: str, workers: int) -> Callable[[], Iterator[Any]]:
    config = TrainConfig(
        model="cnn", dataset="random", strategy="eager", hardware=Hardware("cpu", 1), cpus=1,
        loader=kind, workers=workers, augment="crop_flip", batch_size=BATCH,
    )  # fmt: skip
    loader = loaders.make(data, config, image_size=SIZE, device=device, dtype=torch.float32, shard=Shard(0, 1))

    def endless() -> Iterator[Any]:
        for epoch in range(sys.maxsize):
            for batch in loader.train(epoch):
                yield batch.x, batch.y

    return endless


def peer(data: ImageData, device: torch.device, workers: int) -> Callable[[], Iterator[Any]]:
    loader = DataLoader(
        PillowImages(data),
        BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=device.type == "cuda",
        multiprocessing_context="fork" if workers else None,
    )

    def endless() -> Iterator[Any]:
        while True:
            for x, y in loader:
                yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    return endless


def rate(batches: Iterator[Any], device: torch.device, seconds: float) -> float:
    """Return images per second over about ``seconds``."""
    for _ in range(8):  # drop batches that workers prefetched while another pipeline ran
        next(batches)
    images, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        images += len(next(batches)[0])
    if device.type == "cuda":
        torch.cuda.synchronize()
    return images / (time.perf_counter() - start)


@dataclass
class Row:
    """Figures of one pipeline over all rounds."""

    path: str
    images_per_s: float
    """Median over rounds."""
    ratio: float
    """Relative to the peer without a worker in the same round; median."""
    ratio_low: float
    ratio_high: float
    images_per_s_of_rounds: list[float]


def row(name: str, rounds: list[dict[str, float]]) -> Row:
    ratios = [one[name] / one[PEER] for one in rounds]
    rates = [one[name] for one in rounds]
    return Row(name, statistics.median(rates), statistics.median(ratios), *interval(ratios, statistics.median), rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.0, help="per pipeline and round")
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-options.cores :])
    torch.set_num_threads(options.cores)
    device = torch.device(options.device)
    data = random_images()
    paths = {
        PEER: peer(data, device, 0)(),
        "torchvision, Pillow, 1 worker": peer(data, device, 1)(),
        "dataloader, no worker": ours(data, device, "dataloader", 0)(),
        MINE: ours(data, device, "resident", 0)(),
    }
    rounds = [
        {name: rate(path, device, options.seconds) for name, path in paths.items()} for _ in range(options.rounds)
    ]
    rows = [row(name, rounds) for name in paths]
    if options.json:
        facts = {"device": options.device, "cores": options.cores, "torch": torch.__version__}
        print(json.dumps({**facts, "rows": [vars(one) for one in rows]}, indent=2))
        return
    print(f"{'path':32}{'images/s':>12}{'ratio':>8}   95 %        ({options.cores} core, {options.device})")
    for one in rows:
        within = f"{one.ratio_low:.1f} to {one.ratio_high:.1f}"
        print(f"{one.path:32}{one.images_per_s:12,.0f}{one.ratio:8.1f}   {within}")
    for word, bound in (("target", TARGET), ("stretch", STRETCH)):
        print(f"{word} {bound:.0f}x: {'met' if rows[-1].ratio >= bound else 'missed'}")


if __name__ == "__main__":
    main()
