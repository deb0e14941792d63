"""Models in Keras, layer for layer those of torch. The other modules here import Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def keras_form(name: str) -> Callable[..., list[Any]]:
    """Return a function of ``architectures`` that imports Keras when it is called, since declarations must not."""

    def make_layers(*arguments: Any) -> list[Any]:
        from workloads.models.keras_forms import architectures

        layers: list[Any] = getattr(architectures, name)(*arguments)
        return layers

    return make_layers
