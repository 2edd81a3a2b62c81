"""Cores that compute wrong results: a fault between PyTorch and the trainings of a burn-in.

    install({("local", 0): {2}, ("ssh", 1): None})

in a `sitecustomize.py` on PYTHONPATH makes core 0 of this machine wrong in its second repetition,
and core 1 of the host reached by ssh in all. The lowest bit of one element of `hidden` is wrong, in
step 2.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WRONG_CALL = 2  # of F.linear in a repetition: `hidden` and `output` of step 1 come before
FIRST = "first in step 2, output of hidden"


def install(faults: Mapping[tuple[str, int], set[int] | None]) -> None:
    """Patch torch in a process that trains; `faults`: (way to the host, core) -> repetitions."""
    if "hvdtrain.evidence.known_answer" not in sys.orig_argv:
        return
    way, core = "ssh" if "SSH_CONNECTION" in os.environ else "local", int(sys.orig_argv[-2])
    if (way, core) not in faults:
        return
    import torch

    repetitions, honest_seed = faults[way, core], torch.manual_seed
    honest_linear, at = torch.nn.functional.linear, {"repetition": 0, "call": 0}

    def seed(number: int) -> Any:
        at.update(repetition=at["repetition"] + 1, call=0)
        return honest_seed(number)

    def linear(*inputs: Any) -> Any:
        result = honest_linear(*inputs)
        if at["call"] == WRONG_CALL and (repetitions is None or at["repetition"] in repetitions):
            result.detach().view(torch.int32)[3, 5] ^= 1
        at["call"] += 1
        return result

    torch.manual_seed, torch.nn.functional.linear = seed, linear  # type: ignore[assignment]


def write_fault(folder: Path, faults: Mapping[tuple[str, int], set[int] | None]) -> None:
    """Write the file that Python reads at its start, if `folder` is on PYTHONPATH."""
    lines = f"from tests.parallel.bad_core import install\ninstall({faults!r})\n"
    (folder / "sitecustomize.py").write_text(lines)
