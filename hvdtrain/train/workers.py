"""The workers that a rank computes: itself, or with `--virtual-workers` several virtual ones.

A virtual worker has a fixed share of each batch, random numbers that depend on seed, step and its
own number alone, and buffers of its own (such as running statistics). All of this, and the sum of
the gradients (`hvdtrain.exchange.canonical`), is the same whichever rank computes it. So float32
runs end with the same bits for every number of ranks, also with dropout and batch norm.

Prior art: VirtualFlow (Or et al., MLSys 2022), EasyScale (Li et al., SC 2023).
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Protocol

import torch

from hvdtrain.data import VirtualShares
from hvdtrain.errors import TrainingError, name_ranks
from hvdtrain.exchange import Exchange
from hvdtrain.exchange.agreement import agree_on_layout
from hvdtrain.exchange.canonical import CanonicalSums
from hvdtrain.exchange.distributed_optimizer import Trainable
from hvdtrain.log import counted
from hvdtrain.tensors import copied_to_cpu, params_sha256
from hvdtrain.train.batchnorm import (
    SyncBatchNorm,
    averaged_statistics,
    has_batch_norm,
    running_statistics,
)
from hvdtrain.train.worker_state import (
    Buffers,
    WorkerState,
    buffers_of,
    check_model,
    differing_buffers,
    exchanged,
    load_buffers,
    replaced,
    rng_state,
    seed_all,
    set_rng_state,
    slots_of,
    with_buffers_of_rank_0,
)


class Workers(Protocol):
    """The workers that this rank computes.

    The bodies are those of workers that are there for the whole run and need no preparation.
    """

    def begin_step(self, optimizers: Sequence[int]) -> None:
        """Collective: prepare the passes of a step that train some optimizers, by their indices.

        The parameters that are trainable from now on may be others than in the step before.
        """

    def begin_pass(self, step: int, share: int, number: int, is_last: bool) -> None:
        """Prepare the model for a pass over a part of `share`; passes of a share are adjacent.

        `number`: of the pass within the share, from 0. `is_last`: it is this rank's last pass of
        the step.
        """

    def repeat_pass(self, step: int, share: int, number: int) -> None:
        """Prepare the model for the same pass again, whose gradients are not reduced."""
        return

    def kept(self) -> AbstractContextManager[None]:
        """Return a context after which virtual workers have the same buffers as before it."""
        return nullcontext()

    def seed(self, step: int, share: int, number: int, reading: bool) -> None:
        """Seed the random generators for a pass, or for the reading of its data (`step`: 0 in
        evaluations).
        """
        return

    def reduce_gradients(self) -> bool:
        """Collective: make each gradient a sum over all workers. True: all are surely finite."""

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
        return nullcontext(model)

    def differing_buffers(self) -> list[str]:
        """Collective: return the names of further buffers that depend on the number of ranks."""
        return []

    def close(self) -> None:
        """Leave the gradients of later backward passes alone."""
        return


class RankWorker(Workers):
    """The single worker of a rank without virtual workers."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        exchange: Exchange,
        device: torch.device,
        samples: int,
        distribute: partial[torch.optim.Optimizer],
    ) -> None:
        """Keep these. `samples`: of this rank in a full batch, the weight of its statistics.
        `distribute`: the exchange's collective, which takes an optimizer, and whether to `adopt`.
        """
        self._model, self._optimizers, self._exchange = model, optimizers, exchange
        self._device, self._samples, self._distribute = device, samples, distribute
        self._trainable = [Trainable(model, optimizer) for optimizer in optimizers]
        self._trained: Sequence[torch.optim.Optimizer] = ()

    def begin_step(self, optimizers: Sequence[int]) -> None:
        self._trained = [self._optimizers[index] for index in optimizers]
        for index, optimizer in zip(optimizers, self._trained, strict=True):
            if self._trainable[index].has_changed(optimizer):
                self._exchange.retire(optimizer)
                self._distribute(optimizer, adopt=False)
                self._trainable[index] = Trainable(self._model, optimizer)

    def begin_pass(self, step: int, share: int, number: int, is_last: bool) -> None:
        for optimizer in self._trained:
            self._exchange.begin_pass(optimizer)

    def reduce_gradients(self) -> bool:
        for optimizer in self._trained if self._exchange.size == 1 else ():  # others check theirs
            self._trainable[self._optimizers.index(optimizer)].check(optimizer)
        reduce = partial(self._exchange.reduce_gradients, look=True)
        return all([*map(reduce, self._trained)])

    def states(self) -> list[WorkerState]:
        buffers = copied_to_cpu(buffers_of(self._model))
        return [{"buffers": buffers, "rng": rng_state(self._device)}]

    def restore(
        self, states: Sequence[WorkerState], models: Sequence[torch.nn.Module]
    ) -> str | None:
        """Restore buffers and random generators, for which the run continues bit for bit. With
        another number of ranks the averaged running statistics are kept, and only ranks that
        existed before restore random generators.
        """
        rank, size = self._exchange.rank, self._exchange.size
        if rank < len(states):
            set_rng_state(states[rank]["rng"], self._device)
        if len(states) != size:
            synchronised = has_batch_norm(self._model, SyncBatchNorm)
            is_averaged = has_batch_norm(self._model) and not synchronised
            return _describe_loss(len(states), size, is_averaged)
        for model in models:
            load_buffers(model, states[rank]["buffers"])
        return None

    @contextmanager
    def statistics(self, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """Collective: yield `model` with averaged statistics, and the other buffers of rank 0."""
        with (
            averaged_statistics(model, self._exchange, own_weight=float(self._samples)),
            with_buffers_of_rank_0(model, self._exchange),
        ):
            yield model

    def differing_buffers(self) -> list[str]:
        return differing_buffers(self._model, self._exchange)

    def close(self) -> None:
        for optimizer in self._optimizers:
            self._exchange.retire(optimizer)


class VirtualWorkers(Workers):
    """The virtual workers of a rank: consecutive ones, perhaps none."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        exchange: Exchange,
        shares: VirtualShares,
        seed: int,
        batch: int,
    ) -> None:
        """Prepare sums and buffers. `batch`: samples of a full global batch, for statistics."""
        self._model, self._exchange, self._seed = model, exchange, seed
        self._shares, self._samples = shares, shares.sizes(batch)
        self._optimizers, self._rows = optimizers, shares.rows
        self._named = [*model.named_parameters()]
        self._sums_of = [self._sums_for(index) for index in range(len(optimizers))]
        self._sums: Sequence[CanonicalSums] = ()  # of the optimizers that are trained
        self._buffers = {share: buffers_of(model) for share in shares.of_rank(exchange.rank)}
        self._loaded: int | None = None  # the worker whose buffers the model has
        self._current: int | None = None  # the worker of the last pass of this step
        self._before: list[tuple[str, torch.Tensor, int]] = []  # versions as the step began
        self._first_hash: str | None = ""  # of the parameters, when the first step began

    def _sums_for(self, index: int) -> CanonicalSums:
        return CanonicalSums(
            self._model, self._optimizers[index], self._rows, self._exchange, index
        )

    def begin_step(self, optimizers: Sequence[int]) -> None:
        for index in optimizers:
            if self._sums_of[index].are_of_others():
                self._sums_of[index].close()
                check_model(self._model)
                agree_on_layout(self._exchange, self._model, self._optimizers[index])
                self._sums_of[index] = self._sums_for(index)
        self._current, self._sums = None, [self._sums_of[index] for index in optimizers]
        self._before = [(name, value, value._version) for name, value in self._named]
        if self._first_hash == "":
            self._first_hash = params_sha256(self._model, with_buffers=False)
        for sums in self._sums:
            sums.begin(min(self._shares.of_rank(self._exchange.rank), default=0))

    def begin_pass(self, step: int, share: int, number: int, is_last: bool) -> None:
        if self._current not in (None, share):
            for sums in self._sums:
                sums.next_share()
        self._current = share
        for sums in self._sums:
            sums.begin_pass(is_last)
        self.repeat_pass(step, share, number)

    def repeat_pass(self, step: int, share: int, number: int) -> None:
        self._load(share)
        self.seed(step, share, number, reading=False)

    @contextmanager
    def kept(self) -> Iterator[None]:
        self._keep()
        before = dict(self._buffers)
        yield
        self._buffers, self._loaded = before, None

    def seed(self, step: int, share: int, number: int, reading: bool) -> None:
        # Reading has numbers of its own: a data loader draws some each time that it starts.
        seed_all(self._seed, step, share, number, int(reading))

    def reduce_gradients(self) -> bool:
        self._refuse_changed_parameters()
        return all([sums.finish() for sums in self._sums])  # noqa: C419  (each is finished)

    def _refuse_changed_parameters(self) -> None:
        """Raise TrainingError if a pass has changed parameters: each share would see other ones.

        Changes through `.data` are detected in the first step only.
        """
        changed = [name for name, value, version in self._before if value._version != version]
        if self._first_hash and not changed:
            now = params_sha256(self._model, with_buffers=False)
            changed = ["one that is changed through .data"] if now != self._first_hash else []
        self._first_hash = None
        if changed:
            raise TrainingError(
                "--virtual-workers: a forward pass has changed "
                f"{counted(len(changed), 'parameter')} ({changed[0]}). Virtual workers compute one "
                "after another, so later ones would see other values. Change parameters by the "
                "optimizer alone, or make it a buffer, of which each virtual worker has its own"
            )

    def states(self) -> list[WorkerState]:
        self._keep()
        held = sorted(self._buffers.items())
        return [{"buffers": copied_to_cpu(buffers), "rng": None} for _, buffers in held]

    def restore(
        self, states: Sequence[WorkerState], models: Sequence[torch.nn.Module]
    ) -> str | None:
        self._receive({share: states[share]["buffers"] for share in self._buffers})
        return None

    def reassign(self) -> None:
        """Collective: exchange the buffers of the workers that belong to another rank now."""
        self._keep()
        self._receive(exchanged(self._buffers, self._shares, self._exchange))

    def _receive(self, buffers: Mapping[int, Buffers]) -> None:
        """Take over the buffers of workers."""
        for share, held in buffers.items():
            load_buffers(self._model, held)
            self._buffers[share] = buffers_of(self._model)
        self._loaded = None  # the model may have other buffers than any worker

    def statistics(self, model: torch.nn.Module) -> AbstractContextManager[torch.nn.Module]:
        """Collective: return a context of `model` with averaged running statistics, and otherwise
        the buffers of the last worker, which has samples in every batch.
        """
        if next(slots_of(model), None) is None:
            return nullcontext(model)
        self._keep()
        last = len(self._samples) - 1
        buffers = [copied_to_cpu(self._buffers[last])] if last in self._buffers else []
        gathered = self._exchange.all_gather_object(buffers, "hvdtrain.virtual.buffers")
        (common,) = itertools.chain.from_iterable(gathered)
        return replaced(model, common | self._averages())

    def close(self) -> None:
        for sums in self._sums_of:
            sums.close()

    def _averages(self) -> dict[str, torch.Tensor]:
        """Collective: return running statistics averaged over workers, weighted by samples."""
        if not (names := running_statistics(self._model)):
            return {}
        lengths = [self._model.get_buffer(name).numel() for name in names]
        table = torch.zeros((len(self._samples), sum(lengths)), dtype=torch.float64)
        for share, held in self._buffers.items():
            table[share] = torch.cat([b.reshape(-1) for n in names if (b := held[n]) is not None])
        table = self._exchange.sum_later(table, "hvdtrain.virtual.statistics")()
        weights = torch.tensor(self._samples, dtype=torch.float64)
        averages = (table * weights[:, None]).sum(0) / weights.sum()
        return dict(zip(names, averages.split(lengths), strict=True))

    def _load(self, share: int) -> None:
        """Give the model the buffers of a worker."""
        if share != self._loaded:
            self._keep()
            load_buffers(self._model, self._buffers[share])
            self._loaded = share

    def _keep(self) -> None:
        """Copy the model's buffers back to the worker that they are of."""
        if self._loaded is not None:
            self._buffers[self._loaded] = buffers_of(self._model)


def _describe_loss(before: int, now: int, is_averaged: bool) -> str:
    change = "start at the seed" if now > before else "are dropped"
    ranks = name_ranks([*range(min(before, now), max(before, now))])
    return (
        f"{counted(now, 'worker')} instead of {before}: the random numbers of {ranks} {change}"
        + "; running statistics are the average of the old ranks'" * is_averaged
    )
