"""Mixup and CutMix: functions of (seed, epoch, sample), not of rank, batch, or what came before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from hvdtrain.config.options import build_config
from hvdtrain.data import AugmentedSplit, Dataset, ReadOptions, Shares, TensorSplit, load_dataset
from hvdtrain.data.feeding import stream
from hvdtrain.data.mixing import Mixed, MixedSplit, mixed, symmetric_beta
from hvdtrain.errors import UsageError
from hvdtrain.exchange import SingleProcess
from hvdtrain.run.tasks import build_task
from hvdtrain.tasks import Settings
from hvdtrain.tasks.classification import Classification
from tests.unit.folders import make_folder
from tests.unit.jobs import (
    check_ranks_and_resumption,
    equal,
    made_up_data,
    make_job,
    run_job,
)

SAMPLES, HEIGHT, WIDTH = 40, 6, 7
WAYS = {"mixup": (0.4, 0.0), "cutmix": (0.0, 1.0), "both": (1.0, 1.0)}


def numbered(offset: float = 0) -> TensorSplit:
    """Every pixel of a sample, and its label, is the sample's number."""
    numbers = torch.arange(SAMPLES)
    pixels = numbers[:, None, None, None] + torch.zeros(SAMPLES, 2, HEIGHT, WIDTH) + offset
    return TensorSplit(pixels.double(), numbers)


def whole(split: MixedSplit, epoch: int = 0) -> Mixed:
    return split.batch(np.arange(len(split)), epoch)


@pytest.mark.parametrize("alphas", WAYS.values(), ids=WAYS)
def test_samples_are_mixed_by_their_shares(alphas: tuple[float, float]) -> None:
    """Fails if a sample is its own partner, a share is not what its pixels show, a rectangle is
    none, or both ways do not come up in equal parts.
    """
    batch, blended = whole(MixedSplit(numbered(), 3, *alphas)), 0
    assert batch.labels.tolist() == list(range(SAMPLES))
    for pixels, own, other, share in zip(*batch, strict=True):
        assert own != other and 0 <= share <= 1
        assert torch.equal(pixels[0], pixels[1])  # both channels
        found = (pixels[0] == other) & (pixels[0] != own)
        if torch.all(found | (pixels[0] == own)):
            assert float(1 - found.double().mean()) == pytest.approx(float(share))
            assert torch.equal(found, found.any(1)[:, None] & found.any(0))
        else:
            torch.testing.assert_close(pixels, own * share + other * (1 - share) + 0 * pixels)
            blended += 1
    assert {"mixup": blended > 35, "cutmix": blended == 0, "both": 10 < blended < 30}[
        next(name for name, it in WAYS.items() if it == alphas)
    ]
    assert len(set(batch.partner_labels.tolist())) > SAMPLES / 2


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("alphas", WAYS.values(), ids=WAYS)
def test_a_sample_is_mixed_alike_in_any_share(alphas: tuple[float, float], size: int) -> None:
    """Fails if pixels, labels or shares depend on the rank, the batch, or the samples before."""
    split = MixedSplit(AugmentedSplit(numbered(), 5, 0.5, 1), 3, *alphas)
    order = np.random.default_rng(0).permutation(SAMPLES)
    expected = split.batch(order, 2)
    shares = Shares(size, (1.0, 2.0, 0.5)[:size])
    parts = [shares.of(order, rank) for rank in range(size)]
    for ways in (
        [split.batch(part, 2) for part in parts],
        [it.batch for it in stream(split, parts, 2)],
    ):
        found = [torch.cat([part[kind] for part in ways]) for kind in range(4)]
        places = np.argsort(np.concatenate(parts))
        for kind, values in enumerate(found):
            assert equal(values[places], expected[kind][np.argsort(order)]), kind
    assert [len(it) for it in split.batch(order[:0], 2)] == [0, 0, 0, 0]


def test_what_is_drawn() -> None:
    """Fails if epochs or seeds mix alike, or partners or shares are those of the epoch before."""
    split, other_seed = MixedSplit(numbered(), 3, 0.4, 0.0), MixedSplit(numbered(), 4, 0.4, 0.0)
    first, again = whole(split), whole(split)
    assert equal(list(first), list(again))
    for changed in (whole(split, 1), whole(other_seed)):
        for kind in ("partner_labels", "shares"):
            same = getattr(first, kind) == getattr(changed, kind)
            assert same.double().mean() < 0.2, kind
    alone = MixedSplit(
        TensorSplit(torch.ones(1, 1, 2, 2), torch.zeros(1, dtype=torch.int64)), 0, 1, 0
    )
    torch.testing.assert_close(whole(alone).inputs, torch.ones(1, 1, 2, 2))


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.5, 1.0, 2.0, 8.0])
def test_shares_have_the_beta_distribution(alpha: float) -> None:
    """Fails if they have another (two-sample Kolmogorov-Smirnov test on a grid, 99.9 %)."""
    count, grid = 20_000, np.linspace(0, 1, 1001)
    generator = np.random.default_rng(1)
    found = [symmetric_beta(alpha, *pair) for pair in generator.random((count, 2))]
    expected = generator.beta(alpha, alpha, count)
    one, other = (np.histogram(it, grid)[0].cumsum() / count for it in (found, expected))
    assert np.abs(one - other).max() < 1.95 * (2 / count) ** 0.5


