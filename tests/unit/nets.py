"""A network that tests of weights save and load."""

from __future__ import annotations

import torch
from torch import nn


class Net(nn.Module):
    """A part in a list, batch norm, a head; names that hold "module" without being wrappers."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
        self.submodule = nn.Linear(5, 5, bias=False)
        self.module_list = nn.ModuleList([nn.Linear(5, 5)])
        self.fc = nn.Linear(5, classes)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.fc(self.module_list[0](self.submodule(self.features(values))))


def net(classes: int = 3, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(classes)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
