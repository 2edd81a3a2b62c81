"""Devices for a burn-in on a machine without GPUs: the CPU, several times, with a fault.

    install(2, {1: {2}})

in a `sitecustomize.py` on PYTHONPATH makes torch find two devices, of which the second computes
wrong products of matrices in its second repetition. The lowest bit of one element is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

FIRST = "first in product 20 in float32"


def install(count: int, faults: Mapping[int, set[int]]) -> None:
    """Patch hvdtrain in a process that burns in a device; `faults`: device -> repetitions."""
    if "hvdtrain.evidence.burn_in_device" not in sys.orig_argv:
        return
    import torch

    from hvdtrain.evidence import known_answer
    from hvdtrain.exchange import gpus

    gpus.find_devices = lambda: [torch.device("cpu")] * count
    arguments = sys.orig_argv[sys.orig_argv.index("hvdtrain.evidence.burn_in_device") + 1 :]
    repetitions = faults.get(int(arguments[2]), set()) if len(arguments) > 2 else set[int]()
    honest, honest_train, done = known_answer.digest_of, known_answer.train, [0]

    def train(device: torch.device) -> dict[str, str]:
        done[0] += 1
        return honest_train(device)

    def digest_of(tensor: torch.Tensor) -> str:
        if done[0] in repetitions and tensor.dtype == torch.int64 and tensor.dim() == 1:
            tensor[3] ^= 1
        return honest(tensor)

    known_answer.train, known_answer.digest_of = train, digest_of


def write_devices(folder: Path, count: int, faults: Mapping[int, set[int]]) -> None:
    """Write the file that Python reads at its start, if `folder` is on PYTHONPATH."""
    lines = f"from tests.parallel.bad_device import install\ninstall({count}, {faults!r})\n"
    (folder / "sitecustomize.py").write_text(lines)