@pytest.mark.parametrize("pair", [(0.0, 0.0), (0.0, 0.5), (1 - 2**-53, 0.25), (0.5, 0.0)])
@pytest.mark.parametrize("alpha", [5e-324, 1e-3, 1.0, 1e300])
def test_shares_at_the_ends_are_numbers(alpha: float, pair: tuple[float, float]) -> None:
    """Fails if an extreme alpha or draw gives a share outside of [0, 1], or none."""
    assert 0 <= symmetric_beta(alpha, *pair) <= 1


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_of_mixed_samples(smoothing: float) -> None:
    """Fails if it is not the cross-entropy with both labels in their shares, smoothing is lost, or
    the label of the smaller share counts as right.
    """
    dataset = Dataset("made up", (2, 3, 3), 5, numbered(), numbered())
    linear = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(18, 5).double())
    settings = Settings("plain", "none", Path(), 0, torch.float64)
    task = Classification(settings, dataset, lambda: linear, smoothing)
    inputs = torch.rand(4, 2, 3, 3, dtype=torch.float64)
    labels, others = torch.tensor([0, 1, 2, 3]), torch.tensor([4, 0, 1, 3])
    shares = torch.tensor([0.9, 0.3, 0.5, 0.1], dtype=torch.float64)
    sums = task.loss(linear, Mixed(inputs, labels, others, shares))
    one, two = (functional.one_hot(it, 5).double() for it in (labels, others))
    soft = one * shares[:, None] + two * (1 - shares[:, None])
    soft = soft * (1 - smoothing) + smoothing / 5
    scores = linear(inputs)
    torch.testing.assert_close(sums.loss, functional.cross_entropy(scores, soft, reduction="sum"))
    right = scores.argmax(1) == torch.tensor([0, 0, 2, 3])
    assert sums.samples == 4 and sums.metrics["accuracy"] == right.sum()
    assert sums.loss.requires_grad


@pytest.mark.parametrize("readers", [0, 1])
def test_image_folders_are_mixed(readers: int, tmp_path: Path) -> None:
    """Fails if reader processes mix otherwise, or what is mixed is not the augmented samples."""
    folder = make_folder(tmp_path / "data")
    options = ReadOptions(image_size=12, readers=readers)
    plain = load_dataset(f"imagefolder:{folder}", Path(), 1, torch.float64, options)
    data = mixed(plain, 1, 0.4, 0.0)
    assert data.note.endswith(", mixup 0.4") and data.valid is plain.valid
    batches = [np.array([3, 11, 4]), np.array([0]), np.array([7, 8])]
    read, apart = list(stream(data.train, batches, 2)), plain.train.batch(np.arange(12), 2)
    assert [it.samples for it in read] == [3, 1, 2]
    for indices, loaded in zip(batches, read, strict=True):
        pairs = data.train.to_read(indices, 2)
        own, others = apart[0][pairs].tensor_split(2)
        share = loaded.batch.shares[:, None, None, None]
        torch.testing.assert_close(loaded.batch.inputs, own * share + others * (1 - share))
        assert equal(loaded.batch.partner_labels, apart[1][pairs[len(indices) :]])


@pytest.mark.parametrize("size", [2, 3])
def test_a_mixed_run_is_the_same_on_n_ranks_and_after_a_stop(size: int) -> None:
    """Fails if a rank, a micro-batch or a resumption mixes otherwise than one process does, or
    validation samples are mixed.
    """

    def job(exchange):
        data = mixed(made_up_data(20), 9, 0.5, 1.0)
        return make_job(data, 8, exchange, total_steps=7, accum=2)

    alone = check_ranks_and_resumption(job, size)
    plain = make_job(made_up_data(20), 8, SingleProcess(), accum=2)
    run_job(replace(plain, total_steps=7), SingleProcess())
    assert not equal(alone.model.state_dict(), plain.model.state_dict())
    assert isinstance(alone.data.valid, TensorSplit)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"task": "mine:Task", "mixup": 0.2},
            "--mixup=0.2: is for classification, and --task=mine",
        ),
        ({"task": "mine:Task", "cutmix": 1.0}, "--cutmix=1.0: is for classification"),
        ({"skip_bad_samples": True, "mixup": 0.2}, "--mixup=0.2 and --skip-bad-samples: a"),
        ({"mixup": -1.0}, "--mixup=-1.0"),
    ],
)
def test_where_nothing_can_be_mixed(options: dict, problem: str) -> None:
    """Fails if a task with a loss of its own, or samples that may be missing, are mixed."""
    with pytest.raises(UsageError) as caught:
        build_config(options)
    assert problem in str(caught.value)


def test_flags_reach_the_data() -> None:
    """Fails if --mixup or --cutmix is not passed on, or the header does not show it."""
    task = build_task(build_config({"data": "digits", "mixup": 0.2, "cutmix": 1.0}))
    data = task.build_data()
    assert "mixup 0.2 or cutmix 1" in data.note
    assert isinstance(data.train.batch(np.arange(2)), Mixed)
    assert not isinstance(data.valid.batch(np.arange(2)), Mixed)
