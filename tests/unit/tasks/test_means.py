"""Which losses are means, by their graphs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from hvdtrain.tasks.means import Recorder, mean_in

N, K = 6, 3
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # scores, labels, targets
WEIGHT = torch.tensor([0.1, 0.2, 0.3])


def per_sample(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(x, y, reduction="none")


def total(x: torch.Tensor, y: torch.Tensor, **options: Any) -> torch.Tensor:
    return functional.cross_entropy(x, y, reduction="sum", **options)


def focal(x: torch.Tensor) -> torch.Tensor:
    return ((1 - x.softmax(1)).pow(2) * -x.log_softmax(1)).sum(1)


def timm_soft(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """As timm's SoftTargetCrossEntropy."""
    return torch.sum(-t * functional.log_softmax(x, dim=-1), dim=-1).mean()


def of_language_model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As transformers' ForCausalLMLoss with `num_items_in_batch`."""
    return total(x.float(), y) / torch.tensor(N)


MEANS: dict[str, Loss] = {
    "cross_entropy": lambda x, y, t: functional.cross_entropy(x, y),
    "of class weights": lambda x, y, t: functional.cross_entropy(x, y, weight=WEIGHT),
    "of smooth labels": lambda x, y, t: functional.cross_entropy(x, y, label_smoothing=0.1),
    "of probabilities": lambda x, y, t: functional.cross_entropy(x, t),
    "of bfloat16": lambda x, y, t: functional.cross_entropy(x.bfloat16(), y).float(),
    "nll": lambda x, y, t: functional.nll_loss(x.log_softmax(1), y),
    "mse": lambda x, y, t: functional.mse_loss(x, t),
    "l1": lambda x, y, t: functional.l1_loss(x, t),
    "huber": lambda x, y, t: functional.huber_loss(x, t),
    "bce": lambda x, y, t: functional.binary_cross_entropy(x.sigmoid(), t),
    "bce with logits": lambda x, y, t: functional.binary_cross_entropy_with_logits(x, t),
    "kl, batchmean": lambda x, y, t: functional.kl_div(x.log_softmax(1), t, reduction="batchmean"),
    "triplet": lambda x, y, t: functional.triplet_margin_loss(x, t, t.flip(0)),
    "multi margin": lambda x, y, t: functional.multi_margin_loss(x, y),
    "mean()": lambda x, y, t: focal(x).mean(),
    "mean(0)": lambda x, y, t: focal(x).mean(0),
    "divided by the count": lambda x, y, t: total(x, y) / N,
    "timm": lambda x, y, t: timm_soft(x, t),
    "transformers": lambda x, y, t: of_language_model(x, y),
    "with a weight": lambda x, y, t: 0.5 * functional.cross_entropy(x, y),
    "of accumulation": lambda x, y, t: functional.cross_entropy(x, y) / 2,
    "two": lambda x, y, t: functional.cross_entropy(x, y) + 0.1 * functional.mse_loss(x, t),
    "several": lambda x, y, t: torch.stack([functional.cross_entropy(x, y), x.mean()]).sum(),
    "with another mean": lambda x, y, t: functional.cross_entropy(x, y) + 0.1 * x.mean(),
    "of replicas": lambda x, y, t: functional.cross_entropy(x, y).view(1).sum(),
}
SUMS: dict[str, Loss] = {
    "cross_entropy": lambda x, y, t: total(x, y),
    "of class weights": lambda x, y, t: total(x, y, weight=WEIGHT),
    "of smooth labels": lambda x, y, t: total(x, y, label_smoothing=0.1),
    "of probabilities": lambda x, y, t: functional.cross_entropy(x, t, reduction="sum"),
    "mse": lambda x, y, t: functional.mse_loss(x, t, reduction="sum"),
    "kl": lambda x, y, t: functional.kl_div(x.log_softmax(1), t, reduction="sum"),
    "bce": lambda x, y, t: functional.binary_cross_entropy_with_logits(x, t, reduction="sum"),
    "sum()": lambda x, y, t: (x - t).square().sum(),
    "minus": lambda x, y, t: -x.sum(),
    "of means of samples": lambda x, y, t: (x - t).square().mean(1).sum(),
    "of elements": lambda x, y, t: (x - t).abs().flatten(1).mean(1).sum(),
    "of weighted samples": lambda x, y, t: (per_sample(x, y) * torch.rand(N)).sum(),
    "times the count": lambda x, y, t: functional.cross_entropy(x, y) * N,
    "times the count, a tensor": lambda x, y, t: functional.cross_entropy(x, y) * torch.tensor(N),
    "times the elements": lambda x, y, t: functional.mse_loss(x, t) * (N * K),
    "times the count and a weight": lambda x, y, t: functional.cross_entropy(x, y) * N * 0.3,
    "with a weight": lambda x, y, t: 0.5 * total(x, y),
    "of accumulation": lambda x, y, t: total(x, y) / 2,
    "two": lambda x, y, t: total(x, y) + 0.1 * functional.mse_loss(x, t, reduction="sum"),
    "mixed up": lambda x, y, t: 0.3 * total(x, y) + 0.7 * total(x, y.flip(0)),
    "several": lambda x, y, t: torch.stack([total(x, y), x.mean()]).sum(),
    "with a penalty": lambda x, y, t: total(x, y) + 0.01 * x.pow(2).mean(),
    "of bfloat16": lambda x, y, t: total(x.bfloat16(), y).float(),
    "focal": lambda x, y, t: focal(x).sum(),
}


def made(loss: Loss) -> torch.Tensor:
    torch.manual_seed(0)
    return loss(torch.randn(N, K, requires_grad=True), torch.arange(N) % K, torch.rand(N, K))


def recorded(loss: Loss, count: float = N) -> str | None:
    """What is found where nothing has a gradient, as in evaluations."""
    torch.manual_seed(0)
    given = torch.randn(N, K), torch.arange(N) % K, torch.rand(N, K)
    with torch.no_grad(), Recorder() as recorder:
        found = loss(*given)
    return recorder.mean_in(found, count)


@pytest.mark.parametrize("name", MEANS)
def test_means_are_found(name: str) -> None:
    """Fails if such a loss would train at a rate that is smaller by the size of the batch."""
    assert mean_in(made(MEANS[name]), N)
    assert mean_in(made(MEANS[name]), 1) is None  # of one sample
    assert recorded(MEANS[name])
    assert recorded(MEANS[name], 1) is None
    assert mean_in(made(MEANS[name]), math.nan) is None  # refused where counts are checked
    assert recorded(MEANS[name], math.nan) is None


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_taken(name: str) -> None:
    """Fails if a script that is right is refused."""
    assert mean_in(made(SUMS[name]), N) is None
    assert recorded(SUMS[name]) is None


@pytest.mark.parametrize("count", [2, 5, 8, 10, 50, 64, 100, 128])
@pytest.mark.parametrize("weight", [0.5, 0.1, 0.01, 0.001, 1 / 128])
def test_a_weight_is_not_taken_for_a_division(weight: float, count: int) -> None:
    """Fails if a weighted sum is refused at some sizes of a batch, and so at some numbers of
    workers.
    """
    loss = weight * made(SUMS["cross_entropy"])
    assert mean_in(loss, count) is None
    assert mean_in(loss / (4 * count), count) is None


def test_a_loss_without_a_graph_is_taken() -> None:
    """Fails if the lack of a gradient is reported as something else."""
    assert mean_in(torch.tensor(1.0), N) is None
