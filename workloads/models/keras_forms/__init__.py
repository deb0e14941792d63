"""Models in Keras, layer for layer those of torch. Job side only: modules here import Keras."""
