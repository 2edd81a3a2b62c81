"""The order that a DataLoader's own sampler gives: drawn for each epoch, the same on every rank."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import data

from hvdtrain.data.loader_order import DrawnBatchSampler, LoaderOrder, order_of
from hvdtrain.data.token_batches import TokenBatches
from hvdtrain.errors import TrainingError, UsageError

SAMPLES = 23
DATA = data.TensorDataset(torch.arange(float(SAMPLES)))
TOKENS = [1 + k % 7 for k in range(SAMPLES)]
WEIGHTS = [1.0 + k % 5 for k in range(SAMPLES)]
Draw = Callable[[], Any]


class Numbers(data.Sampler[int]):
    """Numbers drawn from a generator of its own, of some kind."""

    def __init__(self, draw: Callable[[Any], Sequence[int]], generator: Any = None) -> None:
        self.draw, self.generator, self.epoch = draw, generator, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw(self))


class Lengths(data.Sampler[list[int]]):
    """Batches of 1, 2, 3, ... samples, in an order of their own."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(21).tolist()
        batches = [order[k * (k - 1) // 2 : k * (k + 1) // 2] for k in range(1, 7)]
        random.shuffle(batches)
        return iter(batches)


def shuffled_by(kind: str) -> Callable[[Numbers], list[int]]:
    """Return a draw of all samples by a kind of generator."""

    def draw(sampler: Numbers) -> list[int]:
        g, order = sampler.generator, list(range(SAMPLES))
        if kind == "torch":
            return torch.randperm(SAMPLES, generator=g).tolist()
        if kind == "python":
            (g or random).shuffle(order)
            return order
        return (g or np.random).permutation(SAMPLES).tolist()  # type: ignore[no-any-return]

    return draw


LOADERS: dict[str, Callable[[], data.DataLoader[Any]]] = {
    "weighted": lambda: data.DataLoader(
        DATA, 4, sampler=data.WeightedRandomSampler(WEIGHTS, 30, replacement=True)
    ),
    "generator of torch": lambda: data.DataLoader(
        DATA, 4, sampler=data.WeightedRandomSampler(WEIGHTS, 30, generator=torch.Generator())
    ),
    "subset": lambda: data.DataLoader(DATA, 4, sampler=data.SubsetRandomSampler(range(3, 16))),
    "replacement": lambda: data.DataLoader(
        DATA, 4, sampler=data.RandomSampler(DATA, replacement=True, num_samples=9)
    ),
    "batch sampler": lambda: data.DataLoader(DATA, batch_sampler=Lengths()),
    "tokens": lambda: data.DataLoader(DATA, batch_sampler=TokenBatches(TOKENS, 40)),
    "packed tokens": lambda: data.DataLoader(DATA, batch_sampler=TokenBatches(TOKENS, 40, True)),
    "batches of torch": lambda: data.DataLoader(
        DATA, batch_sampler=data.BatchSampler(data.WeightedRandomSampler(WEIGHTS, 30), 4, True)
    ),
    **{
        f"own, {kind}, {type(generator).__name__}": (
            lambda kind=kind, generator=generator: data.DataLoader(
                DATA, 4, sampler=Numbers(shuffled_by(kind), generator)
            )
        )
        for kind, generator in {
            "torch": None,
            "python": random.Random(3),
            "numpy": np.random.default_rng(3),
        }.items()
    },
    "own, old numpy": lambda: data.DataLoader(
        DATA, 4, sampler=Numbers(shuffled_by("numpy"), np.random.RandomState(3))
    ),
    "list": lambda: data.DataLoader(DATA, 2, sampler=[3, 4, 4, 1]),
    "list of batches": lambda: data.DataLoader(DATA, batch_sampler=[[3, 4], [4, 1, 0]]),
    "drop last": lambda: data.DataLoader(
        DATA, 4, sampler=data.SubsetRandomSampler(range(10)), drop_last=True
    ),
}
FIXED = ("list", "list of batches")  # draw nothing


def drawn(name: str, seed: int = 5) -> DrawnBatchSampler:
    order = order_of(LOADERS[name]())
    assert order is not None
    return DrawnBatchSampler(order, 4, seed)


def batches_of(sampler: DrawnBatchSampler, epoch: int) -> list[list[int]]:
    return [batch.tolist() for batch in sampler.global_batches(epoch * sampler.samples)]


@pytest.mark.parametrize("name", LOADERS)
def test_an_epoch_follows_from_seed_and_epoch(name: str) -> None:
    """Fails if an order depends on what was drawn before, on the process or on earlier epochs, if
    seed or epoch do not matter, or if the user's generators do not go on as before.
    """
    sampler = drawn(name)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    epochs = [batches_of(sampler, epoch) for epoch in range(3)]
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    torch.manual_seed(9)
    random.seed(9)
    np.random.seed(9)
    other = drawn(name)
    assert [batches_of(other, epoch) for epoch in (2, 0, 1)] == [epochs[k] for k in (2, 0, 1)]
    assert (epochs[0] == epochs[1]) == (name in FIXED)
    assert (batches_of(drawn(name, seed=6), 0) == epochs[0]) == (name in FIXED)


@pytest.mark.parametrize("name", LOADERS)
def test_cursors_batches_and_sizes_agree(name: str) -> None:
    """Fails if a resume in the middle of an epoch repeats or loses a batch."""
    sampler = drawn(name)
    for epoch in (0, 1):
        batches = batches_of(sampler, epoch)
        assert len(batches) == sampler.steps_per_epoch
        assert sum(map(len, batches)) == sampler.samples
        assert {len(batch) for batch in batches} <= sampler.batch_sizes
        assert max(map(len, batches)) == sampler.global_batch_size
        for step in range(len(batches)):
            cursor = sampler.cursor(epoch * len(batches) + step)
            rest = [batch.tolist() for batch in sampler.global_batches(cursor)]
            assert rest == batches[step:]
        assert sampler.order(epoch).tolist() == [number for batch in batches for number in batch]


@pytest.mark.parametrize(
    ("name", "samples", "steps"),
    [
        ("weighted", 30, 8),
        ("drop last", 8, 2),
        ("batches of torch", 28, 7),
        ("batch sampler", 21, 6),
    ],
)
def test_number_and_last_batch_are_as_given(name: str, samples: int, steps: int) -> None:
    """Fails if `num_samples` or `drop_last` has no effect."""
    assert (drawn(name).samples, drawn(name).steps_per_epoch) == (samples, steps)


def test_set_epoch_is_called() -> None:
    """Fails if a sampler that follows the epoch gets another one."""
    sampler = Numbers(lambda self: [self.epoch, 0, self.epoch + 1])
    order = DrawnBatchSampler(LoaderOrder(sampler, SAMPLES), 4, 0)
    assert [batches_of(order, epoch) for epoch in (4, 0, 2)] == [
        [[epoch, 0, epoch + 1]] for epoch in (4, 0, 2)
    ]


class Balanced(data.WeightedRandomSampler):
    """Seeds its generator for each epoch, so that it draws the same in a loop of torch alone."""

    def set_epoch(self, epoch: int) -> None:
        self.generator.manual_seed(epoch)


def test_a_sampler_may_seed_its_generator_in_set_epoch() -> None:
    """Fails if the run's seed takes the place of that which the sampler gives its generator."""
    sampler = Balanced([1.0] * SAMPLES, 8, generator=torch.Generator())
    order = DrawnBatchSampler(LoaderOrder(sampler, SAMPLES), 4, seed=5)
    for epoch in (3, 0):
        sampler.set_epoch(epoch)
        assert [it for batch in batches_of(order, epoch) for it in batch] == list(sampler)


@pytest.mark.parametrize(
    ("numbers", "batches", "text"),
    [
        ([0, SAMPLES], False, "yields sample 23 of a data set of 23"),
        ([0, -1], False, "yields sample -1"),
        ([], False, "an empty epoch"),
        ([[1], []], True, "an empty epoch or batch"),
        (["a"], False, "yields no numbers"),
        ([1.5], False, "yields no numbers"),
        ([None], False, "yields no numbers"),
        ([1, 2], True, "yields no batches"),
    ],
)
def test_what_is_no_order_is_refused(numbers: Any, batches: bool, text: str) -> None:
    """Fails if a wrong number is an index error in the middle of a run, or a traceback."""
    with pytest.raises(UsageError, match=text):
        DrawnBatchSampler(LoaderOrder(numbers, SAMPLES, batches), 4, 0)


def test_a_sampler_that_draws_from_elsewhere_is_refused() -> None:
    """Fails if a run begins that no resume could continue."""
    entropy = Numbers(lambda _: [number % SAMPLES for number in os.urandom(9)])
    with pytest.raises(UsageError, match="the Numbers gives another order each time that epoch 0"):
        DrawnBatchSampler(LoaderOrder(entropy, SAMPLES), 4, 0)


def test_a_sampler_that_looks_at_losses_is_found_at_the_next_epoch() -> None:
    """Fails if an order that training changes goes unnoticed."""
    losses = list(range(SAMPLES))
    hard = Numbers(lambda _: sorted(range(SAMPLES), key=losses.__getitem__))
    sampler = DrawnBatchSampler(LoaderOrder(hard, SAMPLES), 4, 0)
    sampler.begin(0)
    losses.reverse()
    with pytest.raises(TrainingError, match=r"each time that epoch 0 is drawn.*not on losses"):
        sampler.begin(1)


def test_epochs_of_other_lengths_are_refused() -> None:
    """Fails if the end of an epoch is looked for at the wrong step."""
    growing = Numbers(lambda self: list(range(5 + self.epoch)))
    sampler = DrawnBatchSampler(LoaderOrder(growing, SAMPLES), 4, 0)
    with pytest.raises(TrainingError, match="gave 6 samples in 2 batches in epoch 1, and 5 in 2"):
        sampler.begin(1)


@pytest.mark.parametrize(("before", "after"), [("weighted", "subset"), (None, "weighted")])
def test_a_resume_in_another_order_is_refused(before: str | None, after: str) -> None:
    """Fails if a resumed run goes on with other samples than it would have had."""
    saved = None if before is None else drawn(before).drawn
    with pytest.raises(UsageError, match=r"--resume: .*order"):
        drawn(after).check_drawn(saved)


def test_a_resume_in_the_same_order_goes_on() -> None:
    """Fails if the digest depends on the process, or the epoch of a checkpoint is not its own."""
    sampler = drawn("weighted")
    sampler.begin(2)
    drawn("weighted").check_drawn(sampler.drawn)
    with pytest.raises(UsageError, match="order of epoch 2 was another"):
        drawn("weighted", seed=6).check_drawn(sampler.drawn)
