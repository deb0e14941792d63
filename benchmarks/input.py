"""The input path beside a Pillow DataLoader: images a second with crop, flip and normalisation at 32 pixels.

    python -m benchmarks.input [--rounds 10] [--seconds 1] [--cores 1] [--device cpu] [--json]

The peer is what most published code has: torch's DataLoader over Pillow pictures made from arrays (as torchvision's
CIFAR10 does) with torchvision's RandomCrop, RandomHorizontalFlip, ToTensor and Normalize, in the training process and
with one worker. All paths take turns in one process on the same cores; a ratio is that of one round, and its median
over rounds comes with a bootstrap 95 % interval. Nothing is trained.
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
from workloads.datasets.shared.image_data import statistics as image_statistics
from workloads.loaders.protocol import Shard

IMAGES, SIZE, BATCH = 50_000, 32, 128
TARGET, STRETCH = 4.0, 30.0
PEER = "torchvision, Pillow, no worker"
MINE = "resident"


class Pictures(Dataset[Any]):
    """As torchvision's CIFAR10: arrays in memory, a Pillow picture a sample, then the transforms."""

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
    mean, std = image_statistics(pixels)
    test = Split(split.labels[:BATCH], pixels[:BATCH])
    return ImageData(split, test, tuple("0123456789"), 3, SIZE, mean, std, digest="random")


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


def theirs(data: ImageData, device: torch.device, workers: int) -> Callable[[], Iterator[Any]]:
    loader = DataLoader(
        Pictures(data),
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
    """Images a second over about ``seconds``; batches that were made while another path ran are taken out first."""
    for _ in range(8):
        next(batches)
    images, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        images += len(next(batches)[0])
    if device.type == "cuda":
        torch.cuda.synchronize()
    return images / (time.perf_counter() - start)


@dataclass
class Row:
    """One path over all rounds."""

    path: str
    images_per_s: float
    """Median of the rounds."""
    ratio: float
    """To the peer without a worker, in the same round; median."""
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
    parser.add_argument("--seconds", type=float, default=1.0, help="for each path and round")
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-options.cores :])
    torch.set_num_threads(options.cores)
    device = torch.device(options.device)
    data = random_images()
    paths = {
        PEER: theirs(data, device, 0)(),
        "torchvision, Pillow, 1 worker": theirs(data, device, 1)(),
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
