"""One case after the other, on all ranks: reduced several times, compared, told to one another.

The ranks tell their findings over the ring, not through what is being verified.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from hvdtrain.lab.verify.cases import Case, make_values
from hvdtrain.lab.verify.collectives import Runner
from hvdtrain.lab.verify.reference import CHUNK, Finding, worst_of
from hvdtrain.ring import Transport, all_reduce, broadcast, gather
from hvdtrain.ring.operations import Array

REPEATS = 3  # runs with the same values, after one with others


@dataclass(frozen=True)
class Told:
    """What one rank has to say of a case."""

    finding: Finding
    digests: list[str]  # of the results' bits, one for each run
    seconds: list[float]  # one for each run
    spoiled: bool  # a fault was injected on this rank
    difference: Finding | None = None  # from rank 0's results, where ranks differ


@dataclass(frozen=True)
class Result:
    """A case's outcome, over all ranks."""

    case: Case
    by_rank: list[Told]
    repeatable_claimed: bool

    @property
    def wrong(self) -> list[int]:
        """The ranks whose results are further out than rounding explains."""
        return [rank for rank, told in enumerate(self.by_rank) if told.finding.ratio > 1]

    @property
    def worst(self) -> float:
        return max(told.finding.ratio for told in self.by_rank)

    @property
    def bit_equal(self) -> bool | None:
        """Whether all ranks hold the same bits; None where each has a share of its own."""
        if self.case.operation.kind == "reducescatter":
            return None
        return all(told.digests == self.by_rank[0].digests for told in self.by_rank)

    @property
    def repeatable(self) -> bool:
        return all(len(set(told.digests)) == 1 for told in self.by_rank)

    @property
    def spoiled(self) -> bool:
        return any(told.spoiled for told in self.by_rank)

    @property
    def ok(self) -> bool:
        repeats = self.repeatable or not self.repeatable_claimed
        return not self.wrong and self.bit_equal is not False and repeats

    @property
    def seconds(self) -> float:
        """Median over the runs of the slowest rank's time."""
        runs = range(len(self.by_rank[0].seconds))
        slowest = [max(told.seconds[run] for told in self.by_rank) for run in runs]
        return statistics.median(slowest)

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second that each rank's link must carry, as nccl-tests defines busbw.

        The bytes of the whole buffer by the time, by what of it must pass a link: 2 (N - 1) / N
        for all-reduce, (N - 1) / N for all-gather (of the gathered bytes) and reduce-scatter, 1 for
        broadcast. So it can be compared with the hardware's, for any N.
        """
        ranks = len(self.by_rank)
        kind = self.case.operation.kind
        whole = self.case.bytes * (ranks if kind == "allgather" else 1)
        passing = {"allreduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}
        part: float = passing.get(kind, (ranks - 1) / ranks)
        return whole * part / self.seconds


def run_cases(
    cases: Sequence[Case],
    runner: Runner,
    transport: Transport,
    seed: int,
    repeatable: Callable[[Case], bool],
) -> Iterator[Result]:
    """Collective: the outcome of each case, the same on every rank.

    `repeatable`: whether the exchange claims that a case comes out alike in every run.
    """
    for case in cases:
        told, runs = _run(case, runner, transport, seed)
        result = Result(case, _gather(told, transport), repeatable(case))
        if result.bit_equal is False and not result.wrong:
            difference = _difference_from_rank_0(runs, result, transport)
            told = Told(**(vars(told) | {"difference": difference}))
            result = Result(case, _gather(told, transport), result.repeatable_claimed)
        yield result


def _run(
    case: Case, runner: Runner, transport: Transport, seed: int
) -> tuple[Told, list[list[Array]]]:
    """Collective: run one case and compare; also the results of every run."""
    rank, size = transport.rank, transport.size
    # Used again for other dtypes and sizes, as changing models do: Horovod remembers names.
    name = f"verify.{case.operation.name}.{case.submission}"
    # First other values: they warm up, and a result that is a step late shows.
    values = [make_values(case, rank, size, seed + step) for step in (1, 0)]
    values[0] = [array[::-1].copy() for array in values[0]]
    runs: list[list[Array]] = []
    seconds = []
    spoiled = False
    for step in range(1 + REPEATS):
        inputs = [torch.from_numpy(array) for array in values[min(step, 1)]]
        _wait_for_all(transport)
        started = time.perf_counter()
        results = runner.run(case, inputs, name, step)
        if step:
            seconds.append(time.perf_counter() - started)
            runs.append([result.numpy() for result in results])
            spoiled |= runner.spoiled()
    digests = [_digest(run) for run in runs]
    # Runs with the same bits need one comparison.
    distinct = list(dict(zip(digests, runs, strict=True)).values())
    finding = worst_of(case, values[1], distinct, transport)
    return Told(finding, digests, seconds, spoiled), runs


def _wait_for_all(transport: Transport) -> None:
    """Collective: no rank goes on before all have come, so that times can be compared."""
    all_reduce(np.zeros(transport.size, np.int32), transport)


def _digest(tensors: list[Array]) -> str:
    """Of the bits; every kind of NaN counts as the same, since no standard promises which."""
    digest = hashlib.sha256()
    for tensor in tensors:
        values = tensor
        if tensor.dtype.kind == "f" and np.isnan(tensor).any():
            values = np.where(np.isnan(tensor), np.array(np.nan, tensor.dtype), tensor)
        digest.update(str(len(values)).encode())
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()[:16]


def _difference_from_rank_0(
    runs: list[list[Array]], result: Result, transport: Transport
) -> Finding | None:
    """Collective: the first element in which this rank's results differ from rank 0's."""
    by_rank = [told.digests for told in result.by_rank]
    run = next(number for number in range(REPEATS) if len({d[number] for d in by_rank}) > 1)
    first: Finding | None = None
    for tensor, own in enumerate(runs[run]):
        own_bytes = own.view(np.uint8)
        for start in range(0, len(own_bytes), CHUNK):
            part = own_bytes[start : start + CHUNK].copy()
            broadcast(part, transport, 0)
            (different,) = np.nonzero(part != own_bytes[start : start + CHUNK])
            if first is None and different.size:
                index = int(start + different[0]) // own.itemsize
                offset = index * own.itemsize - start
                other = part[offset : offset + own.itemsize].view(own.dtype)[0]
                first = Finding(0.0, tensor, index, repr(own[index].item()), repr(other.item()))
    return first


def _gather(told: Told, transport: Transport) -> list[Told]:
    """Collective: every rank's word, in rank order, over the ring."""
    return [_read(text) for text in _gather_texts(json.dumps(asdict(told)), transport)]


def _gather_texts(text: str, transport: Transport) -> list[str]:
    """Collective: every rank's text, in rank order."""
    encoded = text.encode()
    lengths = gather(np.array([len(encoded)]), transport)[:, 0]
    padded = np.frombuffer(encoded.ljust(int(lengths.max()), b"\0"), np.uint8)
    rows = gather(padded, transport)
    return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]


def _read(text: str) -> Told:
    fields: dict[str, Any] = json.loads(text)
    difference = fields.pop("difference")
    return Told(
        finding=Finding(**fields.pop("finding")),
        difference=difference and Finding(**difference),
        **fields,
    )
