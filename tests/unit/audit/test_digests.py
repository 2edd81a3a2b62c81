"""Digests of tensors: a change of any bit shows, and the digest is the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.audit.digests import BLOCK_BYTES, BatchDigest, PassDigests, digest_of, text_of
from hvdtrain.data.feeding import StepData
from hvdtrain.train.metering import StepSums

BLOCK = BLOCK_BYTES // 4  # elements of float32
GOLDEN = "52a4af24e75879a6"  # of 0, 1, 2, ...
LENGTHS = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7]


def values(length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(length, generator=generator)


def text(tensor: torch.Tensor) -> str:
    return text_of(digest_of(tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool])
@given(length=st.sampled_from(LENGTHS[1:]), data=st.data())
def test_every_bit_counts(dtype: torch.dtype, length: int, data: st.DataObject) -> None:
    """Fails if a flipped bit of an element goes unnoticed, in a whole block or in the rest."""
    tensor = values(length).to(dtype)
    changed = tensor.clone()
    octets = changed.view(torch.uint8)
    place = data.draw(st.integers(0, octets.numel() - 1))
    octets[place] ^= 1 if dtype == torch.bool else 1 << data.draw(st.integers(0, 7))
    assert text(changed) != text(tensor)


@pytest.mark.parametrize("length", LENGTHS[2:])
def test_changes_that_could_cancel(length: int) -> None:
    """Fails if signs of two elements, exchanged elements, or exchanged blocks go unnoticed."""
    tensor = values(length)
    seen = {text(tensor), text(-tensor), text(tensor.flip(0)), text(tensor.roll(1))}
    for one, other in ((0, 1), (1, 3), (0, length - 1)):
        signs = tensor.clone()
        signs[[one, other]] *= -1
        swapped = tensor.clone()
        swapped[[one, other]] = swapped[[other, one]]
        seen |= {text(signs), text(swapped)}
    assert len(seen) == 4 + 2 * 3
    if length > 2 * BLOCK:
        blocks = tensor.clone()
        blocks[:BLOCK], blocks[BLOCK : 2 * BLOCK] = tensor[BLOCK : 2 * BLOCK], tensor[:BLOCK]
        assert text(blocks) not in seen


def test_digests_are_the_same_everywhere() -> None:
    """Fails if a digest changes with the version of a library: records of old traces would."""
    ramp = torch.arange(2 * BLOCK + 5, dtype=torch.float32)
    assert text(ramp) == GOLDEN
    assert text(ramp.view(1, -1).expand(2, -1)[1]) == GOLDEN  # by values, not by layout
    assert text_of(digest_of(None)) == ""
    assert text(ramp[:0]) != ""


def test_batches_with_types_and_shapes() -> None:
    """Fails if batches of other shapes, types or structures have the digest of others."""
    ramp = torch.arange(6)
    batches = [ramp, ramp.view(2, 3), ramp.int(), [ramp], {"x": ramp}, [ramp, None], np.arange(6)]
    digests = []
    for batch in batches:
        digest = BatchDigest()
        digest.add(batch)
        digests.append(text_of(digest.words()))
    assert len(set(digests)) == len(batches)


def test_passes_for_each_of_several_optimizers_are_digested() -> None:
    """Fails if digests end with the first of a step's updates, or do not end with the step."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    optimizers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in model]
    digests = PassDigests(model, step=2)
    for step in (1, 2, 3):
        digests.begin(step, StepData(np.arange(2), [], iter(())))
        for optimizer in optimizers:
            inputs = values(6).reshape(2, 3)
            digests.begin_pass(0, inputs)
            model(inputs).sum().backward()
            digests.reduced(step, [optimizer])
        digests.updated(step, StepSums(torch.device("cpu")))
    first, second = digests.passes[0]
    assert "the gradient of 1.weight" in first
    assert first.keys() == second.keys()
