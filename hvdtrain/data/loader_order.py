"""The order that the sampler or batch sampler of a DataLoader gives to each epoch.

The sampler draws once for each epoch, on every rank, from random generators seeded by the run's
seed and the epoch: so its global batches are the same for every number of workers, and a resumed
run goes on in the middle of them.
"""

import hashlib
import operator
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from hvdtrain.data.drawing import OF_ORDER, drawing
from hvdtrain.data.sampler import GlobalBatchSampler, Indices
from hvdtrain.data.token_batches import TokenBatches
from hvdtrain.errors import TrainingError, UsageError

PLAIN_SAMPLERS = (RandomSampler, SequentialSampler, DistributedSampler)
MOST_NESTED = 4  # samplers in samplers


class Epoch(NamedTuple):
    """The samples of an epoch in their order, and where its global batches begin and end."""

    indices: Indices
    edges: Indices  # int64, one more than there are batches, from 0 to len(indices)

    @property
    def digest(self) -> str:
        """Return the SHA-256 of order and batches."""
        return hashlib.sha256(self.indices.tobytes() + self.edges.tobytes()).hexdigest()


@dataclass(frozen=True)
class LoaderOrder:
    """The sampler of a DataLoader.

    `sampler`: yields numbers of samples, or, if `yields_batches`, lists of them. `samples`: in the
    data set. `drop_last`: leave out the last global batch of an epoch if it is short.
    """

    sampler: Iterable[Any]
    samples: int
    yields_batches: bool = False
    drop_last: bool = False

    @property
    def name(self) -> str:
        """Return the type of the sampler."""
        return type(self.sampler).__name__

    @property
    def refusal(self) -> str:
        """Return why samples are not evaluated in this order."""
        return (
            f"the DataLoader has a {self.name}, but each sample is evaluated once, in the order of "
            "its number. Leave the sampler out, or give a data set in which samples stand as often "
            "as wanted, such as torch.utils.data.Subset(dataset, numbers)"
        )

    def draw(self, seed: int, epoch: int, batch_size: int) -> Epoch:
        """Return an epoch. `batch_size`: of a global batch, unless the sampler yields batches.

        `set_epoch(epoch)` of the sampler is called first, if it has one, and may seed a generator
        that the sampler holds. Raises UsageError for numbers that no sample has, an empty epoch, or
        an empty batch.
        """
        with drawing(seed, epoch, 0, OF_ORDER), _seeded(generators_of(self.sampler)):
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)
            drawn = list(self.sampler)
        kind = "batches" if self.yields_batches else "numbers of samples"
        try:
            lengths = [len(batch) for batch in drawn] if self.yields_batches else []
            numbers = [n for batch in drawn for n in batch] if self.yields_batches else drawn
            indices = np.fromiter(map(operator.index, numbers), np.int64)
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"the {self.name} yields no {kind}: {error}") from error
        wrong = indices[(indices < 0) | (indices >= self.samples)]
        if len(wrong):
            raise UsageError(
                f"the {self.name} yields sample {wrong[0]} of a data set of {self.samples:,}"
            )
        if not self.yields_batches:
            stop = len(indices) - (len(indices) % batch_size if self.drop_last else 0)
            edges = np.append(np.arange(0, stop, batch_size), stop)
            indices = indices[:stop]
        else:
            edges = np.cumsum([0, *lengths])
        if len(edges) < 2 or not np.all(np.diff(edges)):
            raise UsageError(f"the {self.name} yields an empty epoch or batch (epoch {epoch})")
        return Epoch(indices, edges)


def has_batch_size(loader: DataLoader[Any]) -> bool:
    """Return whether all batches of a DataLoader but the last have as many samples."""
    return type(loader.batch_sampler) is BatchSampler


def order_problem(loader: DataLoader[Any], part: str) -> str | None:
    """Return why the order of a DataLoader cannot be taken for a part of the data, or None."""
    try:
        order = order_of(loader)
    except UsageError as error:
        return str(error)
    return order.refusal if order is not None and part == "valid" else None


def order_of(loader: DataLoader[Any]) -> LoaderOrder | None:
    """Return the order of a DataLoader; None if it takes each sample once, or is only iterated.

    Raises UsageError for a sampler that gives each rank a part, and for lengths of other samples.
    """
    if isinstance(loader.dataset, IterableDataset):
        return None  # it has no order to choose, and is refused as one that is only iterated
    batches: Any = loader.batch_sampler
    samples = len(loader.dataset)  # type: ignore[arg-type]
    if batches is not None and not has_batch_size(loader):
        if isinstance(batches, TokenBatches) and len(batches.lengths) != samples:
            raise UsageError(
                f"the TokenBatches of the DataLoader have the lengths of {len(batches.lengths):,} "
                f"samples, and its data set has {samples:,}: give one for each, in their order"
            )
        return LoaderOrder(batches, samples, yields_batches=True)
    sampler = getattr(batches, "sampler", loader.sampler)
    if _takes_all(sampler, loader.dataset):
        return None
    if isinstance(sampler, DistributedSampler):
        raise UsageError(
            f"the DataLoader has a {type(sampler).__name__}, which gives each rank a part of an "
            "order. Ranks take their shares here: give the sampler of the whole order"
        )
    return LoaderOrder(sampler, samples, drop_last=getattr(batches, "drop_last", loader.drop_last))


