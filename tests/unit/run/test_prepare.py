"""From configuration to a job: what is refused before the start, and what reaches the job."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvdtrain.config import TrainConfig
from hvdtrain.config.options import build_config
from hvdtrain.data import Shares
from hvdtrain.errors import UsageError
from hvdtrain.exchange import SUM, Reduction, SingleProcess
from hvdtrain.run.prepare import prepare
from hvdtrain.run.tasks import TaskData, build_data, build_task
from hvdtrain.topology import CORES_SHARED_OUT, Topology
from hvdtrain.train.batchnorm import SyncBatchNorm
from hvdtrain.train.devices import choose_device
from hvdtrain.train.job import Job
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
    config = build_config({"model": NORMALISES, "data": data, "device": "cpu"} | options)
    exchange = connect(workers)[rank] if workers > 1 else SingleProcess()
    source = source_of(config, workers)
    return prepare(config, batch, source, exchange, Topology(rank, workers))


def source_of(config: TrainConfig, workers: int) -> TaskData:
    """As `find_source`, which needs all ranks, finds it where all data is on every host."""
    task = build_task(config)
    shares = Shares(workers, config.batch.weights(workers))
    return TaskData(task, build_data(task, config), (), shares, shares, [{}])


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
    assert not prepared(samples, batch, workers, model=PLAIN, **options).feed.everyone


@pytest.mark.parametrize(
    ("samples", "batch", "workers", "options"), LARGE_ENOUGH.values(), ids=LARGE_ENOUGH
)
def test_shares_of_two_are_enough(samples, batch, workers, options) -> None:
    """Fails when a run that could be trained is refused."""
    for rank in range(workers):
        assert not prepared(samples, batch, workers, rank, **options).feed.everyone


def test_a_last_batch_that_is_not_reached_is_no_matter() -> None:
    """Fails when a run is refused for a batch after its end, or let go to meet it."""
    assert not prepared(101, 10, max_steps=10).feed.everyone
    with pytest.raises(UsageError, match="of a batch of 1 sample some worker gets 1"):
        prepared(101, 10, max_steps=11)


@pytest.mark.parametrize(
    ("samples", "batch", "workers", "options"),
    [
        (100, 1, 1, {}),
        (101, 10, 3, {}),
        (100, 10, 2, {"grad_accum_steps": 6}),
    ],
)
def test_single_samples_are_refused_with_sync_bn(samples, batch, workers, options) -> None:
    """Fails when a micro-batch without a variance is met in the run, or --sync-bn is advised to
    those who have it.
    """
    with pytest.raises(UsageError, match="1 at a time over all workers") as caught:
        prepared(samples, batch, workers, sync_bn=True, **options)
    assert "Add --sync-bn" not in str(caught.value)


def test_sync_bn_takes_empty_shares() -> None:
    """Fails when --sync-bn is refused where only some workers have nothing to do."""
    assert prepared(100, 2, 3, sync_bn=True).feed.everyone
    assert prepared(100, 4, 3, sync_bn=True, grad_accum_steps=2).feed.everyone


@pytest.mark.parametrize("workers", [1, 3])
def test_sync_bn_replaces_the_layers(workers: int) -> None:
    """Fails when --sync-bn leaves a layer that normalises over its own samples alone."""
    job = prepared(100, 4, workers, sync_bn=True, rank_weights=None)
    assert job.feed.everyone
    assert all(isinstance(job.model[place], SyncBatchNorm) for place in (1, 5))
    assert not prepared(100, 4, workers, sync_bn=True, model=PLAIN).feed.everyone


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
    assert job.feed.shares.sizes(40) == [10, 30] and job.feed.micro_batches == 2
    assert (job.intervals.checkpoint, job.intervals.hash) == (17, 19)
    assert job.schedule(0) == 1.0 and job.update.average is not None
    assert prepared(100, 40).update.average is None
    assert job.reduction == SUM
    for given, ranks, expected in (("auto", 2, 1 << 20), ("auto", 64, 4 << 20), ("9", 64, 9)):
        with_buckets = prepared(128, 128, ranks, bucket_bytes=given)
        assert with_buckets.reduction == Reduction("sum", bucket_bytes=expected)
    compressed = prepared(100, 40, 2, compression="fp16")
    assert compressed.reduction == Reduction("average", "fp16")  # as large for 2 workers as for 512
    with job.update.autocast():
        assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype == torch.bfloat16


def test_a_batch_of_more_samples_than_there_are_is_refused() -> None:
    """Fails when a global batch that can never be filled starts, or it is not said where the
    number comes from and how large it may be.
    """
    reported = {
        "--global-batch-size=101: ": {"global_batch_size": 101},
        "--global-batch-size=101 (the default): ": {},
        "--batch-size=101: on 1 worker that is 101: ": {"batch_size": 101},
    }
    for expected, flags in reported.items():
        with pytest.raises(UsageError) as caught:
            prepared(100, 101, model=PLAIN, **flags)
        assert str(caught.value).startswith(expected)
        assert "only 100 samples to train on. Give --global-batch-size 100 or" in str(caught.value)
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


@pytest.fixture
def algorithms():
    """Puts torch's setting back."""
    yield
    torch.use_deterministic_algorithms(False)


