"""Models in Keras, layer for layer those of torch. The modules here import Keras."""