def _takes_all(sampler: Any, dataset: Any) -> bool:
    """Return whether a sampler takes each sample once, in order or shuffled."""
    kind = type(sampler)  # not isinstance: derived classes take samples in ways of their own
    if kind not in PLAIN_SAMPLERS:
        return False
    source = sampler.dataset if kind is DistributedSampler else sampler.data_source
    if kind is RandomSampler and (sampler.replacement or sampler.num_samples != len(source)):
        return False
    return len(source) == len(dataset)


class DrawnBatchSampler(GlobalBatchSampler):
    """The global batches of a DataLoader's sampler: as many samples and batches in each epoch.

    The newest epoch is kept, in 8 bytes a sample.
    """

    def __init__(self, order: LoaderOrder, batch_size: int, seed: int) -> None:
        """Draw the first epoch, twice. Raises UsageError if both are not the same.

        `batch_size`: of a global batch, unless the sampler yields batches. `seed`: of the run.
        """
        self._draw: Callable[[int], Epoch] = lambda epoch: order.draw(seed, epoch, batch_size)
        self._name = order.name
        self._epoch, self._drawn = 0, self._draw(0)
        if self._draw(0).digest != self._drawn.digest:
            raise UsageError(self._changed(0))
        super().__init__(len(self._drawn.indices), int(np.diff(self._drawn.edges).max()), seed)

    @property
    def steps_per_epoch(self) -> int:
        return len(self._drawn.edges) - 1

    @property
    def batch_sizes(self) -> set[int]:
        return set(np.diff(self._drawn.edges).tolist())

    def begin(self, epoch: int) -> str:
        """Draw an epoch, and return its digest.

        Raises TrainingError if the epoch before would now be another, or if this one has other
        numbers of samples or batches than the first.
        """
        if epoch == self._epoch + 1 and self._draw(self._epoch).digest != self._drawn.digest:
            raise TrainingError(self._changed(self._epoch))
        return self._of(epoch).digest

    @property
    def drawn(self) -> dict[str, Any]:
        return {"sampler": self._name, "epoch": self._epoch, "sha256": self._drawn.digest}

    def check_drawn(self, saved: dict[str, Any] | None) -> None:
        if saved is None:
            raise UsageError(
                f"--resume: samples came in the run's own order, and now the DataLoader has a "
                f"{self._name}. Leave the sampler out"
            )
        if self._of(saved["epoch"]).digest != saved["sha256"]:
            raise UsageError(
                f"--resume: the order of epoch {saved['epoch']} was another when the checkpoint "
                f"was saved: by a {saved['sampler']} then, and a {self._name} now. A resumed run "
                "needs the same sampler, over the same data"
            )

    def cursor(self, steps: int) -> int:
        epoch, within = divmod(steps, self.steps_per_epoch)
        return epoch * self.samples + int(self._of(epoch).edges[within])

    def global_batches(self, cursor: int) -> Iterator[Indices]:
        epoch, start = divmod(cursor, self.samples)
        indices, edges = self._of(epoch)
        for number in range(int(np.searchsorted(edges, start)), len(edges) - 1):
            yield indices[edges[number] : edges[number + 1]]

    def _between(self, epoch: int) -> Callable[[int, int], Indices]:
        return lambda start, stop: self._of(epoch).indices[start:stop]

    def _of(self, epoch: int) -> Epoch:
        if epoch == self._epoch:
            return self._drawn
        drawn, first = self._draw(epoch), (self.samples, self.steps_per_epoch)
        if (actual := (len(drawn.indices), len(drawn.edges) - 1)) != first:
            raise TrainingError(
                f"the {self._name} gave {actual[0]:,} samples in {actual[1]:,} batches in epoch "
                f"{epoch}, and {first[0]:,} in {first[1]:,} before. Every epoch must have as many"
            )
        self._epoch, self._drawn = epoch, drawn
        return drawn

    def _changed(self, epoch: int) -> str:
        return (
            f"the {self._name} gives another order each time that epoch {epoch} is drawn, so no "
            "resumed run could continue it. It must depend on the generators of torch, NumPy or "
            "random, which are seeded for each epoch, and on set_epoch(epoch) alone; not on losses "
            "or on earlier epochs"
        )


def generators_of(sampler: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the random generators that a sampler holds, or that samplers within it hold."""
    for value in vars(sampler).values() if hasattr(sampler, "__dict__") else ():
        if isinstance(
            value, (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
        ):
            yield value
        elif depth < MOST_NESTED and hasattr(value, "__iter__") and hasattr(value, "__dict__"):
            yield from generators_of(value, depth + 1)


@contextmanager
def _seeded(generators: Iterable[Any]) -> Iterator[None]:
    """Seed generators by the seed that torch's global one has; afterwards they go on as before."""
    seed = torch.initial_seed()
    with ExitStack() as restore:
        for generator in {id(each): each for each in generators}.values():
            if isinstance(generator, torch.Generator):
                restore.callback(generator.set_state, generator.get_state())
                generator.manual_seed(seed)
            elif isinstance(generator, random.Random):
                restore.callback(generator.setstate, generator.getstate())
                generator.seed(seed)
            elif isinstance(generator, np.random.RandomState):
                restore.callback(generator.set_state, generator.get_state())
                generator.seed(seed % 2**32)
            else:
                bits: Any = generator.bit_generator
                restore.callback(setattr, bits, "state", bits.state)
                bits.state = type(bits)(seed).state
        yield
