"""Keras layers that compute the same as torch's layers of the same name, with torch's names of parameters.

TensorFlow keeps channels last and torch first, so loading and saving transpose weights; a step does not.
Keras' defaults differ from torch's in the padding of strided convolutions and in batch norm's constants and variance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

BATCH_NORM_MOMENTUM, BATCH_NORM_EPSILON = 0.1, 1e-5
"""torch's defaults; the momentum is the weight of the newest batch in running statistics."""

Transpose = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One parameter or running statistic of a model."""

    name: str
    """torch's name."""
    variable: Any
    trainable: bool
    to_torch: Transpose = lambda array: array
    from_torch: Transpose = lambda array: array


class Randomness:
    """Seed of dropout for each step, so that a resumed run draws the same numbers as an uninterrupted one."""

    def __init__(self) -> None:
        self.seed: Any = None
        """(2,) int64; the code that traces a step sets it."""


class Maker:
    """Makes the layers of one model under Keras' global precision policy, and lists those with parameters.

    ``dropout`` is the rate of every dropout layer; None keeps the model's own.
    """

    def __init__(self, *, dropout: float | None, freeze_batch_norm: bool) -> None:
        self.randomness = Randomness()
        self._dropout = dropout
        self._freeze = freeze_batch_norm
        self._leaves: list[tuple[str, Any]] = []
        self._dropouts = 0

    def entries(self) -> Iterator[Entry]:
        """Yield every parameter and running statistic in the order of the layers, which must have been built."""
        for name, layer in self._leaves:
            yield from layer.entries(name)

    def _register(self, name: str, layer: Any) -> Any:
        self._leaves.append((name, layer))
        return layer

    def convolution(
        self, name: str, filters: int, kernel: int, *, stride: int = 1, padding: int = 0, bias: bool = True
    ) -> Any:
        """``nn.Conv2d``: equal padding on all sides; with a stride TensorFlow's "same" pads less on top and left."""
        layer = Convolution(filters, kernel, strides=stride, padding="valid", use_bias=bias, name=name)
        layer.margin = padding
        return self._register(name, layer)

    def linear(self, name: str, units: int, *, flattened: tuple[int, int, int] | None = None) -> Any:
        """``nn.Linear``.

        Args:
            flattened: (channels, height, width) that a Flatten layer before it flattens; torch flattens in this order.
        """
        layer = Linear(units, name=name)
        layer.flattened = flattened
        return self._register(name, layer)

    def batch_norm(self, name: str) -> Any:
        """``nn.BatchNorm2d``, or ``1d`` after a linear layer."""
        return self._register(name, BatchNorm(frozen=self._freeze, name=name))

    def dropout(self, rate: float) -> Any:
        """``nn.Dropout``."""
        self._dropouts += 1
        return Dropout(rate if self._dropout is None else self._dropout, self.randomness, self._dropouts)

    def max_pool(self, size: int, *, stride: int, padding: int = 0) -> Any:
        """``nn.MaxPool2d`` for non-negative values, whose maximum zero padding does not change."""
        layers = [keras.layers.ZeroPadding2D(padding)] if padding else []
        layers.append(keras.layers.MaxPooling2D(size, strides=stride, padding="valid"))
        return keras.Sequential(layers) if padding else layers[0]


class Convolution(keras.layers.Conv2D):  # type: ignore[misc]
    """See :meth:`Maker.convolution`."""

    margin = 0

    def call(self, x: Any) -> Any:
        sides = [self.margin, self.margin]
        return super().call(tf.pad(x, [[0, 0], sides, sides, [0, 0]]) if self.margin else x)

    def compute_output_shape(self, shape: Sequence[int | None]) -> Any:
        batch, height, width, channels = shape
        wider = [None if side is None else side + 2 * self.margin for side in (height, width)]
        return super().compute_output_shape((batch, *wider, channels))

    def entries(self, name: str) -> Iterator[Entry]:
        to_torch, from_torch = (lambda array, axes=axes: array.transpose(axes) for axes in ((3, 2, 0, 1), (2, 3, 1, 0)))
        yield Entry(f"{name}.weight", self.kernel.value, True, to_torch, from_torch)
        if self.use_bias:
            yield Entry(f"{name}.bias", self.bias.value, True)


class Linear(keras.layers.Dense):  # type: ignore[misc]
    """See :meth:`Maker.linear`."""

    flattened: tuple[int, int, int] | None = None

    def entries(self, name: str) -> Iterator[Entry]:
        channels, height, width = self.flattened or (1, 1, self.kernel.shape[0])
        units = self.units

        def to_torch(kernel: np.ndarray) -> np.ndarray:
            return kernel.reshape(height, width, channels, units).transpose(3, 2, 0, 1).reshape(units, -1)

        def from_torch(weight: np.ndarray) -> np.ndarray:
            return weight.reshape(units, channels, height, width).transpose(2, 3, 1, 0).reshape(-1, units)

        yield Entry(f"{name}.weight", self.kernel.value, True, to_torch, from_torch)
        yield Entry(f"{name}.bias", self.bias.value, True)


