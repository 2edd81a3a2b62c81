"""Exact evaluation: each sample counts once, for any number of ranks."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hvdtrain.data import BatchShares, SharesLike, Split
from hvdtrain.data.feeding import Loaded, evaluation_batch, stream
from hvdtrain.data.sampler import Indices
from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange
from hvdtrain.tasks import Sums, Task, check_sums, valid_metrics_of
from hvdtrain.tasks.means import Recorder
from hvdtrain.train.outputs import SampleOutputs
from hvdtrain.train.tables import Table, TableSums, plain_table

# Columns of the sums: stop requests, samples, what the loss is a mean over; loss and metrics.
STOP, SAMPLES, COUNT, LOSS = range(4)

Seed = Callable[[int, int, bool], None]  # share, number of its batch, whether it is being read


@dataclass(frozen=True)
class Evaluation:
    """Loss and metrics over all samples of a split."""

    samples: int
    loss: float
    metrics: dict[str, float]  # means, and figures of `Task.finalize`
    tables: dict[str, Table]  # sums, such as the counts of confusions
    step: int = field(default=0, compare=False)  # of the training, after which it was made, from 1
    epoch: int = field(default=0, compare=False)  # of this step, from 0

    def plain(self) -> dict[str, Any]:
        """Return samples, loss, metrics and tables as JSON holds them."""
        tables = {name: plain_table(table) for name, table in self.tables.items()}
        figures = {"samples": self.samples, "loss": self.loss, "metrics": self.metrics}
        return figures | {"tables": tables}

    def class_accuracy(self) -> list[float | None] | None:
        """Return each class's accuracy, None without samples; or None, unless there is a table
        `confusion` that counts pairs [true class][predicted class].
        """
        table = self.tables.get("confusion")
        if isinstance(table, list):
            table = torch.tensor(table, dtype=torch.float64).to_sparse()
        if table is None or table.dim() != 2 or table.shape[0] != table.shape[1]:
            return None
        (true, predicted), counts = table.indices(), table.values().double()
        is_right = true == predicted
        right = torch.bincount(true[is_right], counts[is_right], len(table)).tolist()
        samples = torch.bincount(true, counts, len(table)).tolist()
        return [part / whole if whole else None for part, whole in zip(right, samples, strict=True)]


class Interrupted(Exception):
    """A stop request to a rank during an evaluation."""


@dataclass(frozen=True)
class RankSums:
    """The sums of one rank over its samples, and their outputs."""

    names: Sequence[str]  # of metrics, in the order of their columns
    rows: torch.Tensor  # see `SharesLike.row`
    tables: TableSums
    outputs: SampleOutputs

    def over_ranks(self, exchange: Exchange) -> Evaluation:
        """Collective: return the means and tables over all ranks. Raises Interrupted on all of them
        if one was stopped.
        """
        rows = exchange.sum_later(self.rows, "hvdtrain.evaluate")()
        totals = rows.cumsum(0)[-1]  # in the order of the rows
        if totals[STOP]:
            raise Interrupted
        return _evaluation_of(totals, self.names, self.tables, self.outputs, exchange)


def evaluate(
    model: torch.nn.Module,
    task: Task,
    split: Split,
    shares: SharesLike,
    exchange: Exchange,
    device: torch.device,
    stop_requested: Callable[[], bool] = lambda: False,
    seed: Seed = lambda share, number, reading: None,
    waits: Callable[[], None] = lambda: None,
    looks: bool = False,
    batch_size: int | None = None,
) -> Evaluation:
    """Collective: return the means of loss and metrics, and the tables, over all of `split`.

    Every rank takes its share, which may be empty. Sums, never means, are added over ranks, in
    float64, where counts are exact up to 2^53. `waits` is called before waiting for other ranks;
    for the rest see `sum_of_rank`. Raises Interrupted on all ranks if `stop_requested()` is true on
    any.
    """
    placed = model, task, split, shares, exchange.rank, device
    sums = sum_of_rank(*placed, stop_requested, seed, looks, batch_size)
    waits()
    return sums.over_ranks(exchange)


def sum_of_rank(
    model: torch.nn.Module,
    task: Task,
    split: Split,
    shares: SharesLike | BatchShares,
    rank: int,
    device: torch.device,
    stop_requested: Callable[[], bool] = lambda: False,
    seed: Seed = lambda share, number, reading: None,
    looks: bool = False,
    batch_size: int | None = None,
) -> RankSums:
    """Return the sums over the samples of a rank.

    `seed` is called before a batch is read, and before it is used. `batch_size`: samples at a time;
    None: as the split has it, or the default. Raises UsageError if this `looks` at how the loss of
    the first batch is made, and finds a mean.
    """
    names = valid_metrics_of(task)
    rows = torch.zeros((shares.rows, LOSS + 1 + len(names)), dtype=torch.float64)
    tables, outputs = TableSums(task.tables, shares.table_rows), SampleOutputs(task)
    with torch.no_grad(), in_evaluation_mode(model):
        for row, first, loaded in _read(split, shares, rank, seed, batch_size):
            if stop_requested():
                rows[row, STOP] = 1
                break
            if loaded.samples == 0:  # none of the batch could be read
                continue
            sums, looks = _sums_of(model, task, loaded, device, looks), False
            rows[row, SAMPLES:] += _figures_of(sums, names, loaded.samples)
            for name in task.tables:
                tables.add(min(row, shares.table_rows - 1), name, sums.metrics[name])
            outputs.add(first, loaded.samples, sums)
    return RankSums(names, rows, tables, outputs)


def _figures_of(sums: Sums, names: Sequence[str], samples: int) -> torch.Tensor:
    """Return the sums of a batch in the order of the columns, from SAMPLES on; NaN for a metric
    that is no sum.
    """
    nothing = torch.tensor(math.nan)
    values = [sums.loss, *(sums.metrics.get(name, nothing) for name in names)]
    figures = [samples, sums.samples, *(value.double().item() for value in values)]
    return torch.tensor(figures, dtype=torch.float64)


def _evaluation_of(
    totals: torch.Tensor,
    names: Sequence[str],
    tables: TableSums,
    outputs: SampleOutputs,
    exchange: Exchange,
) -> Evaluation:
    """Collective: return the means of the sums over all ranks (NaN without samples), the tables,
    and the figures of outputs, if the loss is finite: otherwise most metrics raise errors.
    """
    samples, count, *sums = totals[SAMPLES:].tolist()
    loss, *means = [total / count if count else math.nan for total in sums]
    summed = tables.over_ranks(exchange)
    figures = outputs.figures(exchange) if math.isfinite(loss) else {}
    metrics = dict(zip(names, means, strict=True)) | figures
    return Evaluation(int(samples), loss, metrics, summed)


def _sums_of(
    model: torch.nn.Module, task: Task, loaded: Loaded, device: torch.device, looks: bool
) -> Sums:
    """Return the checked sums of a batch; `looks`: at how its loss is made."""
    batch = loaded.on(device)
    with Recorder() if looks else nullcontext() as recorder:
        sums = task.evaluate(model, batch)
    if recorder is not None:
        _refuse_mean(sums, recorder)
    return check_sums(sums, task, loaded.samples, training=False)


def _refuse_mean(sums: Any, recorder: Recorder) -> None:
    """Raise UsageError if the loss of a batch is a mean over it, where a sum is to be returned."""
    is_one = isinstance(sums, Sums) and isinstance(sums.loss, torch.Tensor)
    if is_one and (op := recorder.mean_in(sums.loss, float(sums.samples))):
        raise UsageError(
            f"evaluate returns Sums(loss, count) with the mean of the losses of a batch ({op}), "
            f"and it takes their sum: the validation loss would be {float(sums.samples):g} times "
            "too small. Return Sums.of_means(loss, count, metrics), or make it a sum: "
            'reduction="sum"'
        )


@contextmanager
def in_evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Have all modules in evaluation mode, then each in its own mode again: a model may keep frozen
    batch norms or a teacher in evaluation mode while it is trained.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:  # a module comes before its parts, which follow it
            if module.training != mode:
                module.train(mode)  # which may do more, such as to unmerge an adapter


def _read(
    split: Split,
    shares: SharesLike | BatchShares,
    rank: int,
    seed: Seed,
    batch_size: int | None,
) -> Iterator[tuple[int, int, Loaded]]:
    """Yield the batches of a rank, after the row of their share and the number of their first
    sample; they are read ahead.
    """
    ahead, now = itertools.tee(_parts(split, shares, rank, batch_size))
    batches = stream(split, (indices for _, _, indices in ahead), epoch=0)
    for share, number, indices in now:
        seed(share, number, True)
        loaded = next(batches)
        seed(share, number, False)
        yield shares.row(share), int(indices[0]), loaded


def _parts(
    split: Split, shares: SharesLike | BatchShares, rank: int, batch_size: int | None
) -> Iterator[tuple[int, int, Indices]]:
    """Yield the samples of a rank, some at a time, after their share and number."""
    size = evaluation_batch(split, batch_size)
    for share in shares.of_rank(rank):
        share_range = shares.of_all(len(split), share)
        for number, start in enumerate(range(share_range.start, share_range.stop, size)):
            yield share, number, np.arange(start, min(start + size, share_range.stop))
