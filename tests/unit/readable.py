"""Samples for reading processes, which import this module anew, and data sets for --data."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hvdtrain.data.reading import BadSample


@dataclass
class Numbers:
    """Sample i of epoch e is (1000 e + i, the process that read it)."""

    samples: int = 40
    bad: tuple[int, ...] = ()
    raises_at: int = -1
    pause_s: float = 0.0

    def __len__(self) -> int:
        return self.samples

    def read(self, index: int, epoch: int) -> tuple[int, int]:
        time.sleep(self.pause_s)
        if index in self.bad:
            raise BadSample(f"sample {index} is bad")
        if index == self.raises_at:
            raise LookupError("a reader's own mistake")
        return 1000 * epoch + index, os.getpid()

    def empty_batch(self) -> Any:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)


class Squares(torch.utils.data.Dataset[Any]):
    """A map-style data set of torch: 2x4x4, class i mod 3; every argument spoils one thing."""

    def __init__(self, count: int, **spoilt: Any) -> None:
        self.classes = ["a", "b", "c"]
        self.count = count
        self.spoilt = spoilt

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if "raises" in self.spoilt and index >= self.spoilt["raises"]:
            raise OSError(f"sample {index} is lost")
        image = torch.full((2, 4, 4), float(index))
        label = index % 3
        if index > 0:  # the first gives the shape
            image = self.spoilt.get("image", image)
            label = self.spoilt.get("label", label)
        return image, label


def squares() -> tuple[Squares, Squares]:
    return Squares(30), Squares(6)


class Noisy(torch.utils.data.Dataset[Any]):
    """A map-style data set: sample i is {"x": (i, three random numbers), "word": text of i}."""

    def __init__(self, count: int = 40, lost: int = -1) -> None:
        self.count = count
        self.lost = lost

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.lost:
            raise OSError("it is lost")
        drawn = [torch.rand(()).item(), np.random.random(), random.random()]
        return {"x": torch.tensor([index, *drawn], dtype=torch.float64), "word": str(index)}


class Flow(torch.utils.data.IterableDataset[Any]):
    """An iterable data set with the samples of `Noisy`."""

    def __init__(self, count: int = 40) -> None:
        self.samples = Noisy(count)
        self.started = 0

    def __iter__(self) -> Any:
        self.started += 1
        return (self.samples[index] for index in range(len(self.samples)))


def joined(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate samples as columns, and add a random number."""
    x = torch.stack([it["x"] for it in samples], dim=1)
    return {"x": x + 0, "words": [it["word"] for it in samples], "drawn": torch.rand(())}


def begin(number: int) -> None:
    """Mark a reader process."""
    os.environ["BEGUN"] = str(number)


class Begun(torch.utils.data.Dataset[Any]):
    """A data set whose samples are the mark of the process that reads them."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> int:
        return int(os.environ.get("BEGUN", -1))


class Changed(torch.utils.data.Dataset[Any]):
    """A data set that a script changes: sample i is (its level, sum of its values, the process)."""

    def __init__(self) -> None:
        self.level = 0
        self.values = torch.zeros(3)
        self.array = np.zeros(3)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> list[float]:
        total = float(self.values.sum()) + float(self.array.sum())
        return [float(self.level), total, float(os.getpid())]


class Counting(torch.utils.data.Dataset[Any]):
    """A data set with epochs: sample i is (the epoch, the number of calls of `set_epoch`)."""

    def __init__(self) -> None:
        self.epoch, self.calls = -1, 0

    def __len__(self) -> int:
        return 8

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.calls = epoch, self.calls + 1

    def __getitem__(self, index: int) -> list[int]:
        return [self.epoch, self.calls]


class Opened(torch.utils.data.Dataset[Any]):
    """A data set whose file is opened in each reader process, by `open_file`."""

    file = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        info = torch.utils.data.get_worker_info()
        assert info is not None and info.dataset is self
        return self.file


def open_file(number: int) -> None:
    """Prepare the data set of a reader process, as torch's documentation shows it."""
    info = torch.utils.data.get_worker_info()
    assert info is not None and info.id == number
    info.dataset.file = 10 + number  # type: ignore[attr-defined]
