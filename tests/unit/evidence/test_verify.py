"""verify against a second implementation of the collectives: our ring, over threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hvdtrain.evidence.verify import DTYPES, FAULTS, OPERATIONS, collectives
from hvdtrain.evidence.verify.cases import Case, make_values, plan_cases
from hvdtrain.evidence.verify.collectives import FaultyRunner, Runner, Tensors
from hvdtrain.evidence.verify.running import Result, run_cases
from hvdtrain.evidence.verify.verification import as_json, explain, table_row
from hvdtrain.ring import Transport, all_reduce, broadcast, split_evenly
from hvdtrain.ring.bound import sum_error_bound
from tests.rings import run_in_process

SIZES = (0, 4, 52, 1028)
Spoil = Callable[[Case, Tensors, int, int], Tensors]  # (case, results, step, rank)


class RingCollectives:
    """Collectives made of the ring's, for one rank. How tensors are submitted changes nothing."""

    def __init__(self, transport: Transport) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self._transport = transport

    def collective(
        self, kind: str, tensors: Tensors, name: str, submission: str, op: str = "", root: int = 0
    ) -> Tensors:
        if kind == "allgather":
            return self.all_gather(tensors, name, submission)
        if kind == "broadcast":
            return self.broadcast(tensors, root, name, submission)
        reduce = {"allreduce": self.all_reduce, "reducescatter": self.reduce_scatter}[kind]
        return reduce(tensors, op, name, submission)

    def all_reduce(self, tensors: Tensors, op: str, name: str, submission: str) -> Tensors:
        with np.errstate(all="ignore"):
            return [
                torch.from_numpy(all_reduce(tensor.numpy(), self._transport, op=op))
                for tensor in tensors
            ]

    def reduce_scatter(self, tensors: Tensors, op: str, name: str, submission: str) -> Tensors:
        reduced = self.all_reduce(tensors, op, name, submission)
        return [whole[split_evenly(len(whole), self.size)[self.rank]].clone() for whole in reduced]

    def all_gather(self, tensors: Tensors, name: str, submission: str) -> Tensors:
        gathered = []
        for tensor in tensors:
            parts = []
            for root in range(self.size):
                length = np.array([len(tensor)])
                broadcast(length, self._transport, root)
                part = tensor.numpy().copy() if root == self.rank else None
                if part is None:
                    part = np.zeros(length[0], tensor.numpy().dtype)
                broadcast(part, self._transport, root)
                parts.append(torch.from_numpy(part))
            gathered.append(torch.cat(parts))
        return gathered

    def broadcast(self, tensors: Tensors, root: int, name: str, submission: str) -> Tensors:
        copies = [tensor.clone() for tensor in tensors]
        for copy in copies:
            broadcast(copy.numpy(), self._transport, root)
        return copies


class Spoiled:
    """A runner whose results a test changes at will."""

    spoiled = False

    def __init__(self, honest: Runner, rank: int, spoil: Spoil) -> None:
        self._honest = honest
        self.ran_on, self.seconds = honest.ran_on, 1e-3
        self._rank = rank
        self._spoil = spoil

    def run(self, case: Case, inputs: Tensors, name: str, step: int) -> Tensors:
        results = self._honest.run(case, inputs, name, step)
        return self._spoil(case, results, step, self._rank)


def verify(
    size: int,
    operations: tuple[str, ...] = OPERATIONS,
    dtypes: tuple[str, ...] = DTYPES,
    fault: str | None = None,
    spoil: Spoil | None = None,
    claimed: bool = True,
    sizes: tuple[int, ...] = SIZES,
) -> list[Result]:
    """Rank 0's results; every rank must have come to the same."""

    def work(transport: Transport) -> list[Result]:
        runner: Any = Runner(RingCollectives(transport))
        if fault:
            runner = FaultyRunner(RingCollectives(transport), fault, transport, seed=4)
        if spoil:
            runner = Spoiled(runner, transport.rank, spoil)
        cases = plan_cases(operations, dtypes, sizes, size)
        return list(run_cases(cases, runner, transport, 0, lambda case: claimed))

    by_rank = run_in_process(size, work)
    texts = [[as_json(result) for result in results] for results in by_rank]
    assert all(text == texts[0] for text in texts)
    return by_rank[0]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_honest_collectives_are_right(size: int) -> None:
    """Fails on a false alarm: special values, empty shares, uneven lengths, integer averages."""
    results = verify(size)
    wrong = [explain(result, 0) for result in results if not result.ok]
    assert wrong == []
    assert {result.case.operation.name for result in results} == set(OPERATIONS)
    assert {result.case.submission for result in results} == {"alone", "together", "grouped"}
    rounded = [result.worst for result in results if result.case.dtype == "float32"]
    assert max(rounded) > 0.1  # else the bound would say little


