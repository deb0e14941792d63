"""Training and evaluation steps in TensorFlow, for every strategy, traced once for each batch size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from workloads.contract import TrainConfig
from workloads.engines.tf_input import Preparation, TfBatch
from workloads.loaders.protocol import Shard
from workloads.models.keras_forms.layers import Entry, Maker
from workloads.strategies.shared.keras_protocol import KerasStrategy

BETAS = (0.9, 0.999)
EPSILON = 1e-8
"""Of Adam: torch's defaults. Keras has 1e-7 and adds it to another term."""


class Optimizer:
    """torch's SGD, Adam and AdamW through TensorFlow's fused kernels, one call for each parameter.

    TensorFlow's ResourceApplyAdam adds epsilon before it corrects the bias of the second moment, torch afterwards. It
    also corrects in the parameter's precision. So this class corrects both moments itself, in rate and epsilon.
    """

    def __init__(self, config: TrainConfig, variables: Sequence[Any], distribution: Any) -> None:
        self._config = config
        self._distribution = distribution
        self._variables = variables
        self._adam = config.optimizer in {"adam", "adamw"}
        self.steps = 0
        self.rate = config.lr
        names = ("exp_avg", "exp_avg_sq") if self._adam else ("momentum_buffer",) if config.momentum else ()
        self.slots: dict[str, list[Any]] = {name: [self._slot(v) for v in variables] for name in names}
        """The optimizer state of each parameter, by torch's names."""

    def _slot(self, variable: Any) -> Any:
        with self._distribution.scope(), self._distribution.extended.colocate_vars_with(variable):
            return tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)

    def next_scalars(self) -> np.ndarray:
        """Return (rate, the kernel's rate, the kernel's epsilon) of the next step."""
        self.steps += 1
        if not self._adam:
            return np.array([self.rate, self.rate, 0.0])
        first, second = (1 - beta**self.steps for beta in BETAS)
        return np.array([self.rate, self.rate * second**0.5 / first, EPSILON * second**0.5])

    def apply(self, gradients: Sequence[Any], scalars: Any) -> None:
        """Sum gradients over replicas and update the variables. Called in a replica."""

        def update(distribution: Any, own: Sequence[Any]) -> None:
            pairs = list(zip(own, self._variables, strict=True))
            summed = distribution.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs)
            for variable, gradient, *slots in zip(self._variables, summed, *self.slots.values(), strict=True):
                distribution.extended.update(variable, self._update, args=(gradient, scalars, *slots))

        tf.distribute.get_replica_context().merge_call(update, args=(gradients,))

    def _update(self, variable: Any, gradient: Any, scalars: Any, *slots: Any) -> None:
        rate, kernel_rate, epsilon = tf.unstack(tf.cast(scalars, variable.dtype))
        decay = self._config.weight_decay
        if decay and self._config.optimizer == "adamw":
            variable.assign_sub(rate * decay * variable)
        elif decay:
            gradient += decay * variable
        if self._adam:
            tf.raw_ops.ResourceApplyAdam(
                var=variable.handle,
                m=slots[0].handle,
                v=slots[1].handle,
                beta1_power=tf.zeros_like(rate),
                beta2_power=tf.zeros_like(rate),
                lr=kernel_rate,
                beta1=tf.constant(BETAS[0], rate.dtype),
                beta2=tf.constant(BETAS[1], rate.dtype),
                epsilon=epsilon,
                grad=gradient,
            )
        elif slots:
            tf.raw_ops.ResourceApplyMomentum(
                var=variable.handle,
                accum=slots[0].handle,
                lr=rate,
                grad=gradient,
                momentum=tf.constant(self._config.momentum, rate.dtype),
                use_nesterov=self._config.nesterov,
            )
        else:
            tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient)


class KerasTrainer:
    """The model under one strategy, with its optimizer."""

    def __init__(
        self, config: TrainConfig, strategy: KerasStrategy, maker: Maker, prepare: Preparation, classes: int
    ) -> None:
        self.entries: list[Entry] = list(maker.entries())
        self.variables = [e.variable for e in self.entries if e.trainable]
        self._distribution = strategy.distribution
        self.optimizer = Optimizer(config, self.variables, self._distribution)
        self._strategy, self._randomness, self._prepare = strategy, maker.randomness, prepare
        self._replicas = int(self._distribution.num_replicas_in_sync)
        self._classes = classes
        self._label_smoothing = config.label_smoothing
        self._statistics = [e.variable for e in self.entries if not e.trainable]
        self._statistics_differ = False
        self._seed = 0
        self._since_seed = 0
        self._traced_train = tf.function(self._train, autograph=False)
        self._traced_count = tf.function(self._count, autograph=False)

    def seed(self, seed: int) -> None:
        """Seed what dropout draws in the steps from now on."""
        self._seed, self._since_seed = seed, 0

    def train_step(self, batch: TfBatch) -> Any:
        """Run one step; returns the summed loss."""
        self._since_seed += 1
        self._statistics_differ = self._replicas > 1
        # Small enough that int64 does not overflow when dropout layers multiply it by their number.
        seed = np.array([self._seed >> 16, self._since_seed], np.int64)
        return self._traced_train(batch.pixels, batch.labels, tf.constant(self.optimizer.next_scalars()), seed)

    def count(self, batch: TfBatch) -> Any:
        """Return (samples, summed loss, then by class: correct, predicted and true labels), flat, in float64."""
        self.average_statistics()
        return self._traced_count(batch.pixels, batch.labels)

    def average_statistics(self) -> None:
        """Set the running statistics of all replicas to their mean; returns at once when nothing changed."""
        if self._statistics_differ:
            self._statistics_differ = False
            for variable in self._statistics:
                variable.assign(variable.read_value())

    def _train(self, pixels: Any, labels: Any, scalars: Any, seed: Any) -> Any:
        samples = int(labels.shape[0])

        def replica() -> Any:
            x, y, counts = self._part(pixels, labels)
            self._randomness.seed = seed
            weight = tf.constant(counts / samples, self._prepare.dtype)
            loss, gradients = self._strategy.backward(x, lambda logits: self._loss(logits, y), self.variables, weight)
            self.optimizer.apply(gradients, scalars)
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

    def set_model(self, weights: Mapping[str, np.ndarray]) -> None:
        """Load parameters and running statistics with torch's names and memory layout."""
        for entry in self.entries:
            entry.variable.assign(entry.from_torch(np.asarray(weights[entry.name])))

    def state_dict(self) -> dict[str, Any]:
        """Return the whole model and optimizer as arrays, with torch's names and memory layout."""
        self.average_statistics()
        learning = [e for e in self.entries if e.trainable]
        optimizer: dict[str, Any] = {"steps": self.optimizer.steps}
        for name, slots in self.optimizer.slots.items():
            optimizer[name] = {e.name: e.to_torch(s.numpy()) for e, s in zip(learning, slots, strict=True)}
        return {"model": {e.name: e.to_torch(_numpy(e.variable)) for e in self.entries}, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        self.set_model(state["model"])
        self.optimizer.steps = state["optimizer"]["steps"]
        learning = [e for e in self.entries if e.trainable]
        for name, slots in self.optimizer.slots.items():
            for entry, slot in zip(learning, slots, strict=True):
                slot.assign(entry.from_torch(state["optimizer"][name][entry.name]))


def _numpy(variable: Any) -> np.ndarray:
    return np.asarray(variable.read_value())
