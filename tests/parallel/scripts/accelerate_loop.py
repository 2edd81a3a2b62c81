"""A training loop in the style of Accelerate's examples; what the audit adds is marked.

hvdtrain launch -np 3 -- python -m tests.parallel.scripts.accelerate_loop
"""

from __future__ import annotations

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from hvdtrain import GradientAudit  # added

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
torch.manual_seed(42)
pixels, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(pixels[:1200] / 16), torch.tensor(labels[:1200]))
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
model, optimizer, loader = accelerator.prepare(
    model.double(), torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=60)
)
audit = GradientAudit(model, every=2)  # added

for x, y in loader:
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
    audit.check()  # added
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
print(f"accelerate, rank {accelerator.process_index}: {audit.summary()}")
weights = accelerator.unwrap_model(model).state_dict()
