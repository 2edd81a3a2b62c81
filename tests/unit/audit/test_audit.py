"""The audit over an in-process ring: it finds what is wrong, names it, and lets the right pass."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hvdtrain.audit import Auditor, AuditRecord
from hvdtrain.audit.checks import BoundCheck, ExactCheck
from hvdtrain.audit.script import GradientAudit
from hvdtrain.errors import AuditMismatch, UsageError
from hvdtrain.exchange import AVERAGE, SUM, Reduction
from hvdtrain.ring import Transport, split_evenly
from hvdtrain.ring.orders import OPEN_MPI_RING
from tests.rings import run_in_process
from tests.unit.commands import run_code

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
    size: int,
    fault: Fault,
    steps: int = 3,
    every: int = 1,
    empty_rank: int | None = None,
    exact: bool = False,
    reduction: Reduction = AVERAGE,
    buckets: Sequence[Sequence[str]] = (),
    **options: Any,
) -> list[tuple[list[AuditRecord], str]]:
    """Each rank's records and the text of its mismatch, after steps of backward and averaging.

    `buckets`: names of parameters that are reduced together; all others alone.
    """
    gradients: list[dict[str, torch.Tensor]] = [{} for _ in range(size)]
    barrier = threading.Barrier(size, timeout=30)

    def work(transport: Transport) -> tuple[list[AuditRecord], str]:
        model = Model()
        records: list[AuditRecord] = []
        check: Any = BoundCheck(transport, reduction)
        if exact:
            check = ExactCheck(transport, OPEN_MPI_RING, reduction)
        audit = Auditor(model, transport, every, records.append, check, **options)
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
            reduced = {
                name: value
                for names in in_buckets(gradients[0], buckets)
                for name, value in reduce_together(names, gradients, reduction).items()
            }
            barrier.wait()
            if step == steps:
                fault(transport.rank, reduced)
            for name, parameter in model.named_parameters():
                parameter.grad = reduced.get(name)
            try:
                audit.reduced(step)
            except AuditMismatch as error:
                return records, str(error)
        return records, ""

    return run_in_process(size, work)


def in_buckets(names: Iterable[str], buckets: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    bucketed = [name for bucket in buckets for name in bucket]
    return [*buckets, *([name] for name in names if name not in bucketed)]


def reduce_together(
    names: Sequence[str], gradients: list[dict[str, torch.Tensor]], reduction: Reduction
) -> dict[str, torch.Tensor]:
    """Reduce these gradients of all ranks as one tensor."""
    joined = [torch.cat([own[name].reshape(-1) for name in names]) for own in gradients]
    shapes = [gradients[0][name].shape for name in names]
    parts = reduce(joined, reduction).split([shape.numel() for shape in shapes])
    return {name: it.reshape(s) for name, it, s in zip(names, parts, shapes, strict=True)}


def reduce(terms: list[torch.Tensor], reduction: Reduction) -> torch.Tensor:
    """As Open MPI's ring and Horovod do it: segment k is added from rank k on; an average is that
    times 1/N.
    """
    size, dtype = len(terms), terms[0].dtype
    compressed = reduction.compression == "fp16"
    if compressed:
        terms = [term.half() for term in terms]
    total = torch.empty_like(terms[0]).reshape(-1)
    flat = [term.reshape(-1) for term in terms]
    if len(total) < size:  # a tree of pairs; up to three ranks it is ((0 + 1) + 2)
        total = functools.reduce(torch.add, flat)
    else:
        for k, part in enumerate(split_evenly(len(total), size)):
            order = [flat[(k + step) % size][part] for step in range(size)]
            total[part] = functools.reduce(torch.add, order)
    if reduction.op == "average":
        scaled = (total.float() if compressed else total) * torch.tensor(1 / size)
        total = scaled.to(total.dtype)
    return total.to(dtype).reshape(terms[0].shape)


def nothing(rank: int, averages: dict[str, torch.Tensor]) -> None:
    """No fault."""


REDUCTIONS = [
    Reduction(op, compression) for op in ("sum", "average") for compression in ("none", "fp16")
]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("empty_rank", [None, 0])
@pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
def test_honest_values_pass(size: int, empty_rank: int | None, reduction: Reduction) -> None:
    """Fails on a false alarm, also where a rank has no samples and so no gradients, or if an audit
    is counted where no rank has any.
    """
    found = audited_steps(size, nothing, empty_rank=empty_rank, reduction=reduction)
    for records, text in found:
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
        audit.reduced(1)
        return records[0].ok

    assert run_in_process(1, work) == [True]


WRONG_COPY = ["Rank 1: the copy there differs from that of ranks 0, 2, which is right"]
WRONG_SUM = ["All ranks hold the same wrong values: the reduction is at fault"]


def lowest_bit_on_rank_1(rank: int, averages: dict[str, torch.Tensor]) -> None:
    if rank == 1:
        averages["weight"].numpy().view(np.int32)[3, 1] ^= 1


def lowest_bit_everywhere(rank: int, averages: dict[str, torch.Tensor]) -> None:
    averages["weight"].numpy().view(np.int32)[3, 1] ^= 1


def lost_rank(rank: int, averages: dict[str, torch.Tensor]) -> None:
    for gradient in averages.values():
        gradient *= 0.99


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (flip_lowest_exponent_bit, ["are wrong", *WRONG_COPY]),
        (lost_rank, ["are wrong", *WRONG_SUM]),
        (swapped, ["are wrong", *WRONG_SUM]),
        (
            lowest_bit_on_rank_1,
            ["ranks hold different reduced gradients", "rank 1: parameter weight, index [3, 1]"]
            + ["on ranks 0, 2 (both within the rounding bound)", *WRONG_COPY],
        ),
    ],
)
def test_the_verdict_distinguishes_reduction_from_delivery(fault, expected, parts: int) -> None:
    """Fails if the wrong side is blamed, or a copy that has drifted within the bound passes.

    With three parts one of the three audits of a cycle comes to where the fault is.
    """
    for steps in range(parts + 1, 2 * parts + 1):
        outcomes = audited_steps(3, fault, steps=steps, parts=parts)
        if outcomes[0][1]:
            break
    for records, text in outcomes:
        assert not records[-1].ok and text == outcomes[0][1]
        assert all(part in text for part in expected), text


def test_two_ranks_that_differ_within_the_bound() -> None:
    """Fails if nobody notices, where no majority shows which of the two is right."""
    outcomes = audited_steps(2, lowest_bit_on_rank_1)
    assert all("index [3, 1]: reduced" in text for _, text in outcomes)
    assert all(records[-1].worst_parameter == "weight" for records, _ in outcomes)


def damaged_and_lost(rank: int, averages: dict[str, torch.Tensor]) -> None:
    sum_for_mean(rank, averages)
    flip_lowest_exponent_bit(rank, averages)


def test_the_majority_may_be_wrong_too() -> None:
    """Fails if ranks that agree on a wrong value are called right."""
    for _, text in audited_steps(3, damaged_and_lost):
        assert "Rank 1 and ranks 0, 2 hold different values, and neither are right" in text


@pytest.mark.parametrize("parts", [1, 2])
def test_parts_cover_everything(parts: int) -> None:
    """Fails if sampled audits leave elements out, or their numbers are not what was looked at."""
    for records, text in audited_steps(3, nothing, steps=2 * parts, parts=parts):
        assert text == ""
        assert sum(record.elements for record in records) == 2 * 28
        assert max(record.parameters for record in records) <= 4


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("reduction", REDUCTIONS, ids=str)
@pytest.mark.parametrize("parts", [1, 2])
def test_exact_audits_let_the_known_order_pass(size: int, reduction: Reduction, parts: int) -> None:
    """Fails if the order is reproduced with one rounding too many, or a parameter is cut."""
    outcomes = audited_steps(size, nothing, steps=4, exact=True, reduction=reduction, parts=parts)
    for records, text in outcomes:
        assert text == ""
        assert [record.worst_error_over_bound for record in records] == [0.0] * 4


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("parts", [1, 2])
def test_exact_audits_know_what_is_reduced_together(told: bool, parts: int) -> None:
    """Fails if the order of addition within a bucket is not that of one tensor, or if the test
    cannot tell: without knowledge of the bucket bits must differ.
    """
    buckets = [["weight", "scale"], ["bias", "unused"]]
    messages = (lambda: [dict.fromkeys(names) for names in buckets]) if told else None
    outcomes = audited_steps(
        3, nothing, steps=4, exact=True, buckets=buckets, messages=messages, parts=parts
    )
    for _, text in outcomes:
        assert told == (text == ""), text


@pytest.mark.parametrize("exact", [False, True])
def test_a_sum_is_no_average(exact: bool) -> None:
    """Fails if an audit takes one for the other."""

    def averaged(rank: int, sums: dict[str, torch.Tensor]) -> None:
        for gradient in sums.values():
            gradient /= 3

    for _, text in audited_steps(3, averaged, exact=exact, reduction=SUM):
        assert all(line in text for line in ("rank 1: parameter", *WRONG_SUM)), text


@pytest.mark.parametrize("fault", [lowest_bit_everywhere, lowest_bit_on_rank_1])
def test_exact_audits_find_one_lowest_bit(fault: Fault) -> None:
    """Fails if a bit within the bound passes, though the order of summation is known."""
    for records, text in audited_steps(3, fault, exact=True):
        assert "rank 1: parameter weight, index [3, 1]: reduced" in text
        assert "and not a bit may differ" in text
        assert any(line in text for line in (*WRONG_COPY, *WRONG_SUM))
        assert records[-1].worst_parameter == "weight"


def test_evidence_is_left(tmp_path: Path) -> None:
    """Fails if the gradients of a mismatch are lost, or are not what was compared."""
    outcomes = audited_steps(3, flip_lowest_exponent_bit, evidence=tmp_path / "audit")
    folder = tmp_path / "audit" / "step-00000003"
    assert all(f"gradients of that parameter are in {folder}" in text for _, text in outcomes)
    kept = [load_file(folder / f"rank-{rank}.safetensors") for rank in range(3)]
    locals_ = [tensors["local_of_share_0_from_0"] for tensors in kept]
    reduced = [tensors["reduced"] for tensors in kept]
    right = reduce(locals_, AVERAGE).reshape(-1)
    assert torch.equal(reduced[0], right) and torch.equal(reduced[2], right)
    assert (reduced[1] != right).nonzero().tolist() == [[2 * 5 + 3]]
    assert not torch.equal(locals_[0], locals_[1])


def test_a_mismatch_is_reported_when_the_disk_fails(tmp_path: Path) -> None:
    """Fails if an error of the disk takes the place of the mismatch."""
    (tmp_path / "audit").write_text("not a folder")
    for _, text in audited_steps(2, sum_for_mean, evidence=tmp_path / "audit"):
        assert "audit: reduced gradients are wrong at step 3" in text
        assert "could not be saved" in text


def test_other_types_are_refused() -> None:
    """Fails if a type without a bound is audited by another one's."""

    def work(transport: Transport) -> None:
        model = torch.nn.Linear(3, 2).to(torch.float8_e5m2)
        with pytest.raises(UsageError, match=r"2 parameters, such as weight \(torch.float8_e5m2\)"):
            Auditor(model, transport, 1)

    run_in_process(1, work)


