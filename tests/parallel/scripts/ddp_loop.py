"""A training loop in the style of torch's DDP tutorial; what the audit adds is marked.

torchrun --nproc-per-node 2 -m tests.parallel.scripts.ddp_loop [--accumulate] [--fault]
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from hvdtrain import GradientAudit  # added

dist.init_process_group("gloo")
torch.manual_seed(42)
torch.set_num_threads(1)
pixels, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
sampler = DistributedSampler(data)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
ddp_model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp_model.parameters(), lr=0.001)
audit = GradientAudit(ddp_model, every=2)  # added

step = 0
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(data, batch_size=64, sampler=sampler):
        step += 1
        optimizer.zero_grad()
        parts = 2 if "--accumulate" in sys.argv else 1
        for number, (x, y) in enumerate(
            zip(inputs.chunk(parts), targets.chunk(parts), strict=True)
        ):
            last = number == parts - 1
            with nullcontext() if last else ddp_model.no_sync():
                torch.nn.functional.cross_entropy(ddp_model(x), y).backward()
        if "--fault" in sys.argv and step == 10:  # every rank gets the same wrong element
            model[2].weight.grad[3, 4] += 0.001
        audit.check()  # added
        torch.nn.utils.clip_grad_norm_(ddp_model.parameters(), 0.01)
        optimizer.step()
print(f"rank {dist.get_rank()}: {audit.checked} checked, worst {audit.worst_error_over_bound:.2f}")
time.sleep(0.2)  # lets Gloo's threads free the last exchange: docs/migrating.md
dist.destroy_process_group()
