"""torch's optimizers in TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from workloads.contract import TrainConfig

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