def test_sparse_and_strided_gradients() -> None:
    """Fails if elements are compared in the order of memory instead of that of their indices."""

    def work(transport: Transport) -> list[AuditRecord]:
        model = torch.nn.ModuleDict(
            {
                "words": torch.nn.Embedding(7, 3, sparse=True),
                "image": torch.nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last),
            }
        )
        records: list[AuditRecord] = []
        audit = Auditor(model, transport, 1, records.append)
        audit.begin(1)
        images = torch.arange(32.0).reshape(1, 2, 4, 4).to(memory_format=torch.channels_last)
        model["image"](images).square().sum().backward()
        model["words"](torch.tensor([1, 5, 5])).square().sum().backward()
        audit.reduced(1)
        return records

    ((record,),) = run_in_process(1, work)
    assert record.ok and record.elements == 21 + 24 + 3


def test_sparse_gradients_of_a_script_are_refused() -> None:
    """Fails if rows that are looked up twice, which Horovod adds in an order that no bound covers,
    end in a false alarm; or if a script that makes them dense is refused.
    """

    def work(transport: Transport) -> None:
        model = torch.nn.Sequential(torch.nn.Embedding(7, 3, sparse=True), torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.synchronize = lambda: None
        with pytest.raises(UsageError, match=r"layer 0 makes sparse .* sparse_as_dense=True"):
            GradientAudit(model, optimizer, transport=transport)
        with pytest.raises(UsageError, match=r"layer 0 makes sparse .* sparse=False"):
            GradientAudit(model, transport=transport)
        optimizer.sparse_as_dense = True
        GradientAudit(model, optimizer, transport=transport)

    run_in_process(1, work)


@pytest.mark.parametrize(("op", "right"), [("sum", True), ("average", False)])
def test_a_script_that_sums_passes_op_sum(op: str, right: bool) -> None:
    """Fails if the reduction that a script declares does not reach the check."""
    gathered: list[torch.Tensor] = []
    barrier = threading.Barrier(2, timeout=30)

    def work(transport: Transport) -> int:
        model = torch.nn.Linear(3, 1, bias=False)
        audit = GradientAudit(model, every=1, transport=transport, op=op, evidence=None)
        model(torch.full((1, 3), 1.0 + transport.rank)).sum().backward()
        gathered.append(model.weight.grad.clone())
        barrier.wait()
        model.weight.grad = sum(gathered)
        with nullcontext() if right else pytest.raises(AuditMismatch):
            audit.check()
        return audit.checked

    assert run_in_process(2, work) == [1, 1]


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("compression", "terms", "injected", "ok"),
    [
        ("fp16", [[INF, 1.0, 2.0], [-1e5, 3.0, 4.0]], None, True),
        ("none", [[INF, 1, 2], [-3e38, 3, 4], [-3e38, 5, 6]], None, True),
        ("none", [[3e38, 1, 2], [3e38, 3, 4], [-3e38, 5, 6]], None, True),
        ("fp16", [[INF, 1.0, 2.0], [-1e5, 3.0, 4.0]], 1, False),
        ("none", [[INF, 1, 2], [-3e38, 3, 4], [-3e38, 5, 6]], 2, False),
    ],
)
def test_an_honest_overflow_is_no_mismatch(
    compression: str, terms: list[list[float]], injected: int | None, ok: bool
) -> None:
    """Fails if finite terms that overflow beside an infinite one raise the alarm, or if a NaN put
    into an element beside them, where nothing can overflow, does not.
    """
    reduction = Reduction("average", compression)
    size = len(terms)

    def work(transport: Transport) -> int:
        model = torch.nn.Linear(3, 1, bias=False)
        audit = GradientAudit(
            model, every=1, transport=transport, compression=compression, evidence=None
        )
        (model.weight * torch.tensor(terms[transport.rank])).sum().backward()
        model.weight.grad = torch.stack(
            [reduce([torch.tensor(own)[k] for own in terms], reduction) for k in range(3)]
        )[None]
        if injected is not None:
            model.weight.grad[0, injected] = NAN
        with nullcontext() if ok else pytest.raises(AuditMismatch, match=rf"\[0, {injected}\]"):
            audit.check()
        return audit.checked

    assert run_in_process(size, work) == [1] * size


