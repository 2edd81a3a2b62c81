"""The trace of a run: digests of recorded steps, from which each of them can be checked later.

A record holds the digests of the sample numbers, of each share's batches and local gradients, of
the reduced gradients, and of the parameters after the update, with the loss and the learning rate.
Whoever computes the step again, on any number of workers, finds the same digests, or learns what
was the first to differ.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hvdtrain.audit.digests import WORDS, ShareDigests, Words, digest_of, text_of
from hvdtrain.data.feeding import StepData
from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange
from hvdtrain.exchange.gradients import parameters_of
from hvdtrain.train.job import Job
from hvdtrain.train.metering import StepSums

LOSS_ROUNDING = 1e-12  # of the mean: float64, added in another order


@dataclass(frozen=True)
class StepConditions:
    """What may change when a run is resumed, and yet decides a step's bits.

    Of runs with virtual workers only the first two do.
    """

    total_steps: int  # of the run: schedules refer to it
    threads: int  # compute threads of a rank
    since: int = 0  # the step from which a run with these ranks was started or resumed
    order: str | None = None  # name of the order in which ranks are added, if it is known
    weights: Sequence[float] = ()  # of the ranks
    bucket_bytes: int = 0  # gradients below this size were reduced together


@dataclass(frozen=True)
class TraceRecord:
    """The digests of one step, as hexadecimal texts; empty ones for what does not exist."""

    step: int
    setting: StepConditions
    samples: str  # the numbers of the global batch, in order
    batches: Sequence[str]  # by share
    gradients: Sequence[Sequence[str]]  # by share and parameter, before they are reduced
    reduced: Sequence[str]  # by parameter
    parameters: Sequence[str]  # after the update
    loss: float | None  # mean over the global batch; None: not finite, as of a step without samples
    lr: float
    # Of each reduced gradient's elements, if only the run itself knew the order of its additions.
    sums: Sequence[float | None] = ()


class Tracer:
    """A trace of chosen steps: `on_record` is called with each record, on every rank."""

    def __init__(
        self,
        job: Job,
        exchange: Exchange,
        setting: StepConditions,
        is_due: Callable[[int], bool],
        on_record: Callable[[TraceRecord], None],
        keeps_sums: bool = False,
    ) -> None:
        """`is_due`: whether a step is recorded. `keeps_sums`: record `sums` as well."""
        self._setting = setting
        self._parameters = [p for p in job.model.parameters() if p.requires_grad]
        self._job, self._exchange = job, exchange
        self._shares = len(job.feed.shares.weights)
        self._is_due, self._on_record, self._keeps_sums = is_due, on_record, keeps_sums
        self._records = False  # this step
        self._samples = ""
        self._sums: list[float | None] = []
        self._local = ShareDigests(self._parameters)
        # Reduced gradients and parameters are on all ranks: each rank digests some of both.
        sizes = [p.numel() for p in self._parameters]
        owned = _share_out(sizes + sizes, exchange.size)[exchange.rank]
        self._reduced_numbers = [number for number in owned if number < len(sizes)]
        self._updated_numbers = [number - len(sizes) for number in owned if number >= len(sizes)]
        self._reduced = self._digests([], [])

    def begin(self, step: int, data: StepData) -> None:
        """Begin to digest, if the step is due."""
        self._records = self._is_due(step)
        if self._records:
            refuse_others(self._parameters, self._job.model, "--trace-every")
            self._samples = text_of(digest_of(torch.from_numpy(data.indices)))
            self._reduced = self._digests([], [])
            self._sums = [0.0] * len(self._parameters) if self._keeps_sums else []
            self._local.begin()

    def begin_pass(self, share: int, batch: Any) -> None:
        if self._records:
            self._local.begin_pass(share, batch)

    def reduced(self, step: int, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Digest the reduced gradients of these optimizers."""
        if not self._records:
            return
        owned = set(map(id, parameters_of(*optimizers)))
        numbers = {n for n, p in enumerate(self._parameters) if id(p) in owned}
        gradients = [p.grad for p in self._parameters]
        self._reduced += self._digests(
            gradients, [n for n in self._reduced_numbers if n in numbers]
        )
        if self._keeps_sums:
            for number in numbers:
                gradient = gradients[number]
                total = 0.0 if gradient is None else float(gradient.double().sum())
                self._sums[number] = _finite(total)

    def updated(self, step: int, sums: StepSums) -> None:
        """Collective: record the step, if it is due."""
        if not self._records:
            return
        self._local.end()
        # Rows of one length: those of the shares, of the reduced gradients, and of the parameters.
        local = self._local.table(self._shares)
        after = self._digests(self._parameters, self._updated_numbers)
        table = torch.from_numpy(np.concatenate([local, self._reduced, after]))
        table = self._exchange.begin_reduction(table, "sum", "hvdtrain.trace").wait()
        texts = [[text_of(digest) for digest in row] for row in table.numpy()]
        *of_shares, reduced, parameters = texts
        self._on_record(
            TraceRecord(
                step=step,
                setting=self._setting,
                samples=self._samples,
                batches=[row[0] for row in of_shares],
                gradients=[row[1:] for row in of_shares],
                reduced=reduced[1:],
                parameters=parameters[1:],
                loss=_finite(sums.mean_loss()),
                lr=self._job.lr,
                sums=list(self._sums),
            )
        )

    def close(self) -> None:
        """Remove the hooks."""
        self._local.end()

    def _digests(self, tensors: Sequence[torch.Tensor | None], numbers: Sequence[int]) -> Words:
        """Return a row of digests of the tensors of this rank, by number; zeros for all others.

        The first place stays empty, as a row of a share has its batches there.
        """
        row = np.zeros((1, 1 + len(self._parameters), WORDS), np.int32)
        for number in numbers:
            row[0, 1 + number] = digest_of(tensors[number])
        return row


