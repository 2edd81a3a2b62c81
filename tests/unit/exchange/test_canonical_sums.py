"""The canonical sums of training equal the reference in `hvdtrain.ring.canonical`, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.exchange import SingleProcess, canonical, canonical_rows
from hvdtrain.exchange.canonical import CanonicalSums, check_types
from hvdtrain.ring.canonical import canonical_sum
from hvdtrain.ring.operations import split_evenly
from hvdtrain.ring.orders import differing_bits
from tests.unit.threads import ThreadExchange, connect, run_ranks

# Rows of blocks begin anew with each parameter; the last three need a bucket of their own, and the
# last one is converted in two parts.
SHAPES = [(), (1,), (0, 3), (255,), (16, 16), (257,), (3, 100), (20, 256), (31, 100), (290, 256)]
Gradients = list[torch.Tensor | None]  # of one share, by parameter


class Bag(nn.Module):
    """Parameters without a network: the gradient of each is the factor given to `loss`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.zeros(s, dtype=dtype)) for s in SHAPES)

    def loss(self, factors: Gradients) -> torch.Tensor:
        terms = [(p * f).sum() for p, f in zip(self.all, factors, strict=True) if f is not None]
        return torch.stack(terms).sum()


def made_up(shares: int, dtype: torch.dtype, spoil: Callable[[int, Gradients], None]) -> list:
    """Gradients of many magnitudes, different for each share, parameter and position."""
    generator = torch.Generator().manual_seed(shares)
    made = []
    for share in range(shares):
        own: Gradients = []
        for shape in SHAPES:
            wide = torch.randn(shape, generator=generator, dtype=torch.float64)
            spread = torch.randint(-40, 5, shape, generator=generator)
            own.append(torch.ldexp(wide, spread).to(dtype))
        spoil(share, own)
        made.append(own)
    return made


def nothing(share: int, own: Gradients) -> None: ...


def some_missing(share: int, own: Gradients) -> None:
    """A share without any gradient, a parameter without any, and single ones."""
    own[4] = None
    if share % 2:
        own[1] = own[7] = None
    if share == 1:
        own[:] = [None] * len(own)


def not_finite(share: int, own: Gradients) -> None:
    """Infinities of one sign and of both, NaN, and overflow, beside finite elements."""
    own[3][share] = torch.inf
    own[5][256] = (-1) ** share * torch.inf
    own[6][1, 7] = torch.nan if share == 1 else 3.0
    own[7][5] = torch.finfo(own[7].dtype).max * 0.9


def tiny(share: int, own: Gradients) -> None:
    """Subnormals, zeros of both signs, and blocks of zeros."""
    least = torch.finfo(own[3].dtype).smallest_normal
    own[3] *= least
    own[5].zero_()
    own[5][3] = -0.0
    own[7][: 100 + share] *= least


