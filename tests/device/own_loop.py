"""A script with its own loop, two optimizers, one of which has a state at once, a frozen part that
is not saved, and sums of its own; `own_loop.py FOLDER PREFIX DEVICE ...` trains on each device.
"""

from __future__ import annotations

import json
import sys

import torch

import hvdtrain
from hvdtrain import Sums
from hvdtrain.data import TensorSplit
from hvdtrain.tensors import params_sha256


def evaluate(model: torch.nn.ModuleDict, batch: list[torch.Tensor]) -> Sums:
    """Return the sums of a batch."""
    inputs, wanted = batch
    found = model["head"](model["base"](inputs)).squeeze(1)
    return Sums(((found - wanted) ** 2).sum(), len(wanted), {"bias": (found - wanted).sum()})


class Kept:
    """A further state to save: a tensor of the device."""

    def __init__(self) -> None:
        self.mean = torch.zeros(())

    def state_dict(self) -> dict[str, list[torch.Tensor]]:
        return {"means": [self.mean]}

    def load_state_dict(self, state: dict[str, list[torch.Tensor]]) -> None:
        (self.mean,) = state["means"]


def main(device: str, experiment: str, output: str) -> None:
    """Train for two epochs."""
    torch.manual_seed(3)
    base = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8)).requires_grad_(False)
    head, scale = torch.nn.Linear(8, 1), torch.nn.Linear(1, 1)
    both = [torch.optim.Adagrad(head.parameters(), 0.1, initial_accumulator_value=0.5)]
    both.append(torch.optim.SGD(scale.parameters(), 0.01, momentum=0.9))
    # Of another type than the parameter: it stays so, on the device.
    both[1].state[scale.weight]["note"] = torch.ones(2, dtype=torch.float64)
    kept = Kept()
    data = TensorSplit(torch.randn(46, 5), torch.randn(46))
    options = {"epochs": 2, "global_batch_size": 12, "trace_every": 1, "checkpoint_interval": 2}
    options["model_ema"] = True
    with hvdtrain.Loop(
        {"base": base, "head": head, "scale": scale},
        both,
        data,
        data,
        evaluate,
        metrics=["bias"],
        state=[kept],
        save_frozen=False,
        device=device,
        experiment=experiment,
        output=output,
        **options,
    ) as loop:
        for step in loop:
            for optimizer in both:
                for inputs, wanted in step.batches(optimizer):
                    with loop.autocast():
                        found = scale(head(base(inputs))).squeeze(1)
                    kept.mean = found.detach().mean()
                    step.backward(((found - wanted) ** 2).sum(), len(wanted))
                step.update()
            for optimizer in both:
                held = [it for state in optimizer.state.values() for it in state.values()]
                assert all(it.device == loop.device for it in held if it is not None and it.dim())
            assert loop.mean(torch.ones((), device=loop.device), 1) == 1
        folder, rank = loop.folder, loop.rank
    if rank == 0:  # the models have what is saved: the average of all workers
        found = params_sha256(torch.nn.ModuleDict({"base": base, "head": head, "scale": scale}))
        assert found == json.loads((folder / "summary.json").read_text())["params_sha256"]


if __name__ == "__main__":
    folder, prefix, *devices = sys.argv[1:]
    for name in devices:
        main(name, f"{prefix}{name}", folder)
