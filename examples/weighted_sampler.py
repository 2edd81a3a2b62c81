"""Digits of which some are rare, drawn by a weighted sampler, in a training loop of one's own.

python weighted_sampler.py [batches]: with `batches`, a batch sampler of one's own instead, whose
global batches have 8 to 40 samples.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import hvdtrain

EPOCHS, BATCH_SIZE = 2, 50


class Growing:
    """Batches of 8, 16, 24, 32 and 40 samples of a random order, in a random order."""

    def __iter__(self):
        parts = torch.randperm(600).split([8, 16, 24, 32, 40] * 5)
        return iter([parts[number].tolist() for number in torch.randperm(len(parts))])


torch.manual_seed(0)
pixels, labels = load_digits(return_X_y=True)
kept = (labels > 2) | (labels == 2) & (pixels[:, 20] > 12)  # few of the digit 2
x, y = torch.tensor(pixels[kept] / 16), torch.tensor(labels[kept])
weights = (1 / torch.bincount(y).clamp(min=1))[y]
data = TensorDataset(x, y)
if sys.argv[1:] == ["batches"]:
    loader = DataLoader(data, batch_sampler=Growing())
else:
    loader = DataLoader(data, BATCH_SIZE, sampler=WeightedRandomSampler(weights, 620))
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Dropout(0.1), torch.nn.ReLU())
model.append(torch.nn.Linear(32, 10))
criterion = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.double().parameters(), 0.01)

with hvdtrain.Loop(model, optimizer, loader, epochs=EPOCHS) as loop:
    for step in loop:
        for x, y in step.batches():
            step.backward(mean=criterion(model(x), y), count=len(y))
        step.update()

x, y = data.tensors
print(f"final loss {criterion(model.eval()(x), y):.12f}")
