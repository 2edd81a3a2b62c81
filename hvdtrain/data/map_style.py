"""Map-style data sets and DataLoaders of torch as splits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, default_collate

from hvdtrain.data.sampler import Indices
from hvdtrain.data.splits import Split


class MapSplit:
    """The samples of a map-style data set, which are read one by one and collated."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self._dataset, self._collate = dataset, collate

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, indices: Indices, epoch: int = 0) -> Any:
        return self._collate([self._dataset[int(index)] for index in indices])


def split_of(samples: Any) -> Split:
    """Return a split as it is; of a DataLoader or a map-style data set, one of its samples."""
    if hasattr(samples, "batch"):
        return samples  # type: ignore[no-any-return]
    if isinstance(samples, DataLoader):
        return MapSplit(samples.dataset, samples.collate_fn)
    return MapSplit(samples)
