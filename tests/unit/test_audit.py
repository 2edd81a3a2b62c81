"""The audit over an in-process ring: it finds what is wrong, names it, and lets the right pass."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hvdtrain.audit import Auditor, AuditRecord
from hvdtrain.errors import AuditMismatch
from hvdtrain.ring import Transport
from hvdtrain.ring.transports.in_process import run_in_process

SHAPES = {"weight": (4, 5), "bias": (4,), "scale": (), "unused": (3,)}
Fault = Callable[[int, dict[str, torch.Tensor]], None]


class Model(torch.nn.Module):
    """Parameters of several shapes, one of which gets no gradient, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        for name, shape in SHAPES.items():
            value = torch.randn(shape, generator=generator)
            self.register_parameter(name, torch.nn.Parameter(value))
        self.register_parameter("frozen", torch.nn.Parameter(torch.ones(2), requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.linear(x, self.weight, self.bias) * self.scale).square()


def audited_steps(
    size: int, fault: Fault, steps: int = 3, every: int = 1, empty_rank: int | None = None
) -> list[tuple[list[AuditRecord], str]]:
    """Each rank's records and the text of its mismatch, after steps of backward and averaging."""
    gradients: list[dict[str, torch.Tensor]] = [{} for _ in range(size)]
    barrier = threading.Barrier(size, timeout=30)

    def work(transport: Transport) -> tuple[list[AuditRecord], str]:
        model = Model()
        records: list[AuditRecord] = []
        audit = Auditor(model, transport, every, records.append)
        for step in range(1, steps + 1):
            model.zero_grad()
            audit.begin(step)
            if transport.rank != empty_rank:
                inputs = torch.arange(10.0).reshape(2, 5) + 10 * transport.rank + step
                model(inputs / 10).sum().backward()
            gradients[transport.rank] = {
                name: p.grad if p.grad is not None else torch.zeros_like(p)
                for name, p in model.named_parameters()
                if p.requires_grad
            }
            barrier.wait()
            averages = {
                name: sum(own[name] for own in gradients) * torch.tensor(1 / size)
                for name in gradients[0]
            }
            barrier.wait()
            if step == steps:
                fault(transport.rank, averages)
            for name, parameter in model.named_parameters():
                parameter.grad = averages.get(name)
            try:
                audit.end(step)
            except AuditMismatch as error:
                return records, str(error)
        return records, ""

    return run_in_process(size, work)


def nothing(rank: int, averages: dict[str, torch.Tensor]) -> None:
    """No fault."""


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("empty_rank", [None, 0])
def test_honest_averages_pass(size: int, empty_rank: int | None) -> None:
    """Fails on a false alarm, also where a rank has no samples and so no gradients, or if an audit
    is counted where no rank has any.
    """
    for records, text in audited_steps(size, nothing, empty_rank=empty_rank):
        assert text == ""
        nobody = size == 1 and empty_rank == 0
        assert [record.step for record in records] == ([] if nobody else [1, 2, 3])
        assert all(record.ok and record.worst_error_over_bound <= 1 for record in records)
        assert all(record.parameters == 4 and record.elements == 28 for record in records)


def test_only_every_kth_step_is_audited() -> None:
    """Fails if audits happen at other steps, or hooks outlive their step."""
    for records, _ in audited_steps(2, nothing, steps=7, every=3):
        assert [record.step for record in records] == [3, 6]


def flip_lowest_exponent_bit(rank: int, averages: dict[str, torch.Tensor]) -> None:
    if rank == 1:
        bits = averages["weight"].numpy().view(np.int32)
        bits[2, 3] ^= 1 << 23


def sum_for_mean(rank: int, averages: dict[str, torch.Tensor]) -> None:
    for gradient in averages.values():
        gradient *= 2


def one_nan(rank: int, averages: dict[str, torch.Tensor]) -> None:
    if rank == 0:
        averages["bias"][1] = float("nan")


def swapped(rank: int, averages: dict[str, torch.Tensor]) -> None:
    averages["bias"][0], averages["bias"][1] = (
        averages["bias"][1].clone(),
        averages["bias"][0].clone(),
    )


def unused_is_touched(rank: int, averages: dict[str, torch.Tensor]) -> None:
    averages["unused"][2] = 1e-3


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (flip_lowest_exponent_bit, ["rank 1: parameter weight, index [2, 3]"]),
        (sum_for_mean, ["rank 0: parameter", "rank 1: parameter", "rank 2: parameter"]),
        (one_nan, ["rank 0: parameter bias, index [1]", "error nan"]),
        (swapped, ["parameter bias, index ["]),
        (unused_is_touched, ["parameter unused, index [2]", "reduced 0.00100000005, reference 0"]),
    ],
)
def test_a_fault_is_found_on_all_ranks_and_named(fault: Fault, expected: list[str]) -> None:
    """Fails if a fault passes, is put on the wrong rank or element, or only some ranks stop."""
    outcomes = audited_steps(3, fault)
    for records, text in outcomes:
        assert text == outcomes[0][1]
        assert text.startswith("audit: reduced gradients are wrong at step 3")
        assert all(part in text for part in [*expected, "bound"]), text
        assert [record.ok for record in records] == [True, True, False]
    if fault in (flip_lowest_exponent_bit, one_nan):
        assert text.count("parameter") == 1  # the other ranks hold the right values


def test_accumulated_gradients_are_captured_whole() -> None:
    """Fails if the copy of an earlier backward pass is compared instead of the accumulated one."""

    def work(transport: Transport) -> bool:
        model = Model()
        records: list[AuditRecord] = []
        audit = Auditor(model, transport, 1, records.append)
        audit.begin(1)
        for micro_batch in range(3):
            model(torch.full((2, 5), 1.0 + micro_batch)).sum().backward()
        audit.end(1)
        return records[0].ok

    assert run_in_process(1, work) == [True]
