"""Features gathered over all samples; tests/parallel/test_own_loop.py has it on several workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import hvdtrain
from hvdtrain.data import Shares, VirtualShares
from hvdtrain.errors import UsageError
from hvdtrain.exchange import SingleProcess
from hvdtrain.train.gathering import gathering_of

pytestmark = pytest.mark.usefixtures("script")
SAMPLES = torch.utils.data.TensorDataset(
    torch.randn(18, 3, generator=torch.Generator().manual_seed(1)), torch.arange(18)
)


def train(dropout: float = 0.0, **options: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parameters, and the labels gathered in the first step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(dropout)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = {"global_batch_size": 6, "epochs": 2, "gathers": True} | options
    labels = []
    with hvdtrain.Loop(model, optimizer, SAMPLES, **given) as loop:
        for step in loop:
            for x, y in step.batches():
                features = model(x)
                everyone, numbers = loop.all_gather(features), loop.all_gather(y)
                if step.number == 1:
                    labels.append(numbers)
                own = step.offset + torch.arange(len(x))
                step.backward(mean=cross_entropy(features @ everyone.T, own), count=len(x))
            step.update()
    return [*model.parameters(), *model.buffers()], labels


def test_virtual_workers_gather_what_the_whole_batch_has() -> None:
    """Fails if rows are in another order, those of a virtual worker are missing, or random numbers
    and running statistics depend on how often a pass runs.
    """
    _, (whole,) = train()
    assert sorted(whole.tolist()) == sorted(set(whole.tolist())) and len(whole) == 6
    _, labels = train(virtual_workers=3)
    assert len(labels) == 9  # each of three passes runs three times
    assert all(it.equal(whole) for it in labels[3:])
    state, _ = train(dropout=0.5, virtual_workers=3)
    again, _ = train(dropout=0.5, virtual_workers=3)
    assert all(map(torch.equal, state, again))
    tracked = state[-1]
    assert tracked == 6  # the steps, not the rounds


def test_accumulation_gathers_within_a_micro_batch() -> None:
    """Fails if a pass waits for features that no pass has computed yet."""
    _, labels = train(grad_accum_steps=2)
    assert [len(it) for it in labels] == [3, 3]


@pytest.mark.parametrize(
    ("options", "rows", "expected"),
    [
        ({"gathers": False}, slice(None), "in a loop with the option gathers=True"),
        ({}, slice(1, None), "5 rows for 6 samples"),
    ],
)
def test_what_cannot_be_gathered_is_refused(
    options: dict[str, Any], rows: slice, expected: str
) -> None:
    """Fails if it is refused on several workers alone, where they would wait for each other."""
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = {"global_batch_size": 6, "gathers": True} | options
    with (
        pytest.raises(UsageError, match=expected),
        hvdtrain.Loop(model, optimizer, SAMPLES, **given) as loop,
    ):
        for step in loop:
            for x, _ in step.batches():
                loop.all_gather(model(x)[rows])


def test_features_are_gathered_within_a_pass() -> None:
    """Fails if a call elsewhere ends in a traceback, or waits."""
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hvdtrain.Loop(model, optimizer, SAMPLES, global_batch_size=6, gathers=True) as loop:
        with pytest.raises(UsageError, match="call it in the passes over step"):
            loop.all_gather(torch.ones(1))
        for step in loop:
            with pytest.raises(UsageError, match="is called in the passes over step"):
                loop.all_gather(torch.ones(1))
            with pytest.raises(UsageError, match=r"step\.offset is of a pass"):
                step.offset  # noqa: B018
            break


def test_a_rank_without_virtual_workers_is_refused() -> None:
    """Fails if a rank that computes nothing is waited for by the others."""

    class OfTwo(SingleProcess):
        size = 2

    gathering_of(OfTwo(), VirtualShares(Shares(3), [1, 2]))
    with pytest.raises(UsageError, match="none of the 3 virtual workers for these ranks: 1"):
        gathering_of(OfTwo(), VirtualShares(Shares(3), [3, 0]))