FOUND_IN = {
    "bitflip": (set(OPERATIONS), set(DTYPES)),
    "drop-rank": ({name for name in OPERATIONS if name.endswith(("sum", "average"))}, set(DTYPES)),
    "sum-for-mean": ({"allreduce-average", "reducescatter-average"}, set(DTYPES)),
    "mean-for-sum": ({"allreduce-sum", "reducescatter-sum"}, set(DTYPES)),
    "swap-results": (set(OPERATIONS), set(DTYPES)),
    "stale": (set(OPERATIONS), set(DTYPES)),
    "nan": (set(OPERATIONS), {"float16", "float32", "float64"}),
    "half-precision": (set(OPERATIONS), {"float32", "float64"}),
}


@pytest.mark.parametrize("fault", FOUND_IN)
def test_every_fault_is_found_where_it_means_something(fault: str) -> None:
    """Fails if a row has the fault and none of it is found, or one that cannot have it is blamed.

    Within a row single cases may lie below the bound: a flipped low bit of a rank's own share, or
    a value that float16 can hold.
    """
    operations, dtypes = FOUND_IN[fault]
    results = verify(3, fault=fault, sizes=(0, 260))
    for result in results:
        assert result.ok or result.spoiled, explain(result, 0)
    found = {(r.case.operation.name, r.case.dtype) for r in results if not r.ok}
    expected = {(operation, dtype) for operation in operations for dtype in dtypes}
    assert found == expected
    spoiled = [result for result in results if result.spoiled]
    missed = [result for result in spoiled if result.ok]
    assert len(missed) <= 0.15 * len(spoiled)


@pytest.mark.parametrize("fault", ["drop-rank", "sum-for-mean", "stale"])
def test_a_fault_of_all_ranks_is_called_one_of_the_reduction(fault: str) -> None:
    """Fails if ranks that agree on a wrong value are taken for a delivery that failed."""
    results = verify(3, ("allreduce-average",), ("float64",), fault)
    text = explain(next(result for result in results if not result.ok), 2)
    assert "wrong result: allreduce-average float64, 8 B, alone, ordinary values" in text
    assert "ranks 0, 1, 2: tensor 0, index 0: value " in text
    assert "all 3 ranks agree on the wrong value: suspect the reduction" in text
    assert "wrong cases besides this one: 2" in text


def add_on_last_rank(amount: float) -> Spoil:
    def spoil(case: Case, results: Tensors, step: int, rank: int) -> Tensors:
        if rank == 2 and len(results[-1]):
            results[-1][-1] += amount
        return results

    return spoil


def test_a_fault_of_one_rank_is_called_one_of_delivery() -> None:
    """Fails if the odd rank, the tensor or the index is not named."""
    results = verify(3, ("allreduce-sum",), ("int64",), spoil=add_on_last_rank(7))
    (result,) = (r for r in results if r.case.submission == "grouped")
    last = len(result.case.lengths) - 1
    text = explain(result, 0)
    assert f"  rank 2: tensor {last}, index {result.case.lengths[-1] - 1}: value " in text
    assert "error 7, bound 0" in text
    assert "rank 2 differs from the others: suspect delivery" in text


@pytest.mark.parametrize(("size", "blamed"), [(3, "rank 2 differs"), (2, "the ranks hold")])
def test_a_difference_within_the_bound(size: int, blamed: str) -> None:
    """Fails if ranks may differ by a last bit, or the place of the difference is not found."""

    def spoil(case: Case, results: Tensors, step: int, rank: int) -> Tensors:
        if rank == size - 1 and case.submission == "alone" and len(results[0]) == 257:
            results[0].view(torch.int32)[200] ^= 1
        return results

    results = verify(size, ("allreduce-average",), ("float32",), spoil=spoil)
    (result,) = (r for r in results if not r.ok)
    assert result.worst <= 1
    text = explain(result, 0)
    assert f"rank {size - 1}: tensor 0, index 200: value " in text
    assert "both are within the bound" in text
    assert blamed in text


