"""The workers that a rank computes: itself, or with `--virtual-workers` several virtual ones.

A virtual worker has a fixed share of each batch, random numbers that depend on seed, step and its
own number alone, and buffers of its own (such as running statistics). All of this, and the sum of
the gradients (`hvdtrain.exchange.canonical`), is the same whichever rank computes it. So float32
runs end with the same bits for every number of ranks, also with dropout and batch norm.

Prior art: VirtualFlow (Or et al., MLSys 2022), EasyScale (Li et al., SC 2023).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from hvdtrain.data import VirtualShares
from hvdtrain.errors import name_ranks
from hvdtrain.exchange import Exchange, copied_to_cpu
from hvdtrain.exchange.canonical import CanonicalSums
from hvdtrain.log import counted
from hvdtrain.train.batchnorm import (
    SyncBatchNorm,
    averaged_statistics,
    has_batch_norm,
    running_statistics,
)

WorkerState = Mapping[str, Any]  # "buffers": by name; "rng": random generators, or None


def seed_all(*numbers: int) -> None:
    """Seed the generators of Python, NumPy and torch (on all devices)."""
    seed = numbers[0]
    if numbers[1:]:
        seed = int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class Workers(Protocol):
    """The workers that this rank computes."""

    def begin_step(self) -> None:
        """Begin a step, before its first backward pass."""

    def begin_pass(self, step: int, share: int, is_last: bool) -> None:
        """Prepare the model for a pass over a part of `share`; passes of a share are adjacent.

        `is_last`: it is this rank's last pass of the step.
        """

    def reduce_gradients(self) -> None:
        """Collective: make every `.grad` the sum over all workers."""

    def states(self) -> list[WorkerState]:
        """Return the state to save of each worker of this rank, in order."""

    def restore(
        self, states: Sequence[WorkerState], models: Sequence[torch.nn.Module]
    ) -> str | None:
        """Restore the saved states of all workers; `models`: those whose buffers are replaced.

        Returns a description of what is lost as there were other workers, if anything.
        """

    def statistics(self, model: torch.nn.Module) -> AbstractContextManager[torch.nn.Module]:
        """Collective: return a context in which `model` has the statistics of all workers."""


class RankWorker:
    """The single worker of a rank without virtual workers."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        exchange: Exchange,
        device: torch.device,
        samples: int,
    ) -> None:
        """Keep these; `samples`: of this rank in a full batch, the weight of its statistics."""
        self._model, self._optimizer, self._exchange = model, optimizer, exchange
        self._device, self._samples = device, samples

    def begin_step(self) -> None: ...

    def begin_pass(self, step: int, share: int, is_last: bool) -> None: ...

    def reduce_gradients(self) -> None:
        self._exchange.reduce_gradients(self._optimizer)

    def states(self) -> list[WorkerState]:
        buffers = copied_to_cpu(dict(self._model.named_buffers()))
        return [{"buffers": buffers, "rng": _rng_state(self._device)}]

    def restore(
        self, states: Sequence[WorkerState], models: Sequence[torch.nn.Module]
    ) -> str | None:
        """Restore buffers and random generators, for which the run continues bit for bit.

        With another number of ranks the averaged running statistics are kept, and only ranks that
        existed before restore random generators.
        """
        rank, size = self._exchange.rank, self._exchange.size
        if rank < len(states):
            _set_rng_state(states[rank]["rng"], self._device)
        if len(states) != size:
            synchronised = any(isinstance(it, SyncBatchNorm) for it in self._model.modules())
            own_statistics = has_batch_norm(self._model) and not synchronised
            return _describe_loss(len(states), size, own_statistics)
        for model in models:
            _load_buffers(model, states[rank]["buffers"])
        return None

    def statistics(self, model: torch.nn.Module) -> AbstractContextManager[torch.nn.Module]:
        return averaged_statistics(model, self._exchange, own_weight=float(self._samples))


