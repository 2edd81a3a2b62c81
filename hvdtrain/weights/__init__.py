"""Weights in files: reading, removal of wrappers' prefixes, loading into a model."""

from hvdtrain.weights.loading import describe_removed, load_pretrained
from hvdtrain.weights.reading import Weights, clean_names, find_weights, read_weights

__all__ = [
    "Weights",
    "clean_names",
    "describe_removed",
    "find_weights",
    "load_pretrained",
    "read_weights",
]
