"""The checks of one process in a forked process that has torch and the device already: the start
of Python and torch takes longer than most checks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np  # noqa: F401
import PIL.Image  # noqa: F401
import pytest  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch._dynamo
import torch.utils.tensorboard  # noqa: F401

from tests.device import fake_gpu

KEPT = ("tests", "tests.device", fake_gpu.__name__, "tests.device.build", __name__)

fake_gpu.register()


def run_alone(package: Path, runs: Path, printed: Path, names: list[str]) -> None:
    """Run `tests.device.alone` with the package in the folder `package`; exit with its code."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("hvdtrain", "tests") and name not in KEPT:
            del sys.modules[name]
    with printed.open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    os.chdir(package)
    sys.path.insert(0, str(package))
    from tests.device.alone import main

    failures = main(runs, names, first=True)
    sys.stdout.flush()
    os._exit(min(failures, 1))
