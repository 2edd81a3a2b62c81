"""`--micro-batch auto`: what is refused; tests/device/fitting.py tries passes on a device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hvdtrain
from hvdtrain.config.options import LOOP_OPTIONS
from hvdtrain.data import (
    GlobalBatchSampler,
    PlacedShares,
    Shares,
    SharesLike,
    TensorSplit,
    VirtualShares,
)
from hvdtrain.data.feeding import Feed
from hvdtrain.errors import AgreedFailure, UsageError
from hvdtrain.run.micro_batch import is_out_of_memory, largest_pass, trial_loss


def loop(folder: Path, **options: Any) -> hvdtrain.Loop:
    """Return a loop over a few samples."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorSplit(torch.ones(8, 3), torch.ones(8))
    return hvdtrain.Loop(
        model, optimizer, data, global_batch_size=4, epochs=1, output=folder, **options
    )


def test_a_script_gives_the_loss_of_a_trial(tmp_path: Path, monkeypatch) -> None:
    """Fails if a loop whose passes cannot be tried begins, whoever asks for the trial."""
    with pytest.raises(UsageError, match=r"micro_batch='auto': a script .* give trial_loss"):
        loop(tmp_path, micro_batch="auto")
    with pytest.raises(UsageError, match="trial_loss=3: is not callable"):
        loop(tmp_path, trial_loss=3)
    monkeypatch.setenv(LOOP_OPTIONS, '{"micro_batch": "auto"}')
    with pytest.raises(UsageError, match="give trial_loss"):
        loop(tmp_path)


def test_the_cpu_is_refused(tmp_path: Path) -> None:
    """Fails if a run on the CPU begins with a number of passes that nothing has shown to fit."""
    fitted = loop(tmp_path, micro_batch="auto", trial_loss=torch.nn.Module(), device="cpu")
    with pytest.raises(AgreedFailure, match=r"^micro_batch='auto': the run computes on the CPU"):
        fitted.__enter__()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("passes", [1, 2, 5, 40])
@pytest.mark.parametrize(
    "shares",
    [
        Shares(3),
        Shares(3, (1, 0, 2)),
        PlacedShares([12, 18], [0, 1, 1], [1.0] * 3),  # each host can read its own samples alone
        VirtualShares(Shares(4), [1, 3, 0]),
    ],
    ids=["even", "weights", "per host", "virtual"],
)
def test_the_largest_pass_of_a_rank_is_tried(shares: SharesLike, passes: int) -> None:
    """Fails if a smaller pass is tried, or none where a rank has some; then memory would run out in
    training.
    """
    numbers = torch.arange(30)
    sampler = GlobalBatchSampler(30, 20, 0)
    feed = Feed(TensorSplit(numbers, numbers), sampler, shares, passes, everyone=False)
    batch = next(iter(sampler.global_batches(0)))
    for rank in range(3):
        exchange: Any = SimpleNamespace(rank=rank)
        loaded, samples = largest_pass(feed, batch, exchange)
        of_rank = [one.samples for one in feed.step(batch, rank).batches]
        assert samples == max(of_rank, default=0) == (loaded.samples if loaded else 0)


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (None, "None"),
        (torch.ones(2, requires_grad=True), "a tensor of shape [2]"),
        (torch.ones(()), "a tensor of shape []"),
    ],
)
def test_the_loss_of_a_trial_is_one_value_with_a_gradient(returned: Any, shown: str) -> None:
    """Fails if the losses of single samples, or none, end in a message of torch."""
    job, script = SimpleNamespace(model=None), SimpleNamespace(trial_loss=lambda *_: returned)
    with pytest.raises(UsageError) as caught:
        trial_loss(job, None, script)  # type: ignore[arg-type]
    assert f"trial_loss returned {shown}: expected" in str(caught.value)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),  # of the driver, not of torch
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_errors_of_full_memory(error: RuntimeError, expected: bool) -> None:
    """Fails if a mistake in a model makes smaller passes be tried, or full memory ends the run."""
    assert is_out_of_memory(error) is expected
