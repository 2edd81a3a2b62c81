"""The run of all cases on all ranks: each is repeated, compared, and its reports exchanged.

Reports are exchanged over the ring, not through the collectives under test.
"""

import hashlib
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from hvdtrain.evidence.verify.cases import Case, make_values
from hvdtrain.evidence.verify.collectives import Runner
from hvdtrain.evidence.verify.reference import Deviation, bits_of, worst_of
from hvdtrain.ring import Transport, all_reduce, broadcast, gather
from hvdtrain.ring.operations import Array

REPEATS = 3  # runs with the same values, after one with different values


@dataclass(frozen=True)
class RankReport:
    """The report of one rank on a case."""

    finding: Deviation
    digests: list[str]  # of the results' bits, one for each run
    seconds: list[float]  # one for each run
    spoiled: bool  # a fault was injected on this rank
    difference: Deviation | None = None  # from rank 0's results, where ranks differ


@dataclass(frozen=True)
class Result:
    """The outcome of a case over all ranks."""

    case: Case
    by_rank: list[RankReport]
    repeatable_claimed: bool
    device: str = "cpu"  # the type of the tensors' device

    @property
    def wrong(self) -> list[int]:
        """The ranks with an error that rounding does not explain."""
        return [rank for rank, report in enumerate(self.by_rank) if report.finding.ratio > 1]

    @property
    def worst(self) -> float:
        return max(report.finding.ratio for report in self.by_rank)

    @property
    def bit_equal(self) -> bool | None:
        """Whether all ranks hold the same bits; None where each holds a different share."""
        if self.case.operation.kind == "reducescatter":
            return None
        return all(report.digests == self.by_rank[0].digests for report in self.by_rank)

    @property
    def repeatable(self) -> bool:
        return all(len(set(report.digests)) == 1 for report in self.by_rank)

    @property
    def spoiled(self) -> bool:
        return any(report.spoiled for report in self.by_rank)

    @property
    def ok(self) -> bool:
        repeats = self.repeatable or not self.repeatable_claimed
        return not self.wrong and self.bit_equal is not False and repeats

    @property
    def seconds(self) -> float:
        """The median over the runs of the slowest rank's time."""
        by_run = zip(*(report.seconds for report in self.by_rank), strict=True)
        return float(statistics.median(map(max, by_run)))

    @property
    def bus_bandwidth(self) -> float:
        """The bandwidth in bytes/s that each rank's link must carry: busbw of nccl-tests.

        The bytes of the whole buffer (in an all-gather, the gathered one) over the time, times the
        share that must pass a link. It is comparable with the hardware's for any N.
        """
        ranks, kind = len(self.by_rank), self.case.operation.kind
        whole = self.case.bytes * (ranks if kind == "allgather" else 1)
        passing = {"allreduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}
        return whole * passing.get(kind, (ranks - 1) / ranks) / self.seconds


def run_cases(
    cases: Sequence[Case],
    runner: Runner,
    transport: Transport,
    seed: int,
    repeatable: Callable[[Case], bool],
) -> Iterator[Result]:
    """Collective: yield the outcome of each case, the same on every rank.

    `repeatable`: whether the exchange claims the same bits in every run of a case.
    """
    for case in cases:
        report, runs = _run(case, runner, transport, seed)
        result = Result(case, _gather(report, transport), repeatable(case), runner.ran_on)
        if result.bit_equal is False and not result.wrong:
            report = replace(report, difference=_difference_from_rank_0(runs, result, transport))
            result = replace(result, by_rank=_gather(report, transport))
        yield result


def _run(
    case: Case, runner: Runner, transport: Transport, seed: int
) -> tuple[RankReport, list[list[Array]]]:
    """Collective: run and compare one case; return the report and the results of every run."""
    rank, size = transport.rank, transport.size
    # Reused for other dtypes and sizes, as by changing models: Horovod caches by name.
    name = f"verify.{case.operation.name}.{case.submission}"
    # The first run has different values: it warms up, and makes a result one step late visible.
    other, values = (make_values(case, rank, size, seed + more) for more in (1, 0))
    other = [array[::-1].copy() for array in other]
    runs: list[list[Array]] = []
    seconds, spoiled = [], False
    for step in range(1 + REPEATS):
        inputs = [torch.from_numpy(array) for array in (values if step else other)]
        all_reduce(np.zeros(size, np.int32), transport)  # waits for all ranks
        results = runner.run(case, inputs, name, step)
        if step:
            seconds.append(runner.seconds)
            runs.append([result.numpy() for result in results])
            spoiled |= runner.spoiled
    digests = [_digest(run) for run in runs]
    # Runs with the same bits need one comparison.
    distinct = list(dict(zip(digests, runs, strict=True)).values())
    finding = worst_of(case, values, distinct, transport)
    return RankReport(finding, digests, seconds, spoiled), runs


def _digest(tensors: list[Array]) -> str:
    """Return a digest of the bits, with all NaNs equal, since no standard fixes their bits."""
    digest = hashlib.sha256()
    for tensor in tensors:
        nan = np.array(np.nan if tensor.dtype.kind == "f" else 0, tensor.dtype)
        values = np.where(np.isnan(tensor), nan, tensor)
        digest.update(str(len(values)).encode())
        digest.update(values.data)
    return digest.hexdigest()[:16]


def _difference_from_rank_0(
    runs: list[list[Array]], result: Result, transport: Transport
) -> Deviation | None:
    """Collective: return the first element of this rank's results that differs from rank 0's."""
    by_run = zip(*(report.digests for report in result.by_rank), strict=True)
    run = next(number for number, digests in enumerate(by_run) if len(set(digests)) > 1)
    first: Deviation | None = None
    for tensor, local_values in enumerate(runs[run]):
        other = local_values.copy()
        broadcast(other, transport, 0)
        different = np.flatnonzero(bits_of(local_values) != bits_of(other))
        if first is None and different.size:
            index = int(different[0])
            ours, theirs = local_values[index].item(), other[index].item()
            first = Deviation(0.0, tensor, index, repr(ours), repr(theirs))
    return first


def _gather(report: RankReport, transport: Transport) -> list[RankReport]:
    """Collective: return every rank's report, in rank order, as JSON over the ring."""
    encoded = json.dumps(asdict(report)).encode()
    longest = int(gather(np.array([len(encoded)]), transport).max())
    rows = gather(np.frombuffer(encoded.ljust(longest), np.uint8), transport)
    return [json.loads(row.tobytes(), object_hook=_decoded) for row in rows]


def _decoded(fields: dict[str, Any]) -> RankReport | Deviation:
    return RankReport(**fields) if "finding" in fields else Deviation(**fields)
