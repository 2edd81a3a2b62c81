"""Loops of kinds that people bring, each compared with a plain loop of torch on one device.

python kinds_of_loops.py [OPTIONS]; prints the largest relative difference of a parameter for each
kind, on each rank. OPTIONS: of every loop, as JSON. Further arguments: the kinds, instead of all.
"""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint

import hvdtrain

SAMPLES, BATCH, EPOCHS = 23, 5, 2


class Repeated(torch.nn.Module):
    """A layer that is used three times; reentrant checkpoints make its gradient in three parts."""

    def __init__(self, width: int, reentrant: bool = True) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = torch.nn.Linear(3, width)
        self.shared = torch.nn.Linear(width, width)
        self.last = torch.nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            x = checkpoint(lambda it: self.shared(it).tanh(), x, use_reentrant=self.reentrant)
        return self.last(x)


class Mixed(torch.nn.Module):
    """A layer of float64 after one of bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 4, dtype=torch.bfloat16)
        self.last = torch.nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x.bfloat16()).tanh().double())


class Spectral(torch.nn.Module):
    """A filter of complex numbers, as Fourier neural operators have; its gradient is conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = torch.nn.Parameter(torch.randn(4, 300, dtype=torch.cdouble) / 10)
        self.last = torch.nn.Linear(300, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.fft(x, n=4)
        return self.last((spectrum @ self.filter.conj()).abs())


class Noted(torch.nn.Module):
    """A layer with a sparse buffer and with state that is no tensor."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        mixing = torch.tensor([[0.5, 0.0, 0.0], [0.0, 0.0, 2.0], [0.0, 1.0, 0.0]])
        mixing = mixing.double()
        sparse = mixing.to_sparse() if layout is torch.sparse_coo else mixing.to_sparse_csr()
        self.register_buffer("mixing", sparse)
        self.recipe: dict[str, Any] = {"steps": 3, "name": "delayed"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer((self.mixing @ x.T).T)

    def get_extra_state(self) -> dict[str, Any]:
        return self.recipe

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.recipe = state


class Activated(torch.nn.BatchNorm2d):
    """A layer that does more than to normalise, as those of timm."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input).relu()


class Viewed(torch.nn.Module):
    """A network that cannot take a batch without samples."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(1, 4, (1, 2))
        self.layer = layer
        self.last = torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.first(x[:, None, None]))
        return self.last(x.view(x.size(0), -1))


class HalfFrozen(torch.nn.Sequential):
    """A network whose first layer is unfrozen after an epoch."""

    def __init__(self, is_added: bool) -> None:
        super().__init__(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        self[0].requires_grad_(False)
        self.is_added = is_added  # to the optimizer, too, after an epoch

    def optimized(self) -> Iterator[torch.nn.Parameter]:
        return (self[2] if self.is_added else self).parameters()

    def thaw(self, optimizer: torch.optim.Optimizer) -> None:
        self[0].requires_grad_(True)
        if self.is_added:
            optimizer.add_param_group({"params": list(self[0].parameters()), "lr": 0.02})


class Compared(torch.nn.Module):
    """Two networks whose features of a sample are to be alike, and unlike those of all others."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
        self.scale = torch.nn.Parameter(torch.tensor(1.3))

    def loss(
        self,
        x: torch.Tensor,
        gather: Callable[[torch.Tensor], torch.Tensor] = lambda it: it,
        first: int = 0,
    ) -> torch.Tensor:
        """Return the sum of the losses of these samples, which begin at number `first` of all."""
        one, other = self.one(x).tanh(), self.other(x).tanh()
        numbers = first + torch.arange(len(x))
        to_others = self.scale * one @ gather(other).T
        to_ones = self.scale * other @ gather(one).T
        return sum(cross_entropy(it, numbers, reduction="sum") for it in (to_others, to_ones))


FORMER = "with a line of the former loop"
KINDS: dict[str, Callable[[], torch.nn.Module]] = {
    "reentrant": lambda: Repeated(6).double(),
    "reentrant, of a gradient that is sent alone": lambda: Repeated(400).double(),
    "not reentrant": lambda: Repeated(6, reentrant=False).double(),
    "bfloat16 before float64": Mixed,
    "complex": lambda: Spectral().double(),
    "sparse": lambda: Noted(torch.sparse_coo).double(),
    "sparse rows": lambda: Noted(torch.sparse_csr).double(),
    "unfrozen later": lambda: HalfFrozen(False).double(),
    "added later": lambda: HalfFrozen(True).double(),
    "contrastive": lambda: Compared().double(),
    # These need sync_bn.
    "activated batch norm": lambda: Viewed(Activated(4)).double(),
    "batch norm of SyncBatchNorm": lambda: Viewed(torch.nn.SyncBatchNorm(4)).double(),
    "penalty": lambda: Viewed(torch.nn.Sequential(Activated(4), torch.nn.Tanh())).double(),
    FORMER: lambda: torch.nn.Linear(3, 1).double(),
}


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    own = model.optimized() if isinstance(model, HalfFrozen) else model.parameters()
    return torch.optim.SGD(own, 0.05, momentum=0.9)


def total_loss(kind: str, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses; a gradient penalty has second derivatives."""
    if isinstance(model, Compared):
        return model.loss(x)
    if kind != "penalty":
        return mse_loss(model(x), y, reduction="sum")
    x = x.clone().requires_grad_()
    outputs = model(x)
    (gradient,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    return (outputs - y).square().sum() + (gradient.norm(dim=1) - 1).square().sum()


def compare(kind: str, options: dict[str, Any]) -> tuple[int, float]:
    """Train both; return the rank and the largest relative difference of a parameter."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(SAMPLES, 3).double(), torch.randn(SAMPLES, 1).double()
    torch.manual_seed(0)
    model = KINDS[kind]()
    torch.manual_seed(0)
    plain = KINDS[kind]()  # not a copy: torch copies no sparse rows
    optimizer = optimizer_of(plain)
    order = hvdtrain.GlobalBatchSampler(SAMPLES, BATCH, seed=0)
    for epoch in range(EPOCHS):
        if epoch == 1 and isinstance(plain, HalfFrozen):
            plain.thaw(optimizer)
        for numbers in order.global_batches(epoch * SAMPLES):
            batch = torch.from_numpy(numbers)
            optimizer.zero_grad()
            total = total_loss(kind, plain, inputs[batch], targets[batch])
            (total / len(batch)).backward()
            optimizer.step()
    samples = torch.utils.data.TensorDataset(inputs, targets)
    own = optimizer_of(model)
    given = {"global_batch_size": BATCH, "epochs": EPOCHS, "seed": 0, "audit_every": 1} | options
    given["gathers"] = isinstance(model, Compared)
    with hvdtrain.Loop(model, own, samples, **given) as loop:
        for step in loop:
            if step.begins_epoch and step.epoch == 1 and isinstance(model, HalfFrozen):
                model.thaw(own)
            for x, y in step.batches():
                if isinstance(model, Compared):
                    total = model.loss(x, loop.all_gather, step.offset)
                else:
                    total = total_loss(kind, model, x, y)
                step.backward(sum=total, count=len(y))
            if kind == FORMER:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            step.update()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    each = (float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in pairs)
    return loop.rank, max(each)


def main(options: str = "{}", *kinds: str) -> None:
    for kind in kinds or [it for it in KINDS if it != FORMER]:
        rank, difference = compare(kind, json.loads(options))
        print(f"rank {rank}: {kind}: relative difference {difference:.3e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
