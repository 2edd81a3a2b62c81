"""Outputs of single samples over a whole split, for metrics that are no sums, such as AUC and mAP.

Each rank keeps the outputs of its own samples, on the CPU. At the end they travel a piece at a time
to rank 0, which alone keeps those of other ranks: it puts them into the order of the samples, and
computes the figures, which are broadcast.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hvdtrain.errors import TrainingError
from hvdtrain.exchange import Exchange
from hvdtrain.exchange.agreement import run_on_all
from hvdtrain.tasks import Metric, Sums, Task, finalizes, name_of, valid_metrics_of

PIECE_BYTES = 1 << 24  # of outputs of all ranks together, that are exchanged at a time
NUMBERS = ""  # in place of the name of an output: the numbers of the samples


class Extent(NamedTuple):
    """How many outputs a rank has, and how they are laid out."""

    samples: int
    bytes_each: int
    layout: Mapping[str, str]  # what the outputs and sums of each batch are, by name


class SampleOutputs:
    """The outputs of a rank's samples."""

    def __init__(self, task: Task) -> None:
        self._task, self._is_used = task, finalizes(task)
        self._parts: defaultdict[str, list[torch.Tensor]] = defaultdict(list)  # by batch
        self._extent = Extent(0, 0, {})

    def add(self, first: int, samples: int, sums: Sums) -> None:
        """Keep the outputs of a batch. Raises TrainingError if they differ in layout from others.

        `first`: the number of its first sample, of which there are `samples`.
        """
        if not self._is_used:
            return
        outputs = {
            # A copy: a view would keep all that it is of, and a buffer may be used again.
            name: output.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, output in sums.outputs.items()
        }
        outputs[NUMBERS] = torch.arange(first, first + samples)
        bytes_each = sum(output.nbytes for output in outputs.values()) // samples
        extent = Extent(self._extent.samples + samples, bytes_each, _layout_of(sums))
        if self._extent.samples:
            self._refuse_other(extent, self._extent)
        self._extent = extent
        for name, output in outputs.items():
            self._parts[name].append(output)

    def figures(self, exchange: Exchange) -> dict[str, float]:
        """Collective: return the figures that the task computes of all outputs; none if it does not
        compute any. Raises TrainingError and AgreedFailure, on all ranks.
        """
        if not self._is_used:
            return {}
        extents = exchange.all_gather_object(self._extent, "hvdtrain.evaluate.extents")
        used = [extent for extent in extents if extent.samples]
        for extent in used:
            self._refuse_other(extent, used[0])
        outputs = self._on_rank_0(exchange, extents)
        names = [n for n in valid_metrics_of(self._task) if n not in used[0].layout]
        figures = run_on_all(
            exchange,
            "finalize",
            lambda: _figures_of(self._task, outputs, names) if exchange.rank == 0 else {},
        )
        result: dict[str, float] = exchange.broadcast_object(figures, "hvdtrain.evaluate.figures")
        return result

    def _on_rank_0(self, exchange: Exchange, extents: Sequence[Extent]) -> dict[str, torch.Tensor]:
        """Collective: return the outputs of all samples in order; on ranks other than 0 nothing."""
        local = {name: torch.cat(parts) for name, parts in self._parts.items()}
        self._parts.clear()
        by_rank = [[local], *([] for _ in extents[1:])]
        bytes_each = max(extent.bytes_each for extent in extents)
        at_once = max(1, PIECE_BYTES // exchange.size // bytes_each)
        for start in range(0, max((e.samples for e in extents[1:]), default=0), at_once):
            rows = slice(start, start + at_once)
            piece = {name: output[rows].clone() for name, output in local.items()}
            sent = exchange.all_gather_object(
                piece if exchange.rank else {}, "hvdtrain.evaluate.outputs"
            )
            if exchange.rank == 0:
                for pieces, received in zip(by_rank, sent, strict=True):
                    pieces.append(received)
        if exchange.rank:
            return {}
        return _in_order([piece for pieces in by_rank for piece in pieces if piece])

    def _refuse_other(self, extent: Extent, expected: Extent) -> None:
        """Raise TrainingError if batches differ in what they return."""
        for name in sorted({*extent.layout, *expected.layout}):
            kinds = [one.layout.get(name, "none") for one in (expected, extent)]
            if kinds[0] != kinds[1]:
                raise TrainingError(
                    f"{name_of(self._task, 'evaluate')}: batches differ in {name}: {kinds[0]} and "
                    f"{kinds[1]}. Return the same sums and outputs, of the same types and shapes, "
                    "for every batch; pad outputs to one length"
                )


def _layout_of(sums: Sums) -> dict[str, str]:
    """Return what a batch returns, in words; sums by their names."""
    outputs = {
        f"the output {name}": f"{output.dtype} of shape {['samples', *output.shape[1:]]}"
        for name, output in sums.outputs.items()
    }
    return {**outputs, **dict.fromkeys(sums.metrics, "a sum")}


def _in_order(pieces: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the pieces as one, with the samples in the order of their numbers."""
    numbers = torch.cat([piece.pop(NUMBERS) for piece in pieces])
    order = numbers.argsort()
    is_ordered = bool((numbers.diff() > 0).all())
    outputs = {}
    for name in [*pieces[0]]:
        joined = torch.cat([piece.pop(name) for piece in pieces])
        outputs[name] = joined if is_ordered else joined[order]
    return outputs


def _figures_of(
    task: Task, outputs: Mapping[str, torch.Tensor], names: Sequence[str]
) -> dict[str, float]:
    """Return the checked figures of all outputs. Raises TrainingError.

    `names`: of the figures that are expected.
    """
    finalize: Any = task.finalize
    if isinstance(finalize, Metric):
        finalize.reset()
        finalize.update(**outputs)
        result = finalize.compute()
        finalize.reset()
    else:
        result = finalize(outputs)
    if not isinstance(result, Mapping) and len(names) == 1:
        result = {names[0]: result}
    if problems := "; ".join(_wrong_in(result, names)):
        raise TrainingError(f"{name_of(task, 'finalize')}: {problems}")
    return {name: float(result[name]) for name in names}


def _wrong_in(figures: Any, names: Sequence[str]) -> Iterator[str]:
    if not isinstance(figures, Mapping):
        yield f"returned a {type(figures).__name__}, expected a dict of figures by name"
        return
    if set(figures) != set(names):
        yield (
            f"returned the figures {sorted(map(str, figures))}, expected {sorted(names)}: the "
            "names in valid_metrics of which evaluate returns no sums"
        )
        return
    for name, value in figures.items():
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            yield f"{name} must be a number, and is a {type(value).__name__}"
            continue
        if not math.isfinite(number):
            yield (
                f"{name} is {number}: return a finite number, also where the metric is undefined, "
                "such as for samples of a single class"
            )
