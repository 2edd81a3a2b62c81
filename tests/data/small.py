"""The model and the data of the runs in this folder. They must not change: the runs record both.

All inputs are computed from whole numbers, so that they have the same bits on every processor.
"""

from __future__ import annotations

import hashlib

import torch

import hvdtrain

CLASSES, SIDE = 4, 6


class Net(torch.nn.Module):
    """A network of 348 parameters with batch norm and dropout."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(SIDE * SIDE, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.drop = torch.nn.Dropout(0.25)
        self.last = torch.nn.Linear(8, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(images.flatten(1))))
        return self.last(self.drop(hidden))


class Pictures(torch.utils.data.Dataset):
    """Grey pictures: a bright band, whose place is the class, over a pattern."""

    classes = ("top", "upper", "lower", "bottom")
    image_format = hvdtrain.ImageFormat(1, SIDE, SIDE)

    def __init__(self, count: int, first: int) -> None:
        self._count, self._first = count, first

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        number = index + self._first
        label = number % CLASSES
        pattern = (torch.arange(SIDE * SIDE) * (7 + number) + number * number) % 101
        image = pattern.view(1, SIDE, SIDE)
        image[:, label : label + 2] += 60
        return image.float() / 256, label


def pictures() -> tuple[Pictures, Pictures]:
    """Return the splits to train on and to validate with."""
    return Pictures(96, 0), Pictures(40, 96)


def arithmetic() -> str:
    """Return the SHA-256 of what some steps with PyTorch alone end with.

    Where it is another one than where a run was made, the processor or the version of PyTorch
    computes other bits, and so may a replay.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net((1, SIDE, SIDE), CLASSES)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
        images, labels = zip(*(pictures()[0][number] for number in range(20)), strict=True)
        for _ in range(8):
            for part in (slice(0, 10), slice(10, 20)):
                scores = model(torch.stack(images[part]))
                loss = torch.nn.functional.cross_entropy(
                    scores, torch.tensor(labels[part]), reduction="sum"
                )
                (loss / 20).backward()
            optimizer.step()
            optimizer.zero_grad()
    content = b"".join(it.detach().numpy().tobytes() for it in model.state_dict().values())
    return hashlib.sha256(content).hexdigest()