class BatchNorm(keras.layers.Layer):  # type: ignore[misc]
    """Normalizes over all but the last axis; each replica keeps its own running statistics.

    The running variance is unbiased, as in torch; Keras' BatchNormalization keeps the biased one and averages it over
    replicas in every step.
    """

    def __init__(self, *, frozen: bool, **more: Any) -> None:
        super().__init__(**more)
        self.frozen = frozen

    def build(self, shape: Sequence[int | None]) -> None:
        size = (shape[-1],)
        self.gamma = self.add_weight(shape=size, initializer="ones", name="gamma", autocast=False)
        self.beta = self.add_weight(shape=size, initializer="zeros", name="beta", autocast=False)
        own = {
            "trainable": False,
            "synchronization": tf.VariableSynchronization.ON_READ,
            "aggregation": tf.VariableAggregation.MEAN,
        }
        with tf.init_scope():  # Keras may build inside a traced function to infer shapes
            self.running_mean = tf.Variable(tf.zeros(size, self.variable_dtype), **own)
            self.running_var = tf.Variable(tf.ones(size, self.variable_dtype), **own)

    def call(self, x: Any, training: bool = False) -> Any:
        if not training or self.frozen:
            return self._normalize(x, self.running_mean.value(), self.running_var.value())
        return self._fused(x) if self.variable_dtype == "float32" else self._plain(x)

    def compute_output_shape(self, shape: Sequence[int | None]) -> Any:
        return shape

    def entries(self, name: str) -> Iterator[Entry]:
        yield Entry(f"{name}.weight", self.gamma.value, True)
        yield Entry(f"{name}.bias", self.beta.value, True)
        yield Entry(f"{name}.running_mean", self.running_mean, False)
        yield Entry(f"{name}.running_var", self.running_var, False)

    def _fused(self, x: Any) -> Any:
        """One fused kernel, which requires float32 statistics."""
        nothing = tf.constant([], tf.float32)
        image = x if len(x.shape) == 4 else x[:, None, None, :]
        answer = tf.raw_ops.FusedBatchNormV3(
            x=image,
            scale=self.gamma.value,
            offset=self.beta.value,
            mean=nothing,
            variance=nothing,
            epsilon=BATCH_NORM_EPSILON,
            is_training=True,
        )
        self._update_running(answer.batch_mean, answer.batch_variance)  # FusedBatchNormV3 returns the unbiased variance
        return answer.y if len(x.shape) == 4 else answer.y[:, 0, 0, :]

    def _plain(self, x: Any) -> Any:
        axes = list(range(len(x.shape) - 1))
        mean, variance = tf.nn.moments(x, axes)
        count = tf.cast(tf.size(x) / x.shape[-1], x.dtype)
        self._update_running(mean, variance * count / (count - 1))
        return self._normalize(x, mean, variance)

    def _normalize(self, x: Any, mean: Any, variance: Any) -> Any:
        scale = self.gamma.value * tf.math.rsqrt(variance + BATCH_NORM_EPSILON)
        shift = self.beta.value - mean * scale
        return tf.cast(tf.cast(x, scale.dtype) * scale + shift, x.dtype)

    def _update_running(self, mean: Any, variance: Any) -> None:
        for running, newest in ((self.running_mean, mean), (self.running_var, variance)):
            running.assign_sub(BATCH_NORM_MOMENTUM * (running.value() - newest))


class Dropout(keras.layers.Layer):  # type: ignore[misc]
    """Draws by the step's seed, its position in the model and the replica."""

    def __init__(self, rate: float, randomness: Randomness, position: int, **more: Any) -> None:
        super().__init__(**more)
        self._rate = rate
        self._randomness = randomness
        self._position = position

    def call(self, x: Any, training: bool = False) -> Any:
        if not training or not self._rate:
            return x
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        own = tf.stack([tf.cast(replica, tf.int64), tf.constant(self._position, tf.int64)])
        return tf.nn.experimental.stateless_dropout(x, self._rate, seed=self._randomness.seed * 4096 + own)

    def compute_output_shape(self, shape: Sequence[int | None]) -> Any:
        return shape


class AdaptiveAveragePool(keras.layers.Layer):  # type: ignore[misc]
    """``nn.AdaptiveAvgPool2d``: means over windows that cover an image of any size."""

    def __init__(self, size: int, **more: Any) -> None:
        super().__init__(**more)
        self._size = size

    def call(self, x: Any) -> Any:
        down, across = (tf.constant(_windows(side, self._size), x.dtype) for side in x.shape[1:3])
        return tf.einsum("oh,bhwc,pw->bopc", down, x, across)

    def compute_output_shape(self, shape: Sequence[int | None]) -> Any:
        return (shape[0], self._size, self._size, shape[3])


def _windows(inputs: int, outputs: int) -> np.ndarray:
    """Return (outputs, inputs) weights of each input in each mean."""
    weights = np.zeros((outputs, inputs))
    for output in range(outputs):
        start, end = output * inputs // outputs, -(-(output + 1) * inputs // outputs)
        weights[output, start:end] = 1 / (end - start)
    return weights
