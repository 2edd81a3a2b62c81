"""A training loop in the style of Horovod's own MNIST example; what the audit adds is marked.

horovodrun -np 2 python -m tests.parallel.scripts.horovod_loop [--clip | --clip-too-early] [--fault]
"""

from __future__ import annotations

import sys

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from hvdtrain import GradientAudit  # added

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
pixels, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size(), momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), op=hvd.Average
)
if "--fault" in sys.argv:  # an exchange that goes wrong on one rank, in the tenth step
    honest, calls = optimizer.synchronize, 0

    def faulty() -> None:
        global calls
        honest()
        calls += 1
        if calls == 10 and hvd.rank() == 1:
            model[2].weight.grad[3, 4] += 0.001

    optimizer.synchronize = faulty
audit = GradientAudit(model, optimizer, every=2)  # added

for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(data, batch_size=64, sampler=sampler):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        if "--clip-too-early" in sys.argv:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
        elif "--clip" in sys.argv:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
print(f"rank {hvd.rank()}: {audit.checked} checked, worst {audit.worst_error_over_bound:.2f}")
hvd.shutdown()
