"""The resident loader on a GPU: same batches as on CPU, few kernels per step, and no synchronisation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

from workloads import loaders  # noqa: E402 (needs torch)
from workloads.contract import Hardware, TrainConfig  # noqa: E402
from workloads.datasets import synthetic  # noqa: E402
from workloads.loaders.protocol import Loader, Shard  # noqa: E402

CONFIG = TrainConfig(
    model="cnn", dataset="synthetic", strategy="eager", hardware=Hardware("gpu", 1), cpus=1, augment="crop_flip"
)
KERNELS_PER_STEP = {"none": 2, "flip": 4, "crop_flip": 4}
"""Augmentation -> kernels: gather and normalise; with augmentation also column offsets and pixel indices."""


def make(device: str, *, to: int = 32, dtype: Any = torch.float32, **fields: object) -> Loader:
    config = dataclasses.replace(CONFIG, **fields)  # type: ignore[arg-type]
    data = synthetic.DECLARATION.load(None, "synthetic", config)
    return loaders.make(data, config, image_size=to, device=torch.device(device), dtype=dtype, shard=Shard(0, 1))


@pytest.mark.parametrize("augment", ["none", "flip", "crop_flip"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("size", [32, 48])
def test_batches_equal_those_on_cpu(augment: str, channels_last: bool, size: int) -> None:
    """Same samples, augmentation and layout up to rounding, for training and test."""
    on_cpu, on_gpu = (
        make(device, augment=augment, channels_last=channels_last, to=size, dtype=torch.float64)
        for device in ("cpu", "cuda")
    )
    for expected, found in zip([*on_cpu.train(3), *on_cpu.test()], [*on_gpu.train(3), *on_gpu.test()], strict=True):
        assert found.x.is_cuda
        assert torch.allclose(expected.x, found.x.cpu(), rtol=0, atol=1e-12)
        assert torch.equal(expected.y, found.y.cpu())
        assert found.x.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events at the end of each cycle:UserWarning")
@pytest.mark.parametrize("augment", sorted(KERNELS_PER_STEP))
def test_a_step_launches_few_kernels_and_never_synchronises(augment: str) -> None:
    """Run an epoch in the mode that makes every synchronisation an error, then count kernels with the profiler."""
    loader = make("cuda", augment=augment)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in loader.train(0):
            pass
    finally:
        torch.cuda.set_sync_debug_mode("default")
    batches = loader.train(1)
    next(batches)  # the kernels that an epoch needs once run with its first batch
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        steps = sum(1 for _ in batches)
        torch.cuda.synchronize()
    kernels = sum(event.count for event in profile.key_averages() if event.self_device_time_total > 0)
    assert steps == loader.steps_per_epoch - 1
    assert 0 < kernels <= KERNELS_PER_STEP[augment] * steps