def test_deterministic_requires_deterministic_algorithms(
    algorithms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when --deterministic does not reach torch, or lets sums depend on timing."""
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "67108864")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    prepared(100, 50)
    assert not torch.are_deterministic_algorithms_enabled()
    prepared(100, 50, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    exchange = connect(3)[0]
    exchange.repeatable = False
    config = build_config({"data": "digits", "device": "cpu", "deterministic": True})
    with pytest.raises(UsageError, match="HOROVOD_FUSION_THRESHOLD=67108864 the order of sums"):
        prepare(config, 50, source_of(config, 3), exchange, Topology(0, 3))


def test_augmentation_reaches_the_training_split_alone() -> None:
    """Fails when a flag is forgotten, or validation images are changed too."""
    indices = np.arange(50)
    plain, flipped = prepared(100, 50).data, prepared(100, 50, hflip=1.0).data
    expected, _ = plain.train.batch(indices)
    assert torch.equal(flipped.train.batch(indices)[0], expected.flip(3))
    assert torch.equal(flipped.valid.batch(indices)[0], plain.valid.batch(indices)[0])
    shifted = prepared(100, 50, crop_padding=2).data
    assert not torch.equal(shifted.train.batch(indices)[0], expected)


def test_pretrained_weights_are_where_training_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails when --pretrained is not loaded, or not into a model whose batch norm is replaced."""
    source = prepared(100, 10, seed=1).model.state_dict()
    torch.save({f"module.{name}": value for name, value in source.items()}, tmp_path / "x.pth")
    capsys.readouterr()
    for sync_bn in (False, True):
        job = prepared(100, 10, pretrained=str(tmp_path / "x.pth"), sync_bn=sync_bn)
        own = job.model.state_dict()
        assert own.keys() == source.keys()
        assert all(torch.equal(own[name], source[name]) for name in own)
        assert f"pretrained: {len(own)} tensors from {tmp_path / 'x.pth'}\n" in (
            capsys.readouterr().out
        )
    with pytest.raises(UsageError, match="--pretrained=missing: no such file or folder"):
        prepared(100, 10, pretrained="missing")


def test_pretrained_notes_come_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails when every worker prints the same."""
    torch.save(prepared(100, 10).model.state_dict(), tmp_path / "x.pth")
    capsys.readouterr()
    prepared(100, 10, workers=2, rank=1, pretrained=str(tmp_path / "x.pth"))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("visible", "built", "expected"),
    [
        (0, False, "no CUDA device: this torch is built without CUDA. Use --device cpu, or auto"),
        (0, True, "no CUDA device: 0 visible (CUDA_VISIBLE_DEVICES=7). Use --device cpu, or auto"),
        (2, True, "local rank 2 has no CUDA device, 2 visible (CUDA_VISIBLE_DEVICES=7). Start at"),
    ],
)
def test_a_missing_gpu(visible: int, built: bool, expected: str, monkeypatch) -> None:
    """Fails when the message on a machine without a GPU has no cause, no fix, or gives advice on
    the number of workers.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: visible)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    with pytest.raises(UsageError, match=re.escape(f"--device=cuda: {expected}")) as caught:
        choose_device("cuda", Topology(2, 3, 2))
    assert ("per host" in str(caught.value)) == (visible > 0)


@pytest.mark.parametrize(
    ("variables", "virtual", "expected"),
    [
        ({}, None, 1),
        ({"OMP_NUM_THREADS": "3"}, None, 3),
        ({"OMP_NUM_THREADS": "3", CORES_SHARED_OUT: "1"}, None, 3),
        ({"OMP_NUM_THREADS": "3"}, 4, 3),
        ({"OMP_NUM_THREADS": "3", CORES_SHARED_OUT: "1"}, 4, 1),
    ],
)
def test_compute_threads(
    variables: dict[str, str],
    virtual: int | None,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fails if virtual workers compute with more threads where fewer workers share a host, so that
    their bits depend on N, or if the number that the user has chosen is replaced.
    """
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    torch.set_num_threads(3)  # as torch reads the variable when it is imported
    prepared(100, 10, virtual_workers=virtual)
    assert torch.get_num_threads() == expected


def test_more_workers_than_virtual_ones_are_refused() -> None:
    """Fails if a worker could be left without anything to compute."""
    with pytest.raises(UsageError, match=r"--virtual-workers=2: of 3 workers some .* at most 2"):
        prepared(90, 30, workers=3, virtual_workers=2)
    prepared(90, 30, workers=3, virtual_workers=3)
