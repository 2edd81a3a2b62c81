"""Loops of kinds that people bring, each compared with a plain loop of torch on one device.

python kinds_of_loops.py KIND; prints the largest relative difference of a parameter on each rank.
"""

import copy
import sys
from collections.abc import Callable

import torch
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import hvdtrain

SAMPLES, BATCH, EPOCHS = 23, 5, 2


class Repeated(torch.nn.Module):
    """A layer that is used three times; reentrant checkpoints make its gradient in three parts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, width)
        self.shared = torch.nn.Linear(width, width)
        self.last = torch.nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            x = checkpoint(lambda it: self.shared(it).tanh(), x, use_reentrant=True)
        return self.last(x)


KINDS: dict[str, Callable[[], torch.nn.Module]] = {
    "reentrant": lambda: Repeated(6),
    "reentrant, of a gradient that is sent alone": lambda: Repeated(400),
    "with a line of the former loop": lambda: torch.nn.Linear(3, 1),
}


def main(kind: str) -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(SAMPLES, 3).double(), torch.randn(SAMPLES, 1).double()
    model = KINDS[kind]().double()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), 0.05, momentum=0.9)
    order = hvdtrain.GlobalBatchSampler(SAMPLES, BATCH, seed=0)
    for epoch in range(EPOCHS):
        for numbers in order.global_batches(epoch * SAMPLES):
            batch = torch.from_numpy(numbers)
            optimizer.zero_grad()
            mse_loss(plain(inputs[batch]), targets[batch]).backward()
            optimizer.step()
    samples = torch.utils.data.TensorDataset(inputs, targets)
    own = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    options = {"global_batch_size": BATCH, "epochs": EPOCHS, "seed": 0, "audit_every": 1}
    with hvdtrain.Loop(model, own, samples, **options) as loop:
        for step in loop:
            for x, y in step.batches():
                step.backward(mse_loss(model(x), y, reduction="sum"), len(y))
            if kind == "with a line of the former loop":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            step.update()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    difference = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
    print(f"rank {loop.rank}: relative difference {difference:.3e}")


if __name__ == "__main__":
    main(sys.argv[1])
