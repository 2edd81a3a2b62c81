"""Images in a folder for each class, of which one is rare: a weighted sampler, AdamW, a moving
average of the weights, AUC and early stopping, on any number of workers.

hvdtrain launch -np 2 -- python image_folder.py FOLDER, which has train/CLASS/*.png and
valid/CLASS/*.png. image_folder_one_device.py is for one device; see the difference by
diff examples/image_folder_one_device.py examples/image_folder.py
"""

import sys

import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, WeightedRandomSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import hvdtrain

EPOCHS, BATCH_SIZE, PATIENCE = 30, 16, 3


class Balanced(WeightedRandomSampler):
    """Classes equally often, in an order that depends on the epoch alone."""

    def set_epoch(self, epoch):
        self.generator.manual_seed(epoch)


def evaluate(model, batch):
    x, y = batch
    scores = model(x)
    total = cross_entropy(scores, y, reduction="sum")
    return hvdtrain.Sums(total, len(y), outputs={"chances": scores.softmax(1)[:, 1], "labels": y})


def finalize(outputs):
    return {"auc": roc_auc_score(outputs["labels"], outputs["chances"])}


def show(evaluation):
    if loop.rank == 0:
        loss, auc = evaluation.loss, evaluation.metrics["auc"]
        print(f"epoch {evaluation.epoch}: loss {loss:.12f}, AUC {auc:.12f}")


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

with hvdtrain.Loop(
    *(model, optimizer, loader, valid_loader, evaluate),
    finalize=finalize,
    valid_metrics=["auc"],
    best="auc",
    best_is_highest=True,
    on_evaluation=show,
    epochs=EPOCHS,
    patience=PATIENCE,
    model_ema=True,
    model_ema_decay=0.9,
    sync_bn=True,
) as loop:
    for step in loop:
        for x, y in step.batches():
            loss = cross_entropy(model(x), y)
            step.backward(mean=loss, count=len(y))
        step.update()
