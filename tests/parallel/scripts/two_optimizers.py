"""A loop that trains two optimizers by one backward pass: Muon for matrices, AdamW for the rest.

Its data are iterated, and their length is not stated.
"""

import torch

import hvdtrain

torch.manual_seed(0)
inputs, targets = torch.randn(23, 4), torch.randn(23, 1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
matrices = [it for it in model.parameters() if it.ndim == 2]
others = [it for it in model.parameters() if it.ndim < 2]
optimizers = [torch.optim.Muon(matrices, 0.01), torch.optim.AdamW(others, 0.02)]
samples = hvdtrain.IterableSplit(torch.utils.data.TensorDataset(inputs, targets))
with hvdtrain.Loop(model, optimizers, samples, global_batch_size=5, max_steps=20) as loop:
    for step in loop:
        for x, y in step.batches():
            step.backward((model(x) - y).square().sum(), len(y))
        step.update()
