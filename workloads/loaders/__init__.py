"""From a data set to the batches of a rank. Only the loaders' own modules import torch.

``resident`` keeps uint8 images on the device and augments there, so that runs compare strategies and not JPEG decoders;
``dataloader`` is torch's DataLoader with Pillow, as in most published code. Both give the same samples in the same
order with the same augmentation, which depend on seed, epoch and sample only, never on rank, world size or worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workloads.datasets.shared.sequence_data import SequenceData
from workloads.errors import InputError
from workloads.lazy import lazy_imports

if TYPE_CHECKING:
    import torch

    from workloads.contract import TrainConfig
    from workloads.datasets.shared.image_data import ImageData
    from workloads.loaders.protocol import Loader, Shard

with lazy_imports(__name__):
    from workloads.loaders import dataloader, resident, sequences


def make(
    data: ImageData | SequenceData,
    config: TrainConfig,
    *,
    image_size: int,
    device: torch.device,
    dtype: torch.dtype,
    shard: Shard,
) -> Loader:
    """Create the loader that ``config.loader`` names, for one rank.

    Args:
        data: from the data set's ``load``.
        config: reads ``batch_size``, ``seed``, ``train_fraction``, ``drop_last``, ``augment``, ``channels_last`` and
            ``workers``.
        image_size: pixels per side of ``Batch.x``; ignored for sequences.
        device: of the batches.
        dtype: of the images in ``Batch.x``.
        shard: the rank's part of each batch.

    Raises:
        DatasetError: no step is left to train, or the data does not fit on the device.
        InputError: no such loader for such data.
    """
    if isinstance(data, SequenceData):
        if config.loader != "resident":
            raise InputError(f"the loader {config.loader!r} is for images", hint='set loader = "resident"')
        return sequences.SequenceLoader(data, config, device=device, shard=shard)
    if config.loader == "resident":
        return resident.ResidentLoader(data, config, image_size=image_size, device=device, dtype=dtype, shard=shard)
    if config.loader == "dataloader":
        return dataloader.PillowLoader(data, config, image_size=image_size, device=device, dtype=dtype, shard=shard)
    raise InputError(f"no loader is named {config.loader!r}", hint='loader is "resident" or "dataloader"')
