"""Imported by the fork server of processes that read images: each of them finds it imported."""

from contextlib import suppress

from hvdtrain.data.builtin import import_torchvision
from hvdtrain.errors import PreflightError

with suppress(PreflightError, ImportError):  # a reader says so, for whoever waits for its batch
    import_torchvision()
    import torchvision.transforms.v2  # noqa: F401
