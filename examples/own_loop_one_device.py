"""Handwritten digits, learned by a small network in a training loop of one's own.

own_loop_one_device.py is for one device, own_loop.py for any number; see the difference by
diff examples/own_loop_one_device.py examples/own_loop.py
"""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH_SIZE = 3, 100

torch.manual_seed(0)
pixels, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(pixels / 16), torch.tensor(labels))
loader = DataLoader(data, BATCH_SIZE, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
model.double()  # so that runs on 1 and on 3 workers can be compared to 1e-9
criterion = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, EPOCHS * len(loader))

for _epoch in range(EPOCHS):
    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

x, y = data.tensors
print(f"final loss {criterion(model(x), y):.12f}")