@pytest.mark.parametrize("claimed", [True, False])
def test_results_that_do_not_repeat(claimed: bool) -> None:
    """Fails if a change between runs is not judged where repeatability is claimed, or else is."""

    def spoil(case: Case, results: Tensors, step: int, rank: int) -> Tensors:
        if step == 2 and case.submission == "alone" and len(results[0]) == 257:
            results[0].view(torch.int32)[3] ^= 1
        return results

    results = verify(2, ("allreduce-average",), ("float32",), spoil=spoil, claimed=claimed)
    changed = [result for result in results if not result.repeatable]
    assert len(changed) == 1
    assert [result.ok for result in changed] == [not claimed]
    assert "3 runs on the same values differ in their bits" in explain(changed[0], 0)


@pytest.mark.parametrize("wrong_length", [0, 1, 258])
def test_a_result_of_the_wrong_length(wrong_length: int) -> None:
    """Fails if a result that is cut off, or too long, passes or raises."""

    def spoil(case: Case, results: Tensors, step: int, rank: int) -> Tensors:
        if len(results[0]) == 257 and len(results) == 1:
            return [torch.ones(wrong_length)]
        return results

    results = verify(2, ("allreduce-sum",), ("float32",), spoil=spoil)
    (result,) = (r for r in results if not r.ok)
    assert f"of {wrong_length} elements" in explain(result, 0)


def test_what_is_carried_keeps_every_bit() -> None:
    """Fails if a NaN whose payload was changed on the way counts as the same."""

    def spoil(case: Case, results: Tensors, step: int, rank: int) -> Tensors:
        if case.values == "special":
            bits = results[0].view(torch.int32)
            nan = int(results[0].isnan().nonzero()[0])
            bits[nan] ^= 1
        return results

    results = verify(2, ("broadcast",), ("float32",), spoil=spoil)
    assert [r.case.values for r in results if not r.ok] == ["special"]


def test_the_bound_of_a_sum_by_hand() -> None:
    """Fails if it is not N - 1 roundings of float32, 2 N of float64, and the flushed subnormals."""
    bound = float(sum_error_bound(np.array([8.0]), 3, np.dtype(np.float32))[0])
    u, v = 2.0**-24, 2.0**-53
    by_hand = 8 * (2 * u / (1 - 2 * u) + 6 * v / (1 - 6 * v)) + 2 * 2.0**-126
    assert bound == pytest.approx(by_hand, rel=1e-12)


def test_values_differ_by_rank_tensor_position_and_seed() -> None:
    """Fails if anything that is mixed up could pass."""
    (case,) = (
        c for c in plan_cases(["allreduce-sum"], ["float64"], SIZES, 3) if c.submission == "grouped"
    )
    seen = [
        float(value)
        for seed in (0, 1)
        for rank in range(3)
        for tensor in make_values(case, rank, 3, seed)
        for value in tensor
    ]
    assert len(set(seen)) == len(seen)
    lengths = case.lengths
    assert all(lengths.count(length) >= 2 for length in lengths)  # each has one to be swapped with


def test_bus_bandwidth_by_hand() -> None:
    """Fails if it is not nccl-tests' busbw for these four kinds of collective."""
    results = verify(
        4, ("allreduce-sum", "reducescatter-sum", "allgather", "broadcast"), ("int32",)
    )
    parts = {"allreduce": 1.5, "reducescatter": 0.75, "allgather": 0.75 * 4, "broadcast": 1.0}
    for result in results:
        factor = parts[result.case.operation.kind]
        expected = factor * result.case.bytes / result.seconds
        assert result.bus_bandwidth == pytest.approx(expected)


def test_the_row_of_the_table() -> None:
    """Fails if a row does not show its sizes, cases, the worst error and the verdict."""
    honest = verify(3, ("allreduce-average",), ("float32",))
    fields = table_row(honest).split()
    assert fields[:8] == [
        "allreduce-average",
        "float32",
        "0",
        "B",
        "-",
        "1",
        "KiB",
        str(len(honest)),
    ]
    assert fields[9:11] == ["yes", "yes"]
    assert fields[-1] == "right"
    faulty = verify(3, ("allreduce-average",), ("float32",), fault="bitflip")
    assert " NO " in table_row(faulty)
    assert table_row(faulty).endswith(f"WRONG in {sum(not r.ok for r in faulty)}")


def test_the_names_of_the_command_line() -> None:
    """Fails if a flag offers a fault that does not exist, or leaves one out."""
    assert tuple(collectives.FAULTS) == FAULTS
