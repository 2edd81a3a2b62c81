"""One experiment on any number of workers: running it, and comparing what was learned."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.parallel.launching import Finished, horovodrun, hvdtrain, run

Weights = dict[str, torch.Tensor]


def train(
    flags: list[str],
    folder: Path,
    size: int,
    controller: str,
    timeout_s: float = 300,
    variables: dict[str, str] | None = None,
    hosts: str = "",
) -> Finished:
    """Train into `folder` on `size` workers; a single one runs by itself. `hosts`: as in -H."""
    command = hvdtrain("train", *flags, "--output", str(folder.parent), "--experiment", folder.name)
    if size == 1:
        return run(command, timeout_s, variables=variables)
    options = {"timeout_s": timeout_s, "variables": variables}
    return horovodrun(size, controller, command, hosts, **options)


def summary_and_weights(folder: Path) -> tuple[dict, Weights]:
    """What a finished run left."""
    summary = json.loads((folder / "summary.json").read_text())
    last = (folder / "checkpoints" / "last").read_text().strip()
    return summary, load_file(folder / "checkpoints" / last / "model.safetensors")


def largest_difference(weights: Weights, expected: Weights) -> float:
    """max |difference| / max |w| over all tensors that are not constant zero."""
    worst = 0.0
    for name, weight in expected.items():
        scale = weight.abs().max().item()
        error = (weights[name] - weight).abs().max().item()
        worst = max(worst, error / scale if scale else error)
    return worst
