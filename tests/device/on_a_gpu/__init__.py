"""Checks on a machine with an NVIDIA GPU: assembled on one with a network, run on one without."""
