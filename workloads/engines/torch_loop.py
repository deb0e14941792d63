"""The torch training loop: the only one, whatever the strategy. ``train`` is called once on every rank."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch

from workloads import checkpoint, loaders, measure, provenance, registry
from workloads.contract import Topology, TrainConfig
from workloads.datasets.images import ImageData
from workloads.engines import recipe
from workloads.engines.communication import Communication
from workloads.engines.devices import choose_device, describe_world, devices_of
from workloads.engines.evaluation import evaluate
from workloads.errors import DatasetError, InputError
from workloads.job import Job, say
from workloads.loaders import Loader, Shard
from workloads.strategies.protocol import Strategy, Task

STARVATION_STEPS = 20
"""At most so many steps on a resident batch, compared with at least so many steady ones ..."""
STARVATION_S = 5.0
"""... that fit into this ..."""
STARVATION_SHARE = 0.1
"""... and into this share of the training time; three at least."""


def train(job: Job) -> None:
    """Train, evaluate, checkpoint and measure one run; ``job.result`` holds everything but state and end.

    Raises:
        JobError: what the job was given, or what it found, is not what was planned.
        InputError: what was asked for cannot be done.
        Interrupted: the job was told to end.
    """
    device = choose_device(job)
    config = job.spec.train
    torch.set_num_threads(job.spec.expect.cpus_per_rank)
    recipe.set_precision(config)
    declaration = registry.find(registry.strategies(), config.strategy)
    if declaration is None:
        raise InputError(f"no strategy is named {config.strategy!r} here")
    options = {option.name: option.default for option in declaration.options} | config.strategy_options
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
    data = _load(job)
    job.pulse.beat()
    size = recipe.image_size(config, data)
    module = recipe.build_model(config, data, size)
    job.result.num_parameters = sum(p.numel() for p in module.parameters() if p.requires_grad)
    job.result.batch_norm_treatment = "frozen" if config.batch_norm == "frozen" else declaration.batch_norm_treatment
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
    task = Task(
        module=module,
        config=config,
        options=options,
        world=job.world,
        device=device,
        make_optimizer=recipe.make_optimizer(config),
        forward=recipe.forward(config, device),
        loss_sum=recipe.loss_sum(config),
        set_training=recipe.set_training(config),
        layers=lambda: recipe.layers(config, module),
        input_shape=(data.channels, size, size),
        devices=devices_of(device, config, declaration.topology(options)),
    )
    strategy = declaration.create()(task)
    job.pulse.beat()
    _Training(job, strategy, loader, data.class_names, task.devices, communication).run()
    strategy.close()
    loader.close()
    communication.close()


class _Training:
    """The state of the loop on one rank."""

    def __init__(
        self,
        job: Job,
        strategy: Strategy,
        loader: Loader,
        class_names: tuple[str, ...],
        devices: tuple[torch.device, ...],
        communication: Communication,
    ) -> None:
        self._job = job
        self._config: TrainConfig = job.spec.train
        self._strategy = strategy
        self._loader = loader
        self._class_names = class_names
        self._devices = devices
        self._communication = communication
        self._steps = self._config.steps or self._config.epochs * loader.steps_per_epoch
        self._epochs = -(-self._steps // loader.steps_per_epoch)
        self._step = 0
        self._epoch = 0
        """Epochs done; the last may be cut short by ``steps``."""
        self._epoch_times_s: list[float] = []
        self._evaluate_s = 0.0
        self._earlier_s = 0.0
        """Total time of earlier attempts, up to the checkpoint that this one goes on from."""
        self._clock = measure.Clock(*devices)
        self._tally = measure.Tally(0)

    def run(self) -> None:
        """From the checkpoint, or from the start, to the end."""
        self._resume()
        self._set_up()
        while self._step < self._steps:
            facts = self._train_epoch()
            last = self._step >= self._steps
            if last or (self._config.eval_every and self._epoch % self._config.eval_every == 0):
                facts |= self._evaluate()
            self._after_epoch(facts)
            every = self._job.spec.execution.checkpoint_every
            if every and (last or self._epoch % every == 0):
                self._save()
        if self._job.result.test_accuracy is None:
            self._evaluate()  # an earlier attempt was ended between its last checkpoint and its result
        self._summarise()
        self._job.result.starvation_ratio = self._starvation()

    def _set_up(self) -> None:
        result, pulse = self._job.result, self._job.pulse
        self._tally = measure.Tally(measure.warmup_steps(self._steps - self._step))
        recipe.set_learning_rate(self._strategy.optimizer, recipe.learning_rate(self._config, self._step, self._steps))
        if result.lr_applied is None:
            result.lr_applied = float(self._strategy.optimizer.param_groups[0]["lr"])
        self._clock.settle()
        result.startup_s = provenance.process_age_s()
        pulse.epochs, pulse.steps, pulse.step, pulse.epoch = self._epochs, self._steps, self._step, self._epoch
        self._job.events.write(
            "setup",
            num_parameters=result.num_parameters,
            lr_applied=result.lr_applied,
            steps=self._steps,
            steps_per_epoch=self._loader.steps_per_epoch,
            num_train_samples=self._loader.num_train,
            num_test_samples=self._loader.num_test,
            startup_s=result.startup_s,
        )
        self._job.orders.deferred = True

    def _train_epoch(self) -> dict[str, Any]:
        """One pass over the training images, or what ``steps`` leaves of it; what the epoch's event says of it."""
        config, strategy, pulse, tally = self._config, self._strategy, self._job.pulse, self._tally
        first_step = self._step
        pulse.beat("train")
        tally.start_epoch()
        # Dropout after a resume must be what it would have been without the interruption.
        torch.manual_seed(recipe.seed_of(config.seed, self._epoch, self._job.world.rank))
        recorder = measure.Recorder(self._clock, self._communication.add, self._take)
        started_s = self._clock.settle()
        recorder.start_epoch(self._step)
        rate = 0.0
        for batch in self._loader.train(self._epoch):
            rate = recipe.learning_rate(config, self._step, self._steps)
            recipe.set_learning_rate(strategy.optimizer, rate)
            loss = strategy.train_step(batch)
            recorder.record(loss, batch.num_global)
            self._step += 1
            pulse.step = self._step
            pulse.samples += batch.num_global
            pulse.beat()
            self._job.orders.obey()
            if self._step >= self._steps:
                break
        recorder.finish_epoch()
        epoch_time_s = self._clock.settle() - started_s
        self._epoch += 1
        pulse.epoch = self._epoch
        allocated, peak = measure.memory_bytes(*self._devices)
        epoch_time_s, allocated_most, peak_most = self._communication.maximum([epoch_time_s, allocated, peak])
        self._epoch_times_s.append(epoch_time_s)
        result = self._job.result
        result.allocated_memory_bytes = max(round(allocated_most), result.allocated_memory_bytes or 0)
        result.peak_memory_bytes = max(round(peak_most), result.peak_memory_bytes or 0)
        return {
            "epoch": self._epoch,
            "steps": self._step - first_step,
            "train_loss": tally.epoch_loss_sum / tally.epoch_samples,
            "epoch_time_s": epoch_time_s,
            "samples_per_s": tally.epoch_samples / epoch_time_s,
            "lr": rate,
            "allocated_memory_bytes": allocated,
            "peak_memory_bytes": peak,
        }

    def _take(self, steps: measure.Steps) -> None:
        self._tally.take(steps)
        self._job.events.write(
            "steps",
            epoch=self._epoch + 1,
            first_step=steps.first_step,
            step_time_s=steps.times_s,
            loss=steps.losses,
        )

    def _evaluate(self) -> dict[str, Any]:
        result, pulse = self._job.result, self._job.pulse
        pulse.beat("evaluate")
        started_s = self._clock.settle()
        found = evaluate(
            self._strategy,
            self._loader,
            self._class_names,
            self._devices[0],
            self._communication,
            self._between_batches,
        )
        (evaluate_s,) = self._communication.maximum([self._clock.settle() - started_s])
        self._evaluate_s += evaluate_s
        result.test_accuracy, result.test_loss, result.num_test_samples = found.accuracy, found.loss, found.samples
        result.per_class = found.per_class
        result.evaluate_s = self._evaluate_s
        return {"test_loss": found.loss, "test_accuracy": found.accuracy, "evaluate_s": evaluate_s}

    def _between_batches(self) -> None:
        self._job.pulse.beat()
        self._job.orders.obey()

    def _after_epoch(self, facts: dict[str, Any]) -> None:
        result = self._job.result
        result.train_loss = facts["train_loss"]
        result.diverged = result.diverged or self._tally.diverged
        result.epochs_done, result.steps_done = self._epoch, self._step
        result.train_time_s = sum(self._epoch_times_s)
        result.epoch_time_s = statistics.median(self._epoch_times_s[1:] or self._epoch_times_s)
        result.total_time_s = self._earlier_s + provenance.process_age_s()
        self._job.events.write("epoch", **facts)

    def _summarise(self) -> None:
        """What only all steps together say; the slowest rank counts."""
        result, tally = self._job.result, self._tally
        if tally.times_s:
            median_s, steady_s, warmup_s = self._communication.maximum(
                [tally.median_step_s, tally.steady_time_s, tally.warmup_time_s]
            )
            result.step_time_s = median_s
            result.warmup_s = warmup_s
            result.samples_per_s = tally.samples / steady_s
        allocated, peak = measure.memory_bytes(*self._devices)
        ranks = self._communication.gather({"allocated_memory_bytes": allocated, "peak_memory_bytes": peak})
        result.memory_by_rank = [{"rank": rank, **memory} for rank, memory in enumerate(ranks)]
        result.peak_memory_bytes = max(result.peak_memory_bytes or 0, *(m["peak_memory_bytes"] for m in ranks))
        if result.allocated_memory_bytes is None:
            result.allocated_memory_bytes = max(m["allocated_memory_bytes"] for m in ranks)
        (result.total_time_s,) = self._communication.maximum([self._earlier_s + provenance.process_age_s()])

    def _starvation(self) -> float | None:
        """Time a sample with the real input over time a sample with one resident batch; None after too few steps.

        Trains on, so parameters mean nothing afterwards: everything worth keeping has been measured and saved by now.
        """
        tally = self._tally
        if len(tally.times_s) < STARVATION_STEPS:
            return None
        batch = next(iter(self._loader.train(0)), None)
        if batch is None:
            return None
        (step_s,) = self._communication.maximum([tally.steady_time_s / len(tally.times_s)])
        budget_s = min(STARVATION_S, STARVATION_SHARE * sum(self._epoch_times_s))
        steps = max(3, min(STARVATION_STEPS, int(budget_s / step_s)))
        self._strategy.train_step(batch)
        started_s = self._clock.settle()
        for _ in range(steps):
            self._strategy.train_step(batch)
            self._job.pulse.beat()
        resident_s, steady_s = self._communication.maximum([self._clock.settle() - started_s, tally.steady_time_s])
        return (steady_s / tally.samples) / (resident_s / (steps * batch.num_global))

    def _save(self) -> None:
        state = self._strategy.state_dict()
        if self._job.world.rank != 0:
            return
        result = self._job.result
        progress = {
            "epoch": self._epoch,
            "step": self._step,
            "epoch_times_s": self._epoch_times_s,
            "total_time_s": self._earlier_s + provenance.process_age_s(),
            **{name: getattr(result, name) for name in _CARRIED},
        }
        try:
            checkpoint.save(self._job.run.checkpoint, self._job.spec.run_id, state, progress)
        except OSError as error:
            # The numbers can still be had; what is lost is only the way back to here.
            say(f"no checkpoint after epoch {self._epoch}: {error}")
        else:
            self._job.events.write("checkpoint", epoch=self._epoch)

    def _resume(self) -> None:
        path = self._job.run.checkpoint
        try:
            found = checkpoint.load(path, self._job.spec.run_id)
        except checkpoint.DamagedCheckpointError as error:
            self._start_over(path, error)
            return
        if found is None:
            return
        state, progress = found
        self._strategy.load_state_dict(state)
        self._epoch, self._step = progress["epoch"], progress["step"]
        self._epoch_times_s = progress["epoch_times_s"]
        self._earlier_s = progress["total_time_s"]
        result = self._job.result
        for name in _CARRIED:
            setattr(result, name, progress[name])
        self._evaluate_s = result.evaluate_s or 0.0
        result.resumed_from_epoch = self._epoch
        self._job.events.write("resume", epoch=self._epoch)

    def _start_over(self, path: Path, error: Exception) -> None:
        # All ranks have read it before one moves it.
        self._communication.gather(None)
        if self._job.world.rank == 0:
            aside = checkpoint.set_aside(path)
            say(f"checkpoint cannot be used, starting over: {error}\n  kept as {aside}")
        self._communication.gather(None)


_CARRIED = (
    "train_loss",
    "diverged",
    "epochs_done",
    "steps_done",
    "train_time_s",
    "epoch_time_s",
    "evaluate_s",
    "step_time_s",
    "samples_per_s",
    "warmup_s",
    "allocated_memory_bytes",
    "peak_memory_bytes",
    "lr_applied",
)
"""Fields of the result that an attempt takes over from the one it goes on from."""


def _load(job: Job) -> ImageData:
    config = job.spec.train
    declaration = registry.find(registry.datasets(), config.dataset)
    if declaration is None:
        raise InputError(f"no data set is named {config.dataset!r} here")
    root = Path(job.spec.data_root) if job.spec.data_root else None
    data = declaration.load(root, config.dataset, config)
    planned = job.spec.dataset_digest
    if planned and data.digest and data.digest != planned:
        raise DatasetError(
            f"the content of data set {config.dataset!r} is not what was planned",
            where=job.spec.data_root,
            why=f"digest {data.digest}, planned {planned}",
            hint="plan and submit again",
        )
    job.result.dataset_digest = data.digest
    return data
