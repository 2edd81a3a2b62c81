"""All ranks of a run without virtual workers, computed one after another in one process.

`hvdtrain replay` computes such a run again. Each rank has its part of each batch, buffers of its
own, and random generators of its own. Gradients are added in the order in which Horovod added them,
if that is known; otherwise in float64, with a bound of what the order can change.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from hvdtrain.exchange.buckets import Message
from hvdtrain.exchange.gradients import laid_out_as
from hvdtrain.ring.bound import REFERENCE_DTYPE, gamma, sum_error_bound
from hvdtrain.ring.operations import Array
from hvdtrain.ring.orders import KnownOrder, reproduce
from hvdtrain.ring.transports import Transport, in_process_ring
from hvdtrain.train.worker_state import (
    WorkerState,
    buffers_of,
    load_buffers,
    seed_all,
    set_rng_state,
    state_of_process,
)
from hvdtrain.train.workers import Workers


class SimulatedRanks(Workers):
    """The workers of `size` ranks; each is the worker of one share."""

    def __init__(
        self,
        model: torch.nn.Module,
        size: int,
        order: KnownOrder | None,
        device: torch.device,
        seed: int,
        messages: Sequence[Message],
    ) -> None:
        """Begin as the ranks did. `order`: of their sums; None: it is unknown. `messages`: the
        parameters whose gradients they reduced together.
        """
        self._model, self._order, self._device = model, order, device
        self._messages = [list(message.values()) for message in messages]
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._states: list[WorkerState] = []
        for rank in range(size):
            seed_all(seed, rank)
            self._states.append(state_of_process(model, device))
        self._first = list(self._states)
        self._active: int | None = None  # the rank whose state the process has
        self._current: int | None = None  # the rank of the last pass of this step
        self._gradients: list[list[torch.Tensor | None]] = []  # by rank
        # Of the sum of each reduced gradient's elements; None: the bits are those of the ranks.
        self.bounds: list[float] | None = None

    def begin_step(self, optimizers: Sequence[int]) -> None:
        self._current = None
        self._gradients = [[None] * len(self._parameters) for _ in self._states]

    def begin_pass(self, step: int, share: int, number: int, is_last: bool) -> None:
        if self._current not in (None, share):
            self._take()
        self._current = share
        self._activate(share)

    def repeat_pass(self, step: int, share: int, number: int) -> None:
        self._activate(share)

    def seed(self, step: int, share: int, number: int, reading: bool) -> None:
        """Activate the generators of the rank, which go on from pass to pass."""
        if step:
            self._activate(share)

    def reduce_gradients(self) -> bool:
        """Add the gradients of all ranks; a missing one counts as zeros, as in Horovod."""
        self._take()
        each = [
            {
                parameter: (torch.zeros_like(parameter) if grad is None else grad).cpu().numpy()
                for parameter, grad in zip(self._parameters, gradients, strict=True)
            }
            for gradients in self._gradients
        ]
        if self._order:
            sums = self._sums_in_order(each, self._order)
        else:
            terms = {p: [gradients[p] for gradients in each] for p in self._parameters}
            self.bounds = [_bound(gradients) for gradients in terms.values()]
            sums = {parameter: _precise_sum(gradients) for parameter, gradients in terms.items()}
        for parameter, total in sums.items():
            parameter.grad = laid_out_as(torch.from_numpy(total).to(self._device), parameter)
        return False

    def states(self) -> list[WorkerState]:
        self._keep()
        return self._states

    def restore(
        self, states: Sequence[WorkerState], models: Sequence[torch.nn.Module]
    ) -> str | None:
        """Restore buffers and random generators, as each rank did (`RankWorker.restore`)."""
        saved = list(states)
        if len(saved) != len(self._first):
            averaged = buffers_of(self._model)
            states_by_rank = [*saved, *self._first[len(saved) :]][: len(self._first)]
            saved = [{"buffers": averaged, "rng": state["rng"]} for state in states_by_rank]
        self._states, self._active = saved, None
        return None

    def _sums_in_order(
        self, each: Sequence[Mapping[torch.nn.Parameter, Array]], order: KnownOrder
    ) -> dict[torch.nn.Parameter, Array]:
        """Return the sum over ranks of each gradient; `each`: the gradients by rank."""

        def add(transport: Transport) -> list[Array]:
            grads = each[transport.rank]
            joined = [np.concatenate([grads[p].ravel() for p in part]) for part in self._messages]
            return [reproduce(message, transport, order, "sum") for message in joined]

        transports = in_process_ring(len(each))
        with ThreadPoolExecutor(len(each)) as pool:
            totals, *_ = pool.map(add, transports)  # the same on every rank
        sums = {}
        for parameters, total in zip(self._messages, totals, strict=True):
            ends = np.cumsum([p.numel() for p in parameters])[:-1]
            for parameter, part in zip(parameters, np.split(total, ends), strict=True):
                sums[parameter] = part.reshape(parameter.shape)
        return sums

    def _take(self) -> None:
        """Keep the gradients of the current rank, and leave none to the next one."""
        if self._current is not None:
            self._gradients[self._current] = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def _activate(self, rank: int) -> None:
        """Give the model the buffers, and the process the generators, of a rank."""
        if rank != self._active:
            self._keep()
            load_buffers(self._model, self._states[rank]["buffers"])
            set_rng_state(self._states[rank]["rng"], self._device)
            self._active = rank

    def _keep(self) -> None:
        if self._active is not None:
            self._states[self._active] = state_of_process(self._model, self._device)


def _precise_sum(terms: Sequence[Array]) -> Array:
    """Return the sum in float64, rounded once."""
    return np.asarray(sum(term.astype(REFERENCE_DTYPE) for term in terms)).astype(terms[0].dtype)


def _bound(terms: Sequence[Array]) -> float:
    """Return how far the sums of all elements of two sums of `terms` can differ: of one in any
    order, and of one that is rounded once.
    """
    magnitudes = np.asarray(sum(np.abs(term.astype(REFERENCE_DTYPE)) for term in terms))
    by_element = sum_error_bound(magnitudes, len(terms) + 1, terms[0].dtype)
    of_total = gamma(max(magnitudes.size, 1), REFERENCE_DTYPE) * 2 * float(magnitudes.sum())
    return float(by_element.sum()) + of_total
