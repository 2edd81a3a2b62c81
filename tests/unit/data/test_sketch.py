"""Sketches of samples: other data are found, other rounding is not; and what follows from them."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, random_split

import hvdtrain
from hvdtrain import IterableSplit, MapSplit, split_of
from hvdtrain.data.sketch import SAMPLES, SKETCH, alike, sketch_of
from hvdtrain.data.splits import Splits, fingerprint
from hvdtrain.errors import AgreedFailure
from hvdtrain.run.same_data import refuse_other_data
from tests.unit.readable import Flow, Noisy, Opened, open_file
from tests.unit.threads import ThreadExchange, connect, run_ranks

PIXELS = torch.randint(256, (40, 3, 8, 8), generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(40) % 5


def batches(x: Any, y: Any = LABELS) -> Any:
    """Return a split of pairs."""
    return split_of(list(zip(x, y, strict=True)))


def noise(size: float) -> torch.Tensor:
    return size * torch.randn(PIXELS.shape, generator=torch.Generator().manual_seed(2))


def objects() -> Any:
    """Return a split of objects, which hold tensors and a set."""
    made = [SimpleNamespace(x=torch.ones(2), names={"a", "b"}) for _ in range(9)]
    return MapSplit(made, list)


SAME: dict[str, tuple[Any, Any]] = {
    "rounded floats": (batches(PIXELS / 255), batches((PIXELS + noise(0.5)) / 255)),
    "pixels of another decoder": (
        batches(PIXELS.to(torch.uint8)),
        batches((PIXELS + noise(0.5)).round().clamp(0, 255).to(torch.uint8)),
    ),
    "not a number": (batches(PIXELS / 0), batches(PIXELS / 0)),
    "augmented": (split_of(Noisy()), split_of(Noisy())),
    "iterated": (IterableSplit(Flow(), 40), IterableSplit(Flow(), 40)),
    "objects": (objects(), objects()),
}
OTHER: dict[str, tuple[Any, Any]] = {
    "labels": (batches(PIXELS), batches(PIXELS, (LABELS + 1) % 5)),
    "labels that are floats": (batches(PIXELS, LABELS / 2), batches(PIXELS, (4 - LABELS) / 2)),
    "order": (batches(PIXELS / 255), batches(PIXELS.flip(0) / 255)),
    "one of the samples": (
        batches(PIXELS / 255),
        batches(torch.cat([PIXELS[:39], PIXELS[:1]]) / 255),
    ),
    "type": (batches(PIXELS / 255), batches(PIXELS.double() / 255)),
    "shape": (batches(PIXELS / 255), batches(PIXELS[:, :2] / 255)),
    "text": (split_of([{"a": "one"}] * 9), split_of([{"a": "two"}] * 9)),
    "arrays": (split_of([np.ones(3)] * 9), split_of([np.ones(3) * 2] * 9)),
    "iterated": (IterableSplit(range(40), 40), IterableSplit(range(1, 41), 40)),
    "an error": (split_of([None] * 9), split_of([torch.ones(1)] * 9)),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_samples_are_alike(name: str) -> None:
    """Fails if training is refused for what another processor or decoder rounds differently."""
    one, two = SAME[name]
    assert alike(sketch_of(one), sketch_of(two))


@pytest.mark.parametrize("name", OTHER)
def test_other_samples_are_not_alike(name: str) -> None:
    """Fails if data that differ between processes pass for the same."""
    one, two = OTHER[name]
    assert not alike(sketch_of(one), sketch_of(two))


def test_a_sketch_reads_a_few_samples_and_draws_nothing() -> None:
    """Fails if a large data set is read for long, the random numbers of the run change, or reading
    goes on within the training process where others read.
    """
    read: list[int] = []

    class Large(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, index: int) -> float:
            read.append(index)
            return random.random() + float(torch.rand(()))

    before = torch.get_rng_state(), random.getstate()
    assert len(sketch_of(split_of(Large()))) == 1
    assert len(read) == SAMPLES and {0, 10**9 - 1} <= {*read}
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    opened = split_of(DataLoader(Opened(), num_workers=1, worker_init_fn=open_file))
    assert "AssertionError" not in str(sketch_of(opened))


def known_of(data: Splits) -> dict[str, Any]:
    return {
        part: fingerprint(it) | {SKETCH: sketch_of(it)}
        for part, it in (("train", data.train), ("valid", data.valid))
    }


def refused(make: Callable[[int], tuple[Any, Any]]) -> str:
    """Return what three ranks report, whose data `make` returns."""
    data = [Splits("made", *map(split_of, make(rank))) for rank in range(3)]
    known = [known_of(it) for it in data]

    def check(exchange: ThreadExchange) -> str:
        rank = exchange.rank
        try:
            refuse_other_data(exchange, data[rank], known[rank], [0] * 3)
        except AgreedFailure as error:
            return str(error)
        return ""

    found = run_ranks(connect(3), check)
    assert len({*found}) == 1
    return found[0]


def train(data: Any, **options: Any) -> int:
    """Train a script's loop, which fails in step 4; return the first step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    numbers = []
    given = {"global_batch_size": 5, "epochs": 1, "device": "cpu", "checkpoint_interval": 2}
    given["experiment"] = "mine"  # also in later loops of the process
    with (
        suppress(ZeroDivisionError),
        hvdtrain.Loop(model, optimizer, data, **given, **options) as loop,
    ):
        for step in loop:
            numbers.append(step.number)
            for x in step.batches():
                step.backward(model(x).sum(), len(x))
            step.update()
            if step.number == 4:
                raise ZeroDivisionError
    return numbers[0]


