"""``probe``: trains nothing. It checks in milliseconds what a cluster gives to a run, and writes a normal result.

The cluster check: a study of probes uses the same plan, scripts, queue, ranks and store as a real one, but loads no
framework, model or data. Within seconds it shows whether devices, cores, rendezvous, checkpoints and results work at a
site. It can also fail on purpose, to show what a failure looks like there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workloads.contract import Hardware, Topology
from workloads.errors import InputError
from workloads.registry import NO_FRAMEWORK, Option, Options, StrategyDeclaration


def _unsupported_hardware(hardware: Hardware, options: Options) -> str:
    rank, ranks = options["fault_rank"], hardware.devices
    assert isinstance(rank, int)
    if options["fault"] == "none" or rank < ranks:
        return ""
    return f"fault_rank {rank} would never fail: {hardware} has {ranks} ranks, counted from 0"


def _unsupported_training(train: Mapping[str, Any], options: Options) -> str:
    epoch = options["fault_epoch"]
    assert isinstance(epoch, int)
    if options["fault"] == "none" or epoch <= train["epochs"]:
        return ""
    return f"fault_epoch {epoch} would never come: the run has {train['epochs']} epochs"


def _create() -> Any:
    raise InputError("probe trains nothing: no training loop can run it")


DECLARATION = StrategyDeclaration(
    name="probe",
    summary="Trains nothing: one process a device that checks devices, cores and rendezvous. The cluster check.",
    framework=NO_FRAMEWORK,
    topology=lambda _options: Topology.PROCESS_PER_DEVICE,
    unsupported_hardware=_unsupported_hardware,
    unsupported_training=_unsupported_training,
    splits_batch=True,
    packages=(),
    options=(
        Option("epoch_s", 0.0, "Seconds that an epoch lasts.", minimum=0.0),
        Option("look_at_data", False, "Report what is wrong with the data set on the node."),
        Option("fault", "none", "What goes wrong, on purpose.", choices=("none", "crash", "hang", "memory", "exit")),
        Option("fault_epoch", 1, "In which epoch, from 1 on.", minimum=1.0),
        Option("fault_mb", 0, "Memory it takes at most, in MB; 0 is all.", minimum=0.0),
        Option("fault_rank", 0, "On which rank.", minimum=0.0),
    ),
    batch_norm_treatment="none",
    create=_create,
)
