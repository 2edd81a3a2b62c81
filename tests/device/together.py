"""Experiments of two workers on the device, in one start: `python -m tests.device.together FOLDER`.

The runs are compared by `tests.device.alone FOLDER two_workers`, the messages by `MESSAGES`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from hvdtrain.topology import Topology
from tests.device.fake_gpu import let_train
from tests.device.fitting import FITTED, FITTING_BYTES, limited
from tests.device.models import small
from tests.device.running import DEVICES, PLAIN, SMALL, TASK, VIRTUAL

RANK = Topology.from_environment().rank  # outside of a job: 0
WEIGHTS = "on-a-gpu.pth"  # in the folder of the job, in which it runs
AUDITED = ["--audit-every=1", "--audit-parts=2"]
CHECKED = [*SMALL, "--max-steps=3", "--audit-compute=1"]
SYNC = [*SMALL, "--max-steps=3", "--sync-bn", "--trace-every=1", "--grad-accum-steps=2"]
PAIRS = {
    "plain": [*PLAIN, *AUDITED],
    "sync": SYNC,
    "compressed": [*SMALL, "--max-steps=3", "--compression=fp16", "--channels-last"],
}
EXPERIMENTS: dict[str, list[str]] = {
    "virtual": [*VIRTUAL, *AUDITED, "--audit=exact", "--audit-compute=1", "--micro-batch=auto"],
    **{f"{name}-{it}": [*own, f"--device={it}"] for name, own in PAIRS.items() for it in DEVICES},
    "resumed": [*PLAIN, *AUDITED, "--resume=auto"],
    "fitted": [*FITTED, "--sync-bn", "--micro-batch=auto"],
    "fitted-fixed": [*FITTED, "--sync-bn", "--grad-accum-steps=2"],
    "balanced": [*SMALL, "--max-steps=2", "--rank-weights=auto"],
    "lazy": [TASK, "--max-steps=2", "--global-batch-size=12", "--audit-compute=1"],
    "fp16": [TASK, "--max-steps=2", "--global-batch-size=12", "--amp=fp16", "--audit-compute=1"],
    "tuned": [*SMALL, "--max-steps=1", "--virtual-workers=2", f"--pretrained={WEIGHTS}"],
    "fault": CHECKED,
    "derivative": ["--model=tests.device.models:without_derivative", *SMALL[1:], "--max-steps=5"],
    "unlike": CHECKED,
    "shared": CHECKED,
    "mixed": CHECKED,
    "inexact": [*SMALL, "--max-steps=1", "--audit-every=1", "--audit=exact"],
}
# What the experiments that must fail say, on every rank.
MESSAGES = {
    "fault": "is wrong: its gradient is",
    "derivative": "the gradient of root is not finite at step 3 on ranks 0, 1",
    "unlike": "bits of this rank may differ from those of rank 0: device: Fast, compute",
    "shared": "ranks 0, 1 would share one GPU (same, CUDA_VISIBLE_DEVICES=not set)",
    "mixed": "--device: cpu here, and gpu on rank 0",
    "inexact": "the order of summation on gpu",
}
VARIABLES = {
    "unlike": {"FAKE_GPU_NAMES": "Fast,Slow"},
    "shared": {"FAKE_GPU_UUIDS": "same"},
}
FAULT = {"rank": 1, "when": "always", "layer": 1, "bits_down": 18}


@contextmanager
def prepared(folder: Path, compiled: Any, name: str) -> Iterator[None]:
    """Make what an experiment starts from, and undo it."""
    if name == "resumed" and RANK == 0:
        shutil.copytree(folder / "plain-cuda", folder / name)
        shutil.rmtree(folder / name / "checkpoints" / "step-00000004")
        (folder / name / "summary.json").unlink()
    if name == "mixed" and RANK == 1:
        compiled.set_device_count(0)
    with ExitStack() as stack:
        if name == "fault":
            from tests.campaigns.compute_trials import injected

            stack.enter_context(injected(name))
        stack.callback(compiled.set_device_count, 2)
        if name == "fitted" and RANK == 1:  # 480 samples fit on rank 0 alone
            stack.enter_context(limited(FITTING_BYTES))
        for variable, value in VARIABLES.get(name, {}).items():
            stack.enter_context(patch.dict(os.environ, {variable: value}))
        yield


def main(folder: Path) -> None:
    """Run all experiments."""
    from tests.parallel.shared import main as run

    compiled = let_train()
    if RANK == 0:
        (folder / "faults.json").write_text(json.dumps({"fault": FAULT}))
        torch.save(small((1, 8, 8), 10).to("gpu:0").state_dict(), folder / WEIGHTS)
    os.chdir(folder)
    run(lambda name: prepared(folder, compiled, name))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