def test_a_script_with_another_reduction_is_refused() -> None:
    """Fails if a reduction that no bound is known for is taken for one that is."""
    with pytest.raises(UsageError, match=r"op='min': sum or average"):
        GradientAudit(torch.nn.Linear(3, 1), op="min")


NEVER_CALLED = "audit: nothing compared in 0 steps: check() was never called"
NEVER_REACHED = (
    "audit: nothing compared in 2 steps: no backward pass has reached the model that "
    "GradientAudit was given"
)
TOO_SHORT = "audit: nothing compared in 1 step: the first audit is due at step 2"
CHECKED = "audit: 1 step compared with the ring reference, 0 failed; worst error 0.00 of the "
ALONE = "audit: nothing compared: a single worker exchanges nothing"


@pytest.mark.parametrize(
    ("size", "does", "summary", "warns"),
    [
        (2, ["train"], NEVER_CALLED, True),
        (2, [], NEVER_CALLED, False),  # no training: an evaluation, say
        (2, ["other", "check", "check"], NEVER_REACHED, True),
        (2, ["train", "check"], TOO_SHORT, False),
        (2, ["check", "train", "check"], CHECKED, False),
        (1, ["train"], ALONE, False),
    ],
)
def test_an_audit_that_never_checked_prints_a_warning(
    size: int, does: list[str], summary: str, warns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a loop that was never checked ends in silence, or a short one is blamed.

    (Both ranks have the same gradients, which are their average.)
    """

    def work(transport: Transport) -> str:
        model, other = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
        audit = GradientAudit(model, every=2, transport=transport, evidence=None)
        actions = {
            "train": lambda: model(torch.ones(1, 3)).sum().backward(),
            "other": lambda: other(torch.ones(1, 3)).sum().backward(),
            "check": audit.check,
        }
        for name in does:
            actions[name]()
        audit._progress.warn_if_idle()  # as at the end of the process
        return audit.summary()

    lines = run_in_process(size, work)
    assert all(line.startswith(summary) for line in lines), lines
    warnings = capsys.readouterr().err
    assert warnings == (f"hvdtrain: warning: {summary}\n" if warns else "")


def test_a_resumed_loop_counts_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if other steps are audited than in a loop that was not interrupted, or if a loop that
    ends before the next audit is blamed.
    """

    def work(transport: Transport) -> list[int]:
        model, audited = torch.nn.Linear(3, 1), []
        audit = GradientAudit(
            model,
            every=4,
            transport=transport,
            on_record=lambda record: audited.append(record.step),
            evidence=None,
            steps_done=10,
        )
        for step in (11, 12, 13):
            model(torch.ones(1, 3)).sum().backward()
            audit.check()
            if step == 11:
                audit._progress.warn_if_idle()
                assert audit.summary().endswith(": the first audit is due at step 12")
        return audited

    assert run_in_process(2, work) == [[12], [12]]
    assert capsys.readouterr().err == ""


IDLE = """
import torch
from hvdtrain import GradientAudit
from hvdtrain.ring.transports import in_process_ring

model = torch.nn.Linear(3, 1)
audit = GradientAudit(model, transport=in_process_ring(2)[0])
model(torch.ones(1, 3)).sum().backward()
"""


@pytest.mark.parametrize(("end", "warns"), [("", True), ("raise SystemError", False)])
def test_the_warning_comes_at_exit(end: str, warns: bool) -> None:
    """Fails if nothing is printed at the end of a process, or it is printed below the error that
    broke it off.
    """
    ended = run_code(IDLE + end, Path.cwd())
    assert (f"hvdtrain: warning: {NEVER_CALLED}\n" in ended.stderr) == warns, ended.stderr
    assert ended.returncode == (0 if warns else 1)
