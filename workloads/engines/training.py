"""The training loop around the steps, the same for every framework: epochs, evaluation, checkpoints, measurement.

An engine prepares model, data and strategy in its framework, and gives the loop a
:class:`workloads.engines.backend.Backend`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from workloads.contract import TrainConfig
from workloads.engines import checkpoint, settings
from workloads.engines.backend import Backend
from workloads.job import world
from workloads.job.context import Job, print_error, print_progress
from workloads.measurement import telemetry, timing
from workloads.metrics import Measurements, all_metrics

COMPILE_PATIENCE_S = 1800
"""The compiler reports no progress, and takes many minutes for a large model on a busy node."""

_RESUMED_FIELDS = (
    "train_loss",
    "diverged",
    "epochs_done",
    "steps_done",
    "train_time_s",
    "epoch_time_s",
    "evaluate_s",
    "allocated_memory_bytes",
    "peak_memory_bytes",
    "lr_applied",
)
"""Fields of the result that a resumed attempt takes from the checkpoint."""


class Training:
    """The loop on one rank.

    Args:
        prepare: (first batch of an epoch) compiles or captures what steps will run and leaves parameters unchanged;
            None when steps need no preparation.
        gpus: UUIDs of the GPUs of this rank; where the framework does not know them, nvidia-smi does.
    """

    def __init__(
        self, job: Job, backend: Backend, prepare: Callable[[Any], None] | None = None, gpus: Sequence[str] = ()
    ) -> None:
        self._job = job
        self._prepare_steps = prepare
        self._gpus = gpus
        self._sampler: telemetry.Sampler | None = None
        self._earlier_usage: telemetry.GpuUsage | None = None
        self._config: TrainConfig = job.spec.train
        self._backend = backend
        self._steps = self._config.steps or self._config.epochs * backend.steps_per_epoch
        self._epochs = -(-self._steps // backend.steps_per_epoch)
        self._step = 0
        self._epoch = 0
        """Epochs done; ``steps`` may cut the last one short."""
        self._epoch_times_s: list[float] = []
        self._evaluate_s = 0.0
        self._earlier_s = 0.0
        """Total time of earlier attempts, up to the checkpoint that this one resumes."""
        self._tally = timing.Tally(0)

    def run(self) -> None:
        """Train to the end, from the checkpoint if there is one."""
        self._resume()
        self._prepare()
        self._sampler = self._make_sampler()
        self._start()
        with self._sampler or contextlib.nullcontext():
            while self._step < self._steps:
                facts = self._train_epoch()
                last = self._step >= self._steps
                if last or (self._config.eval_every and self._epoch % self._config.eval_every == 0):
                    facts |= self._evaluate()
                self._report_epoch(facts)
                every = self._job.spec.execution.checkpoint_every
                if every and (last or self._epoch % every == 0):
                    self._save()
            self._gpu_usage().fill(self._job.result)
        if self._job.result.test_accuracy is None:
            self._evaluate()  # an earlier attempt ended between its last checkpoint and its result
        self._summarize()
        found = Measurements(
            config=self._config,
            result=self._job.result,
            tally=self._tally,
            epoch_times_s=self._epoch_times_s,
            backend=self._backend,
            beat=self._job.pulse.beat,
        )
        for metric in sorted(all_metrics().values(), key=lambda metric: metric.changes_model):
            self._job.result.metrics[metric.name] = metric.measure(found)

    def _make_sampler(self) -> telemetry.Sampler | None:
        """Return the sampler of all GPUs of this node's ranks, on the first of these ranks; None on the others."""
        job = self._job
        gpus = tuple(self._gpus)
        if job.spec.expect.gpus_per_node and not gpus:
            gpus = tuple(gpu.uuid for gpu in world.visible_gpus() or ())[: job.spec.expect.gpus_per_node]
        ranks = self._backend.gather((job.world.node, job.world.rank, gpus))
        here = [(rank, own) for node, rank, own in ranks if node == job.world.node]
        if job.world.rank != here[0][0]:
            return None
        distinct = dict.fromkeys(uuid for _, own in here for uuid in own)
        return telemetry.Sampler(list(distinct), lambda: job.pulse.phase, job.events.write)

    def _gpu_usage(self) -> telemetry.GpuUsage:
        """Return the GPU usage of all nodes and attempts so far. Collective."""
        nodes = self._backend.gather(self._sampler.usage() if self._sampler else None)
        return telemetry.combine_attempts(self._earlier_usage, telemetry.combine_nodes([n for n in nodes if n]))

    def _prepare(self) -> None:
        """Compile and capture before anything is measured."""
        if self._prepare_steps is None or self._step >= self._steps:
            return
        pulse = self._job.pulse
        pulse.phase = "compile"
        pulse.await_for(COMPILE_PATIENCE_S)
        started_s = self._backend.settle()
        self._prepare_steps(next(iter(self._backend.batches(self._epoch))))
        (compile_s,) = self._backend.maximum([self._backend.settle() - started_s])
        self._job.result.compile_s = compile_s
        self._job.events.write("compile", compile=self._config.compile, compile_s=compile_s)

    def _start(self) -> None:
        """Set the first learning rate and note what start-up took."""
        result, pulse = self._job.result, self._job.pulse
        self._tally = timing.Tally(timing.warmup_steps(self._steps - self._step))
        self._backend.set_rate(settings.learning_rate(self._config, self._step, self._steps))
        if result.lr_applied is None:
            result.lr_applied = self._backend.rate()
        self._backend.settle()
        result.startup_s = timing.process_age_s() - (result.compile_s or 0.0)
        pulse.epochs, pulse.steps, pulse.step, pulse.epoch = self._epochs, self._steps, self._step, self._epoch
        self._job.events.write(
            "setup",
            num_parameters=result.num_parameters,
            lr_applied=result.lr_applied,
            steps=self._steps,
            steps_per_epoch=self._backend.steps_per_epoch,
            num_train_samples=self._backend.num_train,
            num_test_samples=self._backend.num_test,
            startup_s=result.startup_s,
        )
        self._job.stop_signals.deferred = True

    def _train_epoch(self) -> dict[str, Any]:
        """Train one epoch, or what ``steps`` leaves of it; returns what its event reports."""
        config, backend, pulse, tally = self._config, self._backend, self._job.pulse, self._tally
        first_step = self._step
        pulse.beat("train")
        tally.start_epoch()
        # Seeded in every epoch, so that dropout after a resume is what it would have been without the interruption.
        backend.seed(settings.seed_of(config.seed, self._epoch, self._job.world.rank))
        recorder = backend.recorder(self._add_steps)
        started_s = backend.settle()
        recorder.start_epoch(self._step)
        rate = 0.0
        for batch in backend.batches(self._epoch):
            rate = settings.learning_rate(config, self._step, self._steps)
            backend.set_rate(rate)
            loss = backend.train_step(batch)
            recorder.record(loss, batch.num_global)
            self._step += 1
            pulse.step = self._step
            pulse.samples += batch.num_global
            self._between_batches()
            if self._step >= self._steps:
                break
        recorder.finish_epoch()
        epoch_time_s = backend.settle() - started_s
        self._epoch += 1
        pulse.epoch = self._epoch
        allocated, peak = backend.memory_bytes()
        epoch_time_s, max_allocated, max_peak = backend.maximum([epoch_time_s, allocated, peak])
        self._epoch_times_s.append(epoch_time_s)
        result = self._job.result
        result.allocated_memory_bytes = max(round(max_allocated), result.allocated_memory_bytes or 0)
        result.peak_memory_bytes = max(round(max_peak), result.peak_memory_bytes or 0)
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

    def _between_batches(self) -> None:
        self._job.pulse.beat()
        self._job.stop_signals.raise_if_stopped()

    def _add_steps(self, steps: timing.StepTimes) -> None:
        self._tally.take(steps)
        self._job.events.write(
            "steps", epoch=self._epoch + 1, first_step=steps.first_step, step_time_s=steps.times_s, loss=steps.losses
        )

    def _evaluate(self) -> dict[str, Any]:
        result = self._job.result
        self._job.pulse.beat("evaluate")
        started_s = self._backend.settle()
        found = self._backend.evaluate(self._between_batches)
        (evaluate_s,) = self._backend.maximum([self._backend.settle() - started_s])
        self._evaluate_s += evaluate_s
        result.test_accuracy, result.test_loss, result.num_test_samples = found.accuracy, found.loss, found.samples
        result.per_class = found.per_class
        result.evaluate_s = self._evaluate_s
        return {"test_loss": found.loss, "test_accuracy": found.accuracy, "evaluate_s": evaluate_s}

    def _report_epoch(self, facts: dict[str, Any]) -> None:
        result = self._job.result
        result.train_loss = facts["train_loss"]
        result.diverged = result.diverged or self._tally.diverged
        result.epochs_done, result.steps_done = self._epoch, self._step
        result.train_time_s = sum(self._epoch_times_s)
        result.epoch_time_s = statistics.median(self._epoch_times_s[1:] or self._epoch_times_s)
        result.total_time_s = self._earlier_s + timing.process_age_s()
        self._job.events.write("epoch", **facts)
        if self._job.world.rank == 0:
            tested = f", test accuracy {facts['test_accuracy']:.2%}" if "test_accuracy" in facts else ""
            speed = f"{facts['samples_per_s']:,.0f} samples/s{tested}"
            print_progress(f"epoch {self._epoch}/{self._epochs}: loss {facts['train_loss']:.4g}, {speed}")

    def _summarize(self) -> None:
        """Fill in memory and total time over all ranks."""
        result = self._job.result
        allocated, peak = self._backend.memory_bytes()
        ranks = self._backend.gather({"allocated_memory_bytes": allocated, "peak_memory_bytes": peak})
        result.memory_by_rank = [{"rank": rank, **memory} for rank, memory in enumerate(ranks)]
        result.peak_memory_bytes = max(result.peak_memory_bytes or 0, *(m["peak_memory_bytes"] for m in ranks))
        if result.allocated_memory_bytes is None:
            result.allocated_memory_bytes = max(m["allocated_memory_bytes"] for m in ranks)
        (result.total_time_s,) = self._backend.maximum([self._earlier_s + timing.process_age_s()])

    def _save(self) -> None:
        state = self._backend.state_dict()
        usage = self._gpu_usage()
        if self._job.world.rank != 0:
            return
        result = self._job.result
        progress = {
            "epoch": self._epoch,
            "step": self._step,
            "epoch_times_s": self._epoch_times_s,
            "total_time_s": self._earlier_s + timing.process_age_s(),
            "telemetry": dataclasses.asdict(usage),
            # A resumed attempt reads it earlier, through checkpoint.progress_of: its strategy needs it when it is made.
            "balance_applied": result.balance_applied,
            **{name: getattr(result, name) for name in _RESUMED_FIELDS},
        }
        try:
            self._backend.save(self._job.run.checkpoint, self._job.spec.run_id, state, progress)
        except OSError as error:
            # Training can still finish with a result; only the way back to this epoch is lost.
            print_error(f"no checkpoint after epoch {self._epoch}: {error}")
        else:
            self._job.events.write("checkpoint", epoch=self._epoch)

    def _resume(self) -> None:
        try:
            found = self._backend.load(self._job.run.checkpoint, self._job.spec.run_id)
        except checkpoint.DamagedCheckpointError as error:
            self._backend.gather(None)  # all ranks have read the checkpoint before rank 0 moves it
            if self._job.world.rank == 0:
                aside = checkpoint.set_aside(self._job.run.checkpoint)
                print_error(f"checkpoint cannot be used, starting over: {error}\n  kept as {aside}")
            self._backend.gather(None)
            return
        if found is None:
            return
        state, progress = found
        self._backend.load_state_dict(state)
        self._epoch, self._step = progress["epoch"], progress["step"]
        self._epoch_times_s, self._earlier_s = progress["epoch_times_s"], progress["total_time_s"]
        usage = progress.get("telemetry", {"problem": "an earlier attempt did not measure"})
        self._earlier_usage = telemetry.GpuUsage(**usage)
        result = self._job.result
        for name in _RESUMED_FIELDS:
            setattr(result, name, progress[name])
        self._evaluate_s = result.evaluate_s or 0.0
        result.resumed_from_epoch = self._epoch
        self._job.events.write("resume", epoch=self._epoch)
