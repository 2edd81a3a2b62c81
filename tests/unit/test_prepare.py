"""From configuration to a job: what is refused before the start, and what reaches the job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvdtrain.batchnorm import SyncBatchNorm
from hvdtrain.cli.options import build_config
from hvdtrain.cli.prepare import prepare
from hvdtrain.errors import UsageError
from hvdtrain.exchange import SingleProcess
from hvdtrain.topology import Topology
from hvdtrain.training import Job, train_step
from tests.unit.threads import connect

NORMALISES = "tests.unit.jobs:with_batch_norm"
PLAIN = "tests.unit.jobs:plain"


@pytest.fixture(autouse=True)
def same_threads():
    """As the command sets torch's threads for its process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def prepared(samples: int, batch: int, workers: int = 1, rank: int = 0, **options: Any) -> Job:
    data = f"synthetic:1x4x4,samples={samples}"
    config = build_config({"model": NORMALISES, "data": data, "device": "cpu"} | options, [])
    exchange = connect(workers)[rank] if workers > 1 else SingleProcess()
    return prepare(config, batch, exchange, Topology(rank, workers))


SMALL = {
    "a batch of 1": (100, 1, 1, {}),
    "a last batch of 1": (101, 10, 1, {}),
    "one sample of data": (1, 1, 1, {}),
    "one sample each": (90, 3, 3, {}),
    "a last batch with one each": (33, 10, 3, {}),
    "a last batch with none for some": (92, 30, 3, {}),
    "an uneven share of 1": (100, 5, 3, {}),
    "accumulation": (100, 10, 1, {"grad_accum_steps": 6}),
    "accumulation, last batch": (106, 50, 1, {"grad_accum_steps": 4}),
    "more passes than samples": (100, 4, 1, {"grad_accum_steps": 5}),
    "accumulation over ranks": (120, 12, 2, {"grad_accum_steps": 4}),
    "a weight of zero": (100, 50, 3, {"rank_weights": "1,0,1"}),
    "a small weight": (100, 50, 2, {"rank_weights": "1,40"}),
}
LARGE_ENOUGH = {
    "a batch of 2": (100, 2, 1, {}),
    "a last batch of 2": (102, 10, 1, {}),
    "no short last batch": (100, 10, 1, {}),
    "all samples in a batch": (4, 4, 2, {}),
    "two samples each": (90, 6, 3, {}),
    "accumulation": (100, 10, 1, {"grad_accum_steps": 5}),
    "weights": (100, 50, 2, {"rank_weights": "1,24"}),
}


@pytest.mark.parametrize(("samples", "batch", "workers", "options"), SMALL.values(), ids=SMALL)
def test_shares_too_small_for_batch_norm_are_refused(samples, batch, workers, options) -> None:
    """Fails when such a run starts on any rank, or neither the batch nor the fix is named."""
    for rank in range(workers):
        with pytest.raises(UsageError) as caught:
            prepared(samples, batch, workers, rank, **options)
        assert str(caught.value).startswith(f"--global-batch-size={batch}: ")
        assert "Add --sync-bn" in str(caught.value)
    assert not prepared(samples, batch, workers, model=PLAIN, **options).sync_bn


@pytest.mark.parametrize(
    ("samples", "batch", "workers", "options"), LARGE_ENOUGH.values(), ids=LARGE_ENOUGH
)
def test_shares_of_two_are_enough(samples, batch, workers, options) -> None:
    """Fails when a run that could be trained is refused."""
    for rank in range(workers):
        assert not prepared(samples, batch, workers, rank, **options).sync_bn


@pytest.mark.parametrize("workers", [1, 3])
def test_sync_bn_replaces_the_layers(workers: int) -> None:
    """Fails when --sync-bn leaves a layer that normalises over its own samples alone."""
    job = prepared(100, 4, workers, sync_bn=True, rank_weights=None)
    assert job.sync_bn
    assert [type(job.model[place]) for place in (1, 5)] == [SyncBatchNorm] * 2
    assert not prepared(100, 4, workers, sync_bn=True, model=PLAIN).sync_bn


def test_even_sync_bn_needs_two_samples() -> None:
    """Fails when a last batch of one sample is met only at the end of the first epoch."""
    try:
        job = prepared(101, 10, sync_bn=True)
    except UsageError as error:
        assert "--global-batch-size=10" in str(error)
        return
    audit = SimpleNamespace(begin=lambda step: None, end=lambda step: None)
    for step, indices in enumerate(job.sampler.global_batches(0), 1):
        train_step(job, SingleProcess(), audit, step, indices)


def test_the_flags_reach_the_job() -> None:
    """Fails when a flag of this page is read and then forgotten."""
    job = prepared(
        *(100, 40, 2),
        rank_weights="1,3",
        grad_accum_steps=2,
        model_ema=True,
        model_ema_decay=0.5,
        clip_grad=0.125,
        amp="bf16",
        checkpoint_interval=17,
        hash_every=19,
        scale_lr="linear",
        lr_base_batch_size=10,
        lr=0.25,
    )
    assert job.shares.sizes(40) == [10, 30] and job.grad_accum_steps == 2
    assert (job.checkpoint_interval, job.hash_every) == (17, 19)
    assert job.schedule(0) == 1.0 and job.update.average is not None
    assert prepared(100, 40).update.average is None
    with job.update.autocast():
        assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype == torch.bfloat16


def test_a_batch_of_more_samples_than_there_are_is_refused() -> None:
    """Fails when a global batch that can never be filled starts."""
    with pytest.raises(UsageError, match="--global-batch-size=101: "):
        prepared(100, 101, model=PLAIN)
    assert prepared(100, 100, model=PLAIN).sampler.steps_per_epoch == 1


def test_too_few_weights_are_refused() -> None:
    """Fails when --rank-weights for another number of workers starts."""
    with pytest.raises(UsageError, match="--rank-weights=1,2: 2 weights for 3 workers"):
        prepared(100, 50, 3, rank_weights="1,2")


def test_ranks_start_alike_and_draw_apart() -> None:
    """Fails when ranks differ in their first parameters, or share their dropout masks."""
    weights, draws = [], []
    for rank in range(3):
        weights.append(prepared(100, 50, 3, rank).model[0].weight)
        draws.append(torch.rand(4))
    assert all(torch.equal(weight, weights[0]) for weight in weights)
    assert len({tuple(draw.tolist()) for draw in draws}) == 3