class VirtualWorkers:
    """The virtual workers of a rank: consecutive ones, perhaps none."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        exchange: Exchange,
        shares: VirtualShares,
        seed: int,
        batch: int,
    ) -> None:
        """Prepare sums and buffers. `batch`: samples of a full global batch, for statistics."""
        self._model, self._exchange, self._seed = model, exchange, seed
        self._own = shares.of_rank(exchange.rank)
        self._samples = shares.sizes(batch)
        self._sums = CanonicalSums(model, optimizer, shares.rows, exchange)
        self._buffers = {share: _buffers_of(model) for share in self._own}
        self._loaded: int | None = None  # the worker whose buffers the model has
        self._current: int | None = None  # the worker of the last pass of this step

    def begin_step(self) -> None:
        self._current = None
        self._sums.begin()

    def begin_pass(self, step: int, share: int, is_last: bool) -> None:
        if share != self._current:
            if self._current is not None:
                self._sums.next_share()
            self._current = share
            self._load(share)
            seed_all(self._seed, step, share)
        if is_last:
            self._sums.last_pass()

    def reduce_gradients(self) -> None:
        self._sums.finish()

    def states(self) -> list[WorkerState]:
        self._keep()
        return [{"buffers": copied_to_cpu(self._buffers[it]), "rng": None} for it in self._own]

    def restore(
        self, states: Sequence[WorkerState], models: Sequence[torch.nn.Module]
    ) -> str | None:
        for share in self._own:
            for name, buffer in self._buffers[share].items():
                buffer.copy_(states[share]["buffers"][name])
        self._loaded = None  # the model has other buffers than any worker
        return None

    @contextmanager
    def statistics(self, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """Collective: yield `model` with averaged running statistics; other buffers: worker 0's."""
        before = _buffers_of(model)
        if before:
            self._keep()
            buffers = [copied_to_cpu(self._buffers[0])] if 0 in self._own else []
            gathered = self._exchange.all_gather_object(buffers, "hvdtrain.virtual.buffers")
            (first,) = itertools.chain.from_iterable(gathered)
            _load_buffers(model, first | self._averages())
        try:
            yield model
        finally:
            _load_buffers(model, before)

    def _averages(self) -> dict[str, torch.Tensor]:
        """Collective: return running statistics averaged over workers, weighted by samples."""
        names = running_statistics(self._model)
        if not names:
            return {}
        lengths = [self._model.get_buffer(name).numel() for name in names]
        table = torch.zeros((len(self._samples), sum(lengths)), dtype=torch.float64)
        for share in self._own:
            own = [self._buffers[share][name].reshape(-1) for name in names]
            table[share] = torch.cat(own)
        table = self._exchange.sum_later(table, "hvdtrain.virtual.statistics")()
        weights = torch.tensor(self._samples, dtype=torch.float64)
        averages = (table * weights[:, None]).sum(0) / weights.sum()
        return dict(zip(names, averages.split(lengths), strict=True))

    def _load(self, share: int) -> None:
        """Give the model the buffers of a worker."""
        if share != self._loaded:
            self._keep()
            _load_buffers(self._model, self._buffers[share])
            self._loaded = share

    def _keep(self) -> None:
        """Copy the model's buffers back to the worker that they are of."""
        if self._loaded is not None:
            for name, kept in self._buffers[self._loaded].items():
                kept.copy_(self._model.get_buffer(name))


def _buffers_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _load_buffers(model: torch.nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name].view_as(buffer))


def _describe_loss(before: int, now: int, own_statistics: bool) -> str:
    text = f"{counted(now, 'worker')} instead of {before}: "
    if now > before:
        text += f"the random numbers of {name_ranks([*range(before, now)])} start at the seed"
    else:
        text += f"the random numbers of {name_ranks([*range(now, before)])} are dropped"
    return text + "; running statistics are the average of the old ranks'" * own_statistics


def _rng_state(device: torch.device) -> dict[str, Any]:
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }


def _set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
