"""Modules that are added to `horovod/runner/util`: workers are started on other hosts by them."""
