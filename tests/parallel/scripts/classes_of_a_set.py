"""A script that numbers its classes in the order of a set, which differs between processes."""

from __future__ import annotations

import sys

import torch
from torch.nn.functional import cross_entropy

import hvdtrain

NAMES = [f"class {number}" for number in range(20)]
CLASSES = list(set(NAMES))

torch.manual_seed(0)
samples = list(
    zip(torch.rand(60, 4), [CLASSES.index(NAMES[i % 20]) for i in range(60)], strict=True)
)
model = torch.nn.Linear(4, 20)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with hvdtrain.Loop(model, optimizer, samples, output=sys.argv[1], global_batch_size=10) as loop:
    for step in loop:
        for x, y in step.batches():
            step.backward(cross_entropy(model(x), y, reduction="sum"), len(y))
        step.update()