def refuse_others(
    parameters: Sequence[torch.nn.Parameter], model: torch.nn.Module, option: str
) -> None:
    """Raise UsageError if others are trainable now than those that a record has places for."""
    now = [p for p in model.parameters() if p.requires_grad]
    if list(map(id, now)) != list(map(id, parameters)):
        raise UsageError(
            f"{option}: {len(now)} parameters are trainable now, and {len(parameters)} others were "
            "when the run was started or resumed, of which its records are. Leave it out where "
            "parameters are frozen and unfrozen in between"
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _share_out(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the numbers of the items of each rank: the largest first, to the least loaded one."""
    by_rank: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        least = loads.index(min(loads))
        by_rank[least].append(number)
        loads[least] += sizes[number]
    return by_rank


@dataclass(frozen=True)
class RecordDifference:
    """The first thing by which two computations of a step differ."""

    what: str  # one of: data order, data, gradient, reduction, update, loss
    text: str
    share: int | None = None
    parameter: str | None = None


def first_difference(
    one: TraceRecord,
    other: TraceRecord,
    names: Sequence[str],
    bounds: Sequence[float] | None = None,
) -> RecordDifference | None:
    """Return the first difference of two records of a step, in the order of computation, or None.

    `names`: the trainable parameters. `bounds`: how far rounding can move the sum of each reduced
    gradient's elements, if the two added in other orders. Without equal bits of the reduced
    gradients their updates are not compared.
    """
    return next(_differences(one, other, names, bounds), None)


def _differences(
    one: TraceRecord, other: TraceRecord, names: Sequence[str], bounds: Sequence[float] | None
) -> Iterator[RecordDifference]:
    """Yield the differences in the order of computation. Each follows from equality before it."""
    if one.samples != other.samples:
        yield RecordDifference("data order", "the numbers of the samples differ")
    if len(one.batches) != len(other.batches):
        text = f"{len(one.batches)} and {len(other.batches)} shares: other batches of each"
        yield RecordDifference("data", text)
    if shares := _unequal(one.batches, other.batches):
        yield RecordDifference("data", f"the batch of {_share(shares, one)}", shares[0])
    if len(one.reduced) != len(other.reduced):
        text = f"{len(one.reduced)} and {len(other.reduced)} trainable parameters: other models"
        yield RecordDifference("gradient", text)
    if shares := _unequal(one.gradients, other.gradients):
        numbers = _unequal(one.gradients[shares[0]], other.gradients[shares[0]])
        where = f" of {_share(shares, one)}, from equal data"
        yield _of_parameters("gradient", names, numbers, where, shares[0])
    reduced = _unequal(one.reduced, other.reduced)
    is_rounded = bool(reduced and bounds)
    if bounds:
        recorded = len(one.sums) == len(other.sums) == len(bounds)
        reduced = [
            number
            for number in range(len(one.reduced))
            if not recorded or not _are_close(one.sums[number], other.sums[number], bounds[number])
        ]
    if reduced:
        yield _of_parameters("reduction", names, reduced, ", from equal gradients of all shares")
    if one.lr != other.lr:
        yield RecordDifference("update", f"the learning rate: {one.lr} and {other.lr}")
    updated = [] if is_rounded else _unequal(one.parameters, other.parameters)
    if updated:
        yield _of_parameters("update", names, updated, ", from equal reduced gradients")
    if not _are_close(one.loss, other.loss):
        text = f"{one.loss} and {other.loss}, although all parameters agree"
        yield RecordDifference("loss", text)


def _are_close(one: float | None, other: float | None, bound: float | None = None) -> bool:
    """Return whether two numbers differ by at most `bound`, by default LOSS_ROUNDING of them."""
    if one is None or other is None:
        return one is other
    rounding = LOSS_ROUNDING if bound is None else 0.0
    return math.isclose(one, other, rel_tol=rounding, abs_tol=bound or 0.0)


def _unequal(one: Sequence[Any], other: Sequence[Any]) -> list[int]:
    return [n for n, both in enumerate(zip(one, other, strict=True)) if both[0] != both[1]]


def _of_parameters(
    what: str, names: Sequence[str], numbers: Sequence[int], where: str, share: int | None = None
) -> RecordDifference:
    first = names[numbers[0]]
    text = f"{first} ({len(numbers)} of {len(names)} parameters){where}"
    return RecordDifference(what, text, share, first)


def _share(shares: Sequence[int], record: TraceRecord) -> str:
    return f"share {shares[0]} ({len(shares)} of {len(record.batches)} shares)"
