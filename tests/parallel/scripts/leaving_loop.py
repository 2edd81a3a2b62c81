"""A script whose rank 0 alone leaves its training loop."""

from __future__ import annotations

import sys

import torch
from torch.nn.functional import cross_entropy

import hvdtrain

torch.manual_seed(0)
samples = hvdtrain.TensorSplit(torch.rand(60, 4), torch.arange(60) % 3)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with hvdtrain.Loop(model, optimizer, samples, output=sys.argv[1], global_batch_size=10) as loop:
    for step in loop:
        for x, y in step.batches():
            step.backward(cross_entropy(model(x), y, reduction="sum"), len(y))
        step.update()
        if step.number == 8 and loop.rank == 0:
            break
