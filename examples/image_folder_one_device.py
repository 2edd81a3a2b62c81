"""Images in a folder for each class, of which one is rare: a weighted sampler, AdamW, a moving
average of the weights, AUC and early stopping, by torch alone.

python image_folder_one_device.py FOLDER, which has train/CLASS/*.png and valid/CLASS/*.png.
image_folder.py learns the same on any number of workers; see the difference by
diff examples/image_folder_one_device.py examples/image_folder.py
"""

import sys

import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, WeightedRandomSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

EPOCHS, BATCH_SIZE, PATIENCE = 30, 16, 3


class Balanced(WeightedRandomSampler):
    """Classes equally often, in an order that depends on the epoch alone."""

    def set_epoch(self, epoch):
        self.generator.manual_seed(epoch)


def validate(model):
    model.eval()
    total, chances, labels = 0.0, [], []
    with torch.no_grad():
        for x, y in valid_loader:
            scores = model(x)
            total += cross_entropy(scores, y, reduction="sum").item()
            chances.append(scores.softmax(1)[:, 1])
            labels.append(y)
    return total / len(valid), roc_auc_score(torch.cat(labels), torch.cat(chances))


torch.manual_seed(0)
form = v2.Compose([v2.ToImage(), v2.Resize((24, 24)), v2.ToDtype(torch.float64, scale=True)])
train, valid = (ImageFolder(f"{sys.argv[1]}/{part}", form) for part in ("train", "valid"))
labels = torch.tensor(train.targets)
weights = (1 / torch.bincount(labels))[labels]
sampler = Balanced(weights, len(train), generator=torch.Generator())
loader = DataLoader(train, BATCH_SIZE, sampler=sampler)
valid_loader = DataLoader(valid, BATCH_SIZE)
model = nn.Sequential(
    *(nn.Conv2d(3, 8, 3, 2, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
    *(nn.Conv2d(8, 16, 3, 2, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
    *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2)),
)
model.double()  # so that runs on 1 and on 3 workers can be compared to 1e-9
optimizer = torch.optim.AdamW(model.parameters(), 0.003)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

best, waited = 0.0, 0
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    loss, auc = validate(average)
    print(f"epoch {epoch}: loss {loss:.12f}, AUC {auc:.12f}")
    if auc > best:
        best, waited = auc, 0
        torch.save(average.module.state_dict(), "best.pt")
    else:
        waited += 1
    if waited == PATIENCE:
        break
