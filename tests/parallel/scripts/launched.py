"""A Horovod script as people have them, without hvdtrain. An argument makes it fail."""

import os
import sys
import time

import horovod.torch as hvd
import torch

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(10, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
print("environment", os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"])
for step in range(20):
    inputs = torch.randn(16, 10)
    optimizer.zero_grad()
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
    loss.backward()
    optimizer.step()
    if step == 10 and hvd.rank() == 1:
        if "fail" in sys.argv:
            sys.exit(7)
        if "leave" in sys.argv:
            sys.exit(0)
        if "hang" in sys.argv:
            time.sleep(1000)
print(f"loss {loss.item():.3f} on rank {hvd.rank()}")
