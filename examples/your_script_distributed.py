"""Handwritten digits, learned by a small network in a training loop of one's own.

your_script.py is for one device, your_script_distributed.py for any number; see the difference by
diff examples/your_script.py examples/your_script_distributed.py
"""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import hvdtrain

EPOCHS, BATCH_SIZE = 3, 100

workers = hvdtrain.init()
torch.manual_seed(0)
pixels, labels = load_digits(return_X_y=True)
x, y = torch.tensor(pixels / 16), torch.tensor(labels)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
model.double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvdtrain.distribute(model, optimizer)
audit = hvdtrain.GradientAudit(model, optimizer, every=10)
shares = hvdtrain.Shares(workers.size)

for epoch in range(EPOCHS):
    order = np.random.default_rng([0, epoch]).permutation(len(y))
    for batch in np.split(order, range(BATCH_SIZE, len(y), BATCH_SIZE)):
        share = shares.of(batch, workers.rank)
        optimizer.zero_grad()
        loss = cross_entropy(model(x[share]), y[share], reduction="sum") * workers.size / len(batch)
        loss.backward()
        hvdtrain.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()

if workers.rank == 0:
    print(f"final loss {cross_entropy(model(x), y):.12f}\n{audit.summary()}")
