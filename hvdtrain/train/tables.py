"""Sums of the tables that a task returns, over batches, shares and ranks.

A dense table is summed as a whole, and costs its size. Of a sparse one only the entries are kept,
exchanged and stored: confusions of 22,000 classes have 484 million cells, but at most as many
entries as there are samples.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hvdtrain.exchange import Exchange

Table = list[Any] | torch.Tensor  # nested lists; or, of entries, a coalesced sparse tensor
LEAST_MERGED = 1 << 16  # entries that are kept one by one before equal places are merged


class Entries:
    """Sums by place, a cell's number in the flattened table, of those cells that have any."""

    def __init__(self) -> None:
        self._places: list[np.ndarray] = [np.empty(0, np.int64)]
        self._values: list[np.ndarray] = [np.empty(0)]
        self._unmerged = 0

    def add(self, places: np.ndarray, values: np.ndarray) -> None:
        """Add float64 values, each to its place; a place may be repeated."""
        self._places.append(places)
        self._values.append(values)
        self._unmerged += len(places)
        if self._unmerged > max(LEAST_MERGED, len(self._places[0])):
            self.merged()

    def merged(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the places, in order, and the sum of each, added in the order of the calls."""
        places, which = np.unique(np.concatenate(self._places), return_inverse=True)
        values = np.bincount(which, np.concatenate(self._values), len(places))
        self._places, self._values, self._unmerged = [places], [values], 0
        return places, values


class TableSums:
    """The sums of the tables of one rank, apart for each row (see `SharesLike.row`)."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], rows: int) -> None:
        """`shapes`: of the tables by name, in an order that is the same on all ranks."""
        self._shapes, self._rows = shapes, rows
        self._dense: dict[str, torch.Tensor] = {}  # rows by cells
        self._sparse: defaultdict[tuple[int, str], Entries] = defaultdict(Entries)

    def add(self, row: int, name: str, table: torch.Tensor) -> None:
        """Add the table of a batch to that of this name."""
        if table.layout is torch.sparse_coo and table.sparse_dim() == table.dim() > 0:
            table = table.detach().cpu().double().coalesce()
            places = np.ravel_multi_index(tuple(table.indices().numpy()), self._shapes[name])
            self._sparse[row, name].add(places, table.values().numpy())
            return
        if name not in self._dense:
            self._dense[name] = self._zeros(name)
        self._dense[name][row] += table.to_dense().double().reshape(-1).cpu()

    def over_ranks(self, exchange: Exchange) -> dict[str, Table]:
        """Collective: return the sums over all ranks.

        A table is dense if it is on any rank: one without samples has seen none. The entries of a
        row are merged before they are added, so that the result does not depend on the ranks.
        """
        if not self._shapes:
            return {}
        local = set(self._dense), {key: entries.merged() for key, entries in self._sparse.items()}
        gathered = exchange.all_gather_object(local, "hvdtrain.evaluate.entries")
        sparse: defaultdict[str, Entries] = defaultdict(Entries)
        for _, parts in gathered:  # by rank, and so by row: rows are those of successive ranks
            for (_, name), (places, values) in parts.items():
                sparse[name].add(places, values)
        dense = self._dense_over_ranks(exchange, set().union(*(names for names, _ in gathered)))
        return {
            name: _finished(shape, dense.get(name), *sparse[name].merged())
            for name, shape in self._shapes.items()
        }

    def _dense_over_ranks(self, exchange: Exchange, names: set[str]) -> dict[str, torch.Tensor]:
        """Collective: return the sums of the dense tables, flat; `names`: those of any rank."""
        if not (ordered := [name for name in self._shapes if name in names]):
            return {}
        flat = [self._dense[name] if name in self._dense else self._zeros(name) for name in ordered]
        total = exchange.sum_later(torch.cat(flat, dim=1), "hvdtrain.evaluate.tables")().sum(0)
        return dict(zip(ordered, total.split([table.shape[1] for table in flat]), strict=True))

    def _zeros(self, name: str) -> torch.Tensor:
        return torch.zeros((self._rows, math.prod(self._shapes[name])), dtype=torch.float64)


def _finished(
    shape: tuple[int, ...], dense: torch.Tensor | None, places: np.ndarray, values: np.ndarray
) -> Table:
    """Return a table; `dense`: None of one that has only entries."""
    if dense is not None:
        np.add.at(dense.numpy(), places, values)
        nested: list[Any] = _whole(dense).reshape(shape).tolist()
        return nested
    places, values = places[values != 0], values[values != 0]
    indices = torch.from_numpy(np.stack(np.unravel_index(places, shape)))
    sums = _whole(torch.from_numpy(values))
    return torch.sparse_coo_tensor(indices, sums, shape, check_invariants=True, is_coalesced=True)


def _whole(values: torch.Tensor) -> torch.Tensor:
    """Return float64 values as int64, if all of them are whole."""
    whole = values.to(torch.int64)
    return whole if bool((whole == values).all()) else values


def plain_table(table: Table) -> Any:
    """Return a table as JSON holds it: of a sparse one its shape, and of its entries the indices in
    each dimension and the values, as `torch.sparse_coo_tensor` takes them.
    """
    if not isinstance(table, torch.Tensor):
        return table
    indices, values = table.indices().tolist(), table.values().tolist()
    return {"shape": list(table.shape), "indices": indices, "values": values}
