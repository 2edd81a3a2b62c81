"""A script with its own loop, two optimizers, one of which has a state at once, a frozen part that
is not saved, and sums of its own; `own_loop.py FOLDER PREFIX DEVICE ...` trains on each device.
"""

from __future__ import annotations

import sys

import torch

import hvdtrain
from hvdtrain import Sums
from hvdtrain.data import TensorSplit


def evaluate(model: torch.nn.ModuleDict, batch: list[torch.Tensor]) -> Sums:
    """Return the sums of a batch."""
    inputs, wanted = batch
    found = model["head"](model["base"](inputs)).squeeze(1)
    return Sums(((found - wanted) ** 2).sum(), len(wanted), {"bias": (found - wanted).sum()})


class Kept:
    """A further state to save: a tensor of the device."""

    def __init__(self) -> None:
        self.mean = torch.zeros(())

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.mean = state["mean"]


def main(device: str, experiment: str, output: str) -> None:
    """Train for two epochs."""
    torch.manual_seed(3)
    base = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8)).requires_grad_(False)
    head, scale = torch.nn.Linear(8, 1), torch.nn.Linear(1, 1)
    both = [torch.optim.Adagrad(head.parameters(), 0.1, initial_accumulator_value=0.5)]
    both.append(torch.optim.SGD(scale.parameters(), 0.01, momentum=0.9))
    kept = Kept()
    data = TensorSplit(torch.randn(46, 5), torch.randn(46))
    options = {"epochs": 2, "global_batch_size": 12, "trace_every": 1, "checkpoint_interval": 2}
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
            assert loop.mean(torch.ones((), device=loop.device), 1) == 1


if __name__ == "__main__":
    folder, prefix, *devices = sys.argv[1:]
    for name in devices:
        main(name, f"{prefix}{name}", folder)
