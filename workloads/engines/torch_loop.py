"""The torch engine, for every torch strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from workloads import loaders
from workloads.contract import Topology, TrainConfig
from workloads.engines import checkpoint, evaluation, recipe, settings
from workloads.engines.communication import Communication
from workloads.engines.torch_devices import choose_device, describe_world, devices_of, uuids
from workloads.engines.training import Training
from workloads.job.context import Job
from workloads.job.world import World
from workloads.loaders.protocol import Batch, Loader, Shard
from workloads.measurement import memory, timing
from workloads.strategies.shared.protocol import PreparingStrategy, Strategy, Task


def train(job: Job) -> None:
    """Train, evaluate, checkpoint and measure one run on this rank; fills ``job.result`` except state and end.

    Raises:
        JobError: the hardware or the data differ from the plan.
        InputError: the configuration cannot be trained.
        Interrupted: a signal asked the job to end.
    """
    device = choose_device(job)
    config = job.spec.train
    # By default each rank would use a thread for every core, and the ranks of a node share its cores.
    torch.set_num_threads(job.spec.expect.cpus_per_rank)
    recipe.set_precision(config)
    declaration, options = settings.strategy(config)
    job.pulse.beat()
    communication = Communication(
        job.world,
        job.attempt,
        device,
        join=declaration.topology(options) is Topology.PROCESS_PER_DEVICE,
        hang_timeout_s=job.spec.execution.hang_timeout_s,
    )
    job.pulse.beat()
    describe_world(job, device, communication)
    data = settings.load_data(job)
    job.pulse.beat()
    size = settings.image_size(config, data)
    module = recipe.build_model(config, data, size, settings.data_root(job))
    job.result.num_parameters = sum(p.numel() for p in module.parameters() if p.requires_grad)
    has_batch_norm = recipe.has_batch_norm(module)
    job.result.batch_norm_treatment = settings.batch_norm_treatment(config, has_batch_norm)
    job.pulse.beat()
    loader = loaders.make(
        data,
        config,
        image_size=size,
        device=device,
        dtype=recipe.dtype_of(config),
        shard=Shard(job.world.rank, job.world.size) if declaration.splits_batch else Shard(0, 1),
    )
    job.result.num_train_samples = loader.num_train
    if has_batch_norm:
        settings.check_batch_norm(config, loader.num_train)
    task = make_task(
        config,
        module,
        loader,
        job.world,
        device,
        balance=lambda decide: _balance(job, decide),
        host_group=communication.host_group,
    )
    strategy: Strategy = declaration.create()(task)
    job.pulse.beat()
    backend = _Torch(strategy, loader, data.class_names, task.devices, communication)
    prepare = cast(PreparingStrategy, strategy).prepare if config.compile != "off" else None
    Training(job, backend, prepare, uuids(task.devices)).run()
    strategy.close()
    loader.close()
    communication.close()


def _balance(job: Job, decide: Callable[[], Sequence[int]]) -> tuple[int, ...]:
    """Implement :attr:`workloads.strategies.shared.protocol.Task.balance`."""
    before = checkpoint.progress_of(job.run.checkpoint, job.spec.run_id).get("balance_applied")
    job.result.balance_applied = list(before or decide())
    return tuple(job.result.balance_applied)


def make_task(
    config: TrainConfig,
    module: nn.Module,
    loader: Loader,
    world: World,
    device: torch.device,
    balance: Callable[[Callable[[], Sequence[int]]], tuple[int, ...]] = lambda decide: tuple(decide()),
    host_group: distributed.ProcessGroup | None = None,
) -> Task:
    """Return the task of the configured strategy.

    Args:
        module: made by :func:`workloads.engines.recipe.build_model`.
        device: this rank's.
        balance: of the task; by default every balance is decided anew.
        host_group: of the task.
    """
    declaration, options = settings.strategy(config)
    return Task(
        module=module,
        config=config,
        options=options,
        world=world,
        device=device,
        make_optimizer=partial(recipe.make_optimizer, config),
        forward=partial(recipe.forward, config, device),
        loss_sum=partial(recipe.loss_sum, config),
        backward=partial(recipe.backward, {}),
        set_training=partial(recipe.set_training, config),
        layers=partial(recipe.layers, config, module),
        balance=balance,
        host_group=host_group,
        example=partial(recipe.example, loader),
        devices=devices_of(device, config, declaration.topology(options)),
    )


def evaluate(
    strategy: Strategy,
    loader: Loader,
    class_names: tuple[str, ...],
    device: torch.device,
    communication: Communication,
    beat: Callable[[], None],
) -> evaluation.Evaluation:
    """Evaluate the test set, counting each sample once at any world size. Collective.

    An image has one label, a sequence one at each position, and each counts.

    Raises:
        JobError: the number of counted samples differs from the test set's.
    """
    # Read once, at the end, in one message. A double counts exactly up to 2^53.
    counts = torch.zeros(2 + 3 * len(class_names), dtype=torch.float64, device=device)
    for batch in loader.test():
        logits = strategy.logits(batch.x)
        if logits is not None and batch.num_local:
            _add(counts, logits, batch.y)
        beat()
    return evaluation.from_counts(class_names, communication.add(counts).tolist(), loader.num_test)


def _add(counts: Tensor, logits: Tensor, y: Tensor) -> None:
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    counts[0] += len(y)
    counts[1] += functional.cross_entropy(logits, y, reduction="none").double().sum()
    correct, predicted, true = counts[2:].view(3, -1)
    answers, y = logits.argmax(dim=1).reshape(-1), y.reshape(-1)
    ones = torch.ones(len(y), dtype=torch.float64, device=y.device)
    correct.index_add_(0, y, (answers == y).double())
    predicted.index_add_(0, answers, ones)
    true.index_add_(0, y, ones)


class _Torch:
    """Implements :class:`workloads.engines.backend.Backend`."""

    def __init__(
        self,
        strategy: Strategy,
        loader: Loader,
        class_names: tuple[str, ...],
        devices: tuple[torch.device, ...],
        communication: Communication,
    ) -> None:
        self._strategy = strategy
        self._loader = loader
        self._class_names = class_names
        self._devices = devices
        self._communication = communication
        self._clock = timing.Clock(*devices)
        self.num_train, self.num_test = loader.num_train, loader.num_test
        self.steps_per_epoch = loader.steps_per_epoch
        self.batches: Callable[[int], Iterator[Batch]] = loader.train
        self.train_step: Callable[[Batch], Tensor] = strategy.train_step
        self.state_dict = strategy.state_dict
        self.load_state_dict = strategy.load_state_dict
        self.seed = torch.manual_seed
        self.settle = self._clock.settle
        self.maximum = communication.maximum
        self.gather = communication.gather
        self.save = checkpoint.save
        self.load = checkpoint.load

    def recorder(self, deliver: Callable[[timing.StepTimes], None]) -> timing.Recorder:
        return timing.Recorder(self._clock, self._communication.add, deliver)

    def set_rate(self, rate: float) -> None:
        recipe.set_learning_rate(self._strategy.optimizer, rate)

    def rate(self) -> float:
        return float(self._strategy.optimizer.param_groups[0]["lr"])

    def memory_bytes(self) -> tuple[int, int]:
        return memory.memory_bytes(*self._devices)

    def evaluate(self, between_batches: Callable[[], None]) -> evaluation.Evaluation:
        return evaluate(
            self._strategy, self._loader, self._class_names, self._devices[0], self._communication, between_batches
        )