@pytest.mark.usefixtures("script")
def test_a_resume_with_other_samples_is_refused() -> None:
    """Fails if a run goes on with other samples of the same number, or is not resumed with the
    same ones, but for rounding.
    """
    data = torch.rand(40, 2, generator=torch.Generator().manual_seed(1))
    assert train(data) == 1
    with pytest.raises(
        AgreedFailure, match="40 samples as before, which now have samples with other"
    ):
        train(data.flip(0), resume="auto")
    assert train(data + 1e-5, resume="auto") == 3


WHOLE = TensorDataset(PIXELS / 255, LABELS)


def unseeded(rank: int) -> tuple[Any, Any]:
    train, valid = random_split(WHOLE, [30, 10], torch.Generator().manual_seed(rank // 2))
    return train, valid


def test_ranks_with_other_data_are_refused() -> None:
    """Fails if ranks train on different samples, silently, or those that differ are not named."""
    assert refused(lambda rank: (WHOLE, WHOLE)) == ""
    split = refused(unseeded)
    for part in ("train", "valid"):
        assert f"the {part} data have samples with other values, unlike on rank 0" in split
    assert "rank 2: " in split and "rank 1: " not in split
    assert "number classes by sorted(names)" in split
    sizes = refused(lambda rank: (list(PIXELS[: 40 - rank]), WHOLE))
    assert "have 39 samples instead of 40" in sizes and "have 38 samples instead of 40" in sizes
    labelled = refused(
        lambda rank: (hvdtrain.TensorSplit(PIXELS / 255, (LABELS + rank // 2) % 5), WHOLE)
    )
    assert "have 40 samples with other names or labels" in labelled


def test_a_generator_of_the_data_sets_own_is_no_reason_to_refuse(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fails if augmentation that no one seeds is taken for other data, or passes without a word."""

    class Own(torch.utils.data.Dataset[Any]):
        def __init__(self, rank: int) -> None:
            self.generator = np.random.default_rng(rank)

        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> float:
            return float(index * self.generator.random())

    assert refused(lambda rank: (Own(rank), WHOLE)) == ""
    assert "draws from a random generator of its own" in capsys.readouterr().err
