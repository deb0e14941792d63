"""The TensorFlow backend of the training loop: steps in TensorFlow, traced once for each batch size."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from workloads.contract import TrainConfig
from workloads.engines import evaluation, tf_checkpoint, tf_devices
from workloads.engines.tf_input import Preparation, TfBatch, TfLoader
from workloads.engines.tf_optimizer import Optimizer
from workloads.loaders.protocol import Shard
from workloads.measurement import memory, timing
from workloads.models.keras_forms.layers import Entry, Maker
from workloads.strategies.shared.keras_protocol import KerasStrategy

Value = TypeVar("Value")


class KerasBackend:
    """Implements :class:`workloads.engines.backend.Backend` for a model under one strategy."""

    def __init__(
        self,
        config: TrainConfig,
        strategy: KerasStrategy,
        maker: Maker,
        prepare: Preparation,
        loader: TfLoader,
        class_names: tuple[str, ...],
        devices: tuple[str, ...],
    ) -> None:
        self.entries: list[Entry] = list(maker.entries())
        self.variables = [e.variable for e in self.entries if e.trainable]
        self._distribution = strategy.distribution
        self._optimizer = Optimizer(config, self.variables, self._distribution)
        self._strategy, self._randomness, self._prepare = strategy, maker.randomness, prepare
        self._replicas = int(self._distribution.num_replicas_in_sync)
        self._loader, self._class_names, self._devices = loader, class_names, devices
        self._classes = len(class_names)
        self._label_smoothing = config.label_smoothing
        self._statistics = [e.variable for e in self.entries if not e.trainable]
        self._statistics_differ = False
        self._seed = 0
        self._since_seed = 0
        # No step branches on a tensor, so AutoGraph has nothing to rewrite.
        self._traced_train = tf.function(self._train, autograph=False)
        self._traced_count = tf.function(self._count, autograph=False)
        self.num_train, self.num_test = loader.num_train, loader.num_test
        self.steps_per_epoch = loader.steps_per_epoch
        self.batches: Callable[[int], Iterator[TfBatch]] = loader.train
        self.save, self.load = tf_checkpoint.save, tf_checkpoint.load

    def seed(self, seed: int) -> None:
        self._seed, self._since_seed = seed, 0

    def train_step(self, batch: TfBatch) -> Any:
        self._since_seed += 1
        self._statistics_differ = self._replicas > 1
        # Small enough that int64 does not overflow when dropout layers multiply it (keras_forms/layers.py).
        seed = np.array([self._seed >> 16, self._since_seed], np.int64)
        return self._traced_train(batch.pixels, batch.labels, tf.constant(self._optimizer.next_scalars()), seed)

    def evaluate(self, between_batches: Callable[[], None]) -> evaluation.Evaluation:
        self._average_statistics()
        total: Any = 0.0
        for batch in self._loader.test():
            total = total + self._traced_count(batch.pixels, batch.labels)
            between_batches()
        return evaluation.from_counts(self._class_names, total.numpy().tolist(), self.num_test)

    def settle(self) -> float:
        if self._devices[0].startswith("/GPU"):
            tf.test.experimental.sync_devices()
        return time.perf_counter()

    def maximum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def gather(self, value: Value) -> list[Value]:
        return [value]

    def recorder(self, deliver: Callable[[timing.StepTimes], None]) -> _Recorder:
        return _Recorder(deliver)

    def set_rate(self, rate: float) -> None:
        self._optimizer.rate = rate

    def rate(self) -> float:
        return float(self._optimizer.rate)

    def memory_bytes(self) -> tuple[int, int]:
        return tf_devices.memory_bytes(self._devices) or memory.process_memory_bytes()

    def _average_statistics(self) -> None:
        """Set the running statistics of all replicas to their mean; returns at once when nothing changed."""
        if self._statistics_differ:
            self._statistics_differ = False
            for variable in self._statistics:
                variable.assign(variable.read_value())

    def set_model(self, weights: Mapping[str, np.ndarray]) -> None:
        """Load parameters and running statistics with torch's names and memory layout."""
        for entry in self.entries:
            entry.variable.assign(entry.from_torch(np.asarray(weights[entry.name])))

    def state_dict(self) -> dict[str, Any]:
        """Return the whole model and optimizer as arrays, with torch's names and memory layout."""
        self._average_statistics()
        learning = [e for e in self.entries if e.trainable]
        optimizer: dict[str, Any] = {"steps": self._optimizer.steps}
        for name, slots in self._optimizer.slots.items():
            optimizer[name] = {e.name: e.to_torch(s.numpy()) for e, s in zip(learning, slots, strict=True)}
        return {
            "model": {e.name: e.to_torch(np.asarray(e.variable.read_value())) for e in self.entries},
            "optimizer": optimizer,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        self.set_model(state["model"])
        self._optimizer.steps = state["optimizer"]["steps"]
        learning = [e for e in self.entries if e.trainable]
        for name, slots in self._optimizer.slots.items():
            for entry, slot in zip(learning, slots, strict=True):
                slot.assign(entry.from_torch(state["optimizer"][name][entry.name]))

    def _train(self, pixels: Any, labels: Any, scalars: Any, seed: Any) -> Any:
        samples = int(labels.shape[0])

        def replica() -> Any:
            x, y, counts = self._part(pixels, labels)
            self._randomness.seed = seed
            weight = tf.constant(counts / samples, self._prepare.dtype)
            loss, gradients = self._strategy.backward(x, lambda logits: self._loss(logits, y), self.variables, weight)
            self._optimizer.apply(gradients, scalars)
            return counts * loss

        return self._summed(replica)

    def _count(self, pixels: Any, labels: Any) -> Any:
        def replica() -> Any:
            x, y, counts = self._part(pixels, labels)
            logits = self._wide(self._strategy.logits(x))
            loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
            predicted = tf.argmax(logits, axis=1)
            rows = [tf.boolean_mask(y, predicted == y), predicted, y]
            by_class = [tf.math.bincount(tf.cast(r, tf.int32), minlength=self._classes) for r in rows]
            flat = [[tf.shape(y)[0]], [loss], *by_class]
            return counts * tf.concat([tf.cast(v, tf.float64) for v in flat], axis=0)

        return self._summed(replica)

    def _summed(self, replica: Callable[[], Any]) -> Any:
        return self._distribution.reduce("SUM", self._distribution.run(replica), axis=None)

    def _part(self, pixels: Any, labels: Any) -> tuple[Any, Any, float]:
        """Return this replica's part of a batch, and 1; or a stand-in sample, and 0."""
        replica = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
        rows = Shard(int(replica), self._replicas).part(int(labels.shape[0]))
        counts = float(rows.stop > rows.start)
        rows = rows if counts else slice(1)
        return self._prepare(pixels[rows]), labels[rows], counts

    def _loss(self, logits: Any, y: Any) -> Any:
        logits = self._wide(logits)
        if not self._label_smoothing:
            return tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        share = self._label_smoothing / self._classes
        target = tf.one_hot(y, self._classes, 1 - self._label_smoothing + share, share, dtype=logits.dtype)
        return tf.reduce_sum(tf.nn.softmax_cross_entropy_with_logits(target, logits))

    def _wide(self, logits: Any) -> Any:
        return tf.cast(logits, self._prepare.dtype)


class _Recorder:
    """Times and losses of steps.

    TensorFlow's Python API has no events with the time at which a step ended. So the host waits for each loss, one step
    late, which leaves the device a step to work on.
    """

    def __init__(self, deliver: Callable[[timing.StepTimes], None]) -> None:
        self._deliver = deliver
        self._first_step = 0
        self._marks: list[float] = []
        self._losses: list[float] = []
        self._samples: list[int] = []
        self._newest: Any = None

    def start_epoch(self, step: int) -> None:
        self._first_step = step
        self._marks = [time.perf_counter()]

    def record(self, loss: Any, samples: int) -> None:
        previous, self._newest = self._newest, loss
        self._samples.append(samples)
        if previous is not None:
            self._read(previous)

    def finish_epoch(self) -> None:
        if self._newest is not None:
            self._read(self._newest)
            self._newest = None
        self._flush()

    def _read(self, loss: Any) -> None:
        self._losses.append(float(loss.numpy()))
        self._marks.append(time.perf_counter())
        if len(self._losses) == timing.WINDOW_STEPS:
            self._flush()

    def _flush(self) -> None:
        count = len(self._losses)
        if not count:
            return
        samples, self._samples = self._samples[:count], self._samples[count:]
        times_s = [later - earlier for earlier, later in zip(self._marks, self._marks[1:], strict=False)]
        self._deliver(timing.StepTimes(self._first_step, times_s, self._losses, samples))
        self._first_step += count
        self._marks, self._losses = self._marks[-1:], []
