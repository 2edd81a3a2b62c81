"""Cross-validation: a loop for each fold. Worker 1 kills itself once, in the second fold.

python folds.py; prints for each fold the steps of this process, and the run.
"""

import os
import signal
from pathlib import Path

import torch
from torch.nn.functional import mse_loss

import hvdtrain

inputs = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
for fold in range(3):
    kept = torch.arange(60) % 3 != fold
    torch.manual_seed(fold)
    model = torch.nn.Linear(3, 1)
    samples = torch.utils.data.TensorDataset(inputs[kept], inputs[kept].sum(1, keepdim=True) + fold)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    steps = []
    with hvdtrain.Loop(
        model, optimizer, samples, global_batch_size=10, epochs=2, checkpoint_interval=1
    ) as loop:
        for step in loop:
            steps.append(step.number)
            for x, y in step.batches():
                step.backward(mean=mse_loss(model(x), y), count=len(y))
            step.update()
            mark = Path("killed")
            if fold == 1 and step.number == 5 and loop.rank == 1 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    print(f"rank {loop.rank}: fold {fold}: {len(steps)} steps, {loop.folder}", flush=True)