def sums_of_rank(
    exchange: SingleProcess | ThreadExchange,
    gradients: list[Gradients],
    of_rank: Sequence[slice],
    overlap: bool,
) -> list[np.ndarray]:
    """Return the sums of the second of two steps; the first must leave no trace."""
    model = Bag(next(g for g in gradients[0] if g is not None).dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sums = CanonicalSums(model, optimizer, len(gradients), exchange)
    for step in (1, 2):
        optimizer.zero_grad()
        sums.begin(of_rank[exchange.rank].start)
        own = gradients[of_rank[exchange.rank]]
        for number, factors in enumerate(own, start=1):
            if number > 1:
                sums.next_share()
            sums.begin_pass(is_last=overlap and number == len(own))
            if any(it is not None for it in factors):
                model.loss([None if f is None else f * step for f in factors]).backward()
        are_finite = sums.finish()
    found = [p.grad.reshape(-1).numpy() for p in model.all]
    assert are_finite == all(np.isfinite(values).all() for values in found)
    return found


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buckets of few shares of small parameters are gathered, all others are not."""
    monkeypatch.setattr(canonical, "suitable_bucket_bytes", lambda ring_size, least: 8192)
    monkeypatch.setattr(canonical_rows, "GATHERED_BYTES", 40960)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("spoil", [nothing, some_missing, not_finite, tiny])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("shares", "ranks"), [(1, 1), (3, 1), (3, 2), (5, 3), (8, 4), (2, 3)])
def test_sums_are_those_of_the_reference(
    shares: int, ranks: int, dtype: torch.dtype, spoil, overlap: bool
) -> None:
    """Fails if blocks begin elsewhere, a share, a rank or a step leaks into another, ranks do not
    agree on exponents, infinities and NaNs are treated otherwise, or sums that are not finite are
    taken for finite. (2 shares on 3 ranks: one rank has none.)
    """
    gradients = made_up(shares, dtype, spoil)
    doubled = [[None if g is None else 2 * g for g in own] for own in gradients]
    expected = []
    for number, shape in enumerate(SHAPES):
        terms = [own[number] for own in doubled]
        zero = torch.zeros(shape, dtype=dtype)
        flat = [(zero if t is None else t).reshape(-1).numpy() for t in terms]
        expected.append(canonical_sum(flat, shares))
    parts = split_evenly(shares, ranks)
    exchanges = connect(ranks) if ranks > 1 else [SingleProcess()]
    for found in run_ranks(exchanges, lambda ex: sums_of_rank(ex, gradients, parts, overlap)):
        for number, (actual, right) in enumerate(zip(found, expected, strict=True)):
            assert not differing_bits(actual, right).any(), SHAPES[number]


def test_a_parameter_of_another_type_is_refused() -> None:
    """Fails if a gradient that cannot be rounded to integers begins to be summed."""
    model = nn.Linear(2, 2, dtype=torch.float16)
    with pytest.raises(UsageError, match=r"2 parameters .* such as weight \(torch.float16\)"):
        check_types(model)


class TwoSegments(nn.Module):
    """A layer in two segments of reentrant checkpoints: its gradient is made in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.is_checkpointed = True

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            if self.is_checkpointed:
                values = checkpoint(self.layer, values, use_reentrant=True)
            else:
                values = self.layer(values)
        return values


def test_a_gradient_made_in_several_parts() -> None:
    """Fails if a gradient is sent before its last part, or if parts that begin only later, when
    the first of them may have been sent, are not reported.
    """
    torch.manual_seed(2)
    values = torch.randn(5, 3, requires_grad=True)
    for first in (True, False):
        model = TwoSegments()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        sums = CanonicalSums(model, optimizer, 1, SingleProcess())
        for step in (1, 2, 3):
            optimizer.zero_grad()
            sums.begin(0)
            sums.begin_pass(is_last=True)
            model.is_checkpointed = first or step == 3
            if not first and step == 3:
                with pytest.raises(TrainingError, match="in several parts, for the first time"):
                    model(values).sum().backward()
                return
            model(values).sum().backward()
            sums.finish()
            found = model.layer.weight.grad.clone()
            model.is_checkpointed = False
            optimizer.zero_grad()
            expected = torch.autograd.grad(model(values).sum(), model.layer.weight)[0]
            torch.testing.assert_close(found, expected)


def test_gradients_of_any_strides() -> None:
    """Fails if a gradient that a hook has replaced by an expanded or transposed one is refused, or
    read in another order.
    """
    model = nn.ParameterList(nn.Parameter(torch.zeros(64, 32)) for _ in range(2))
    replaced = [torch.ones(1).expand(64, 32), torch.arange(2048.0).reshape(32, 64).t()]
    for parameter, gradient in zip(model, replaced, strict=True):
        parameter.register_post_accumulate_grad_hook(
            lambda p, g=gradient: setattr(p, "grad", g)  # before the one of the sums
        )
    sums = CanonicalSums(model, torch.optim.SGD(model.parameters(), lr=0.1), 1, SingleProcess())
    sums.begin(0)
    sums.begin_pass(is_last=True)
    (model[0].sum() + model[1].sum()).backward()
    sums.finish()
    for parameter, gradient in zip(model, replaced, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_a_parameter_that_is_unfrozen_later_is_reported() -> None:
    """Fails if its gradients would silently not be summed."""
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    sums = CanonicalSums(model, torch.optim.SGD(model.parameters(), lr=0.1), 2, SingleProcess())
    sums.begin(0)
    model.bias.requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(TrainingError, match="1 added or unfrozen"):
        sums.finish()
