"""Synchronised batch norm against torch's own on the whole batch, and averaged statistics."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from hvdtrain.exchange import SingleProcess
from hvdtrain.train.batchnorm import (
    SyncBatchNorm,
    averaged_statistics,
    convert_back,
    convert_to_sync,
    counting,
    has_batch_norm,
)
from tests.unit.threads import ThreadExchange, connect, run_ranks

CLOSE = {"rtol": 1e-12, "atol": 1e-12}  # float64: some 1e4 roundings of 1.1e-16
STEPS = 3
SHARES = [(9,), (5, 3), (8, 0), (1, 6), (0, 6, 1), (2, 3, 4), (3, 0, 1, 4), (0, 0, 0, 5)]
INNER = {"1d": (), "1d of sequences": (5,), "2d": (4, 3)}
SETTINGS = [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}]
CHANNELS = 3


def make_layer(inner: tuple[int, ...], **settings: object) -> nn.Module:
    kind = nn.BatchNorm2d if len(inner) == 2 else nn.BatchNorm1d
    layer = kind(CHANNELS, dtype=torch.float64, **settings)
    with torch.no_grad():
        for place, parameter in enumerate(layer.parameters()):
            parameter.copy_(torch.arange(1, CHANNELS + 1) * 0.7 - place)
    return layer


def synced(layer: nn.Module, exchange: Any) -> Any:
    convert_to_sync(layer, exchange)
    return layer


def batches(samples: int, inner: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs, far from mean 0 and variance 1, and the gradients of their outputs."""
    generator = torch.Generator().manual_seed(samples)
    shape = (STEPS, samples, CHANNELS, *inner)
    inputs, factors = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return list(zip(inputs * 3 + 2, factors, strict=True))


def train_layer(layer: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]]):
    """Outputs and input gradients of every step; parameter gradients add up."""
    results = []
    for values, factors in data:
        values = values.clone().requires_grad_()
        outputs = layer(values)
        (outputs * factors).sum().backward()
        results += [outputs.detach(), values.grad]
    return results


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_sync_bn_is_batch_norm_of_the_whole_batch(shares, inner, settings) -> None:
    """Fails when any output, gradient or statistic differs from one layer's on all samples."""
    data = batches(sum(shares), inner)
    whole = make_layer(inner, **settings)
    expected = train_layer(whole, data)
    edges = [sum(shares[:rank]) for rank in range(len(shares) + 1)]
    parts = [slice(*edge) for edge in pairwise(edges)]

    def work(exchange: ThreadExchange):
        layer = synced(make_layer(inner, **settings), exchange)
        part = parts[exchange.rank]
        return layer, train_layer(layer, [(x[part], f[part]) for x, f in data])

    ranks = run_ranks(connect(len(shares)), work)
    for index, tensor in enumerate(expected):
        together = torch.cat([results[index] for _, results in ranks])
        torch.testing.assert_close(together, tensor, **CLOSE)
    for name, parameter in whole.named_parameters():
        summed = sum(dict(layer.named_parameters())[name].grad for layer, _ in ranks)
        torch.testing.assert_close(summed, parameter.grad, **CLOSE)
    for layer, _ in ranks:
        assert layer.state_dict().keys() == whole.state_dict().keys()
        torch.testing.assert_close(layer.state_dict(), whole.state_dict(), **CLOSE)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_evaluation_is_that_of_batch_norm(settings) -> None:
    """Fails when eval mode exchanges anything, differs by a bit, or moves a statistic."""
    data = batches(6, (4, 3))
    layer = make_layer((4, 3), **settings)
    train_layer(layer, data)
    layer.eval()
    sync = synced(copy.deepcopy(layer), SingleProcess())
    sync.exchange = None  # to be missed, if it were used
    with torch.no_grad():
        assert torch.equal(sync(data[0][0]), layer(data[0][0]))
    before = layer.state_dict()
    assert all(torch.equal(before[name], value) for name, value in sync.state_dict().items())


@pytest.mark.parametrize("shares", [(1, 0), (0, 0, 0)], ids=str)
def test_a_batch_without_variance_is_refused(shares: tuple[int, ...]) -> None:
    """Fails when one value per channel over all ranks ends in NaN, or leaves a rank waiting."""

    def work(exchange: ThreadExchange) -> str:
        layer = synced(make_layer(()), exchange)
        with pytest.raises(ValueError, match="more than one value per channel"):
            layer(torch.ones(shares[exchange.rank], CHANNELS, dtype=torch.float64))
        return "raised"

    assert run_ranks(connect(len(shares)), work) == ["raised"] * len(shares)


def test_half_precision_keeps_its_type() -> None:
    """Fails when statistics are summed in 16 bits, or the output is of another type."""
    values = (torch.randn(4000, CHANNELS) * 3 + 200).bfloat16()
    sync = synced(nn.BatchNorm1d(CHANNELS), SingleProcess())
    outputs = sync(values)
    assert outputs.dtype == torch.bfloat16
    torch.testing.assert_close(sync.running_mean, 0.1 * values.float().mean(0))


class Activated(nn.BatchNorm1d):
    """A layer that does more than to normalise, as those of timm."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        normalised = nn.functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.2
        )
        return normalised.relu()


@pytest.mark.parametrize("kind", [Activated, nn.SyncBatchNorm])
def test_the_rest_of_a_layer_stays_as_it_is(kind: type[nn.Module]) -> None:
    """Fails when a class loses what it adds, or its momentum; or does not get its class back."""
    data = batches(7, (5,))
    whole = kind(CHANNELS).double()
    expected = train_layer(whole, data)

    def work(exchange: ThreadExchange) -> list[torch.Tensor]:
        layer = synced(copy.deepcopy(kind(CHANNELS).double()), exchange)
        part = [slice(0, 3), slice(3, 7)][exchange.rank]
        results = train_layer(layer, [(x[part], f[part]) for x, f in data])
        assert isinstance(layer, kind) and isinstance(copy.deepcopy(layer), SyncBatchNorm)
        torch.testing.assert_close(layer.state_dict(), whole.state_dict(), **CLOSE)
        convert_back(layer)
        assert type(layer) is kind and "exchange" not in vars(layer)
        return results

    ranks = run_ranks(connect(2), work)
    for both in zip(expected, *ranks, strict=True):
        torch.testing.assert_close(torch.cat(both[1:]), both[0], **CLOSE)


def penalty(layer: nn.Module, values: torch.Tensor) -> torch.Tensor:
    """A gradient penalty: its derivative is a second derivative of the layer."""
    values = values.clone().requires_grad_()
    outputs = layer(values).tanh()
    (gradient,) = torch.autograd.grad(outputs.sum(), values, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().sum()


def test_second_derivatives_are_those_of_the_whole_batch() -> None:
    """Fails when a derivative of a derivative leaves out the samples of other ranks."""
    values = batches(7, ())[0][0]
    whole = make_layer(())
    penalty(whole, values).backward()

    def work(exchange: ThreadExchange) -> list[torch.Tensor]:
        layer = synced(make_layer(()), exchange)
        penalty(layer, values[[slice(0, 3), slice(3, 7)][exchange.rank]]).backward()
        return [it.grad for it in layer.parameters()]

    ranks = run_ranks(connect(2), work)
    for parameter, *own in zip(whole.parameters(), *ranks, strict=True):
        torch.testing.assert_close(sum(own), parameter.grad, **CLOSE)


def test_a_sample_that_stands_in_counts_nothing() -> None:
    """Fails when the statistics, or a gradient, are also those of the sample that a rank without
    samples gives the model.
    """
    values, factors = batches(4, (5,))[0]
    whole = make_layer((5,))
    train_layer(whole, [(values, factors)])

    def work(exchange: ThreadExchange) -> Any:
        layer = synced(make_layer((5,)), exchange)
        with counting(layer, 4 if exchange.rank == 0 else 0):
            stand_in = (values[:1] + 100, factors[:1] * 0)
            train_layer(layer, [(values, factors) if exchange.rank == 0 else stand_in])
        torch.testing.assert_close(layer.state_dict(), whole.state_dict(), **CLOSE)
        return [it.grad for it in layer.parameters()]

    ranks = run_ranks(connect(2), work)
    for parameter, *own in zip(whole.parameters(), *ranks, strict=True):
        torch.testing.assert_close(sum(own), parameter.grad, **CLOSE)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(3, momentum=0.3, eps=0.01)
        self.inner = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ModuleDict({"bn": nn.BatchNorm1d(3)}))
        self.other = nn.GroupNorm(1, 3)


def test_conversion_keeps_the_model_as_it_is() -> None:
    """Fails when a name, a tensor, a setting or the mode changes, or a layer is passed over."""
    model = Net()
    model.inner.eval()
    before = dict(model.named_parameters()) | dict(model.named_buffers())
    names = list(model.state_dict())
    sync = synced(model, SingleProcess())
    assert sync is model and list(model.state_dict()) == names
    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert all(after[name] is tensor for name, tensor in before.items())
    layers = [module for module in model.modules() if isinstance(module, SyncBatchNorm)]
    assert [(layer.momentum, layer.eps, layer.training) for layer in layers] == [
        *((0.3, 0.01, True), (0.1, 1e-5, False)),
    ]
    assert len({layer.collective for layer in layers}) == 2
    assert has_batch_norm(model) and not has_batch_norm(nn.Linear(1, 1))


def test_a_layer_that_stands_in_two_places_is_converted_in_both() -> None:
    """Fails when the second place keeps the layer that sees only its own rank's samples."""
    shared = nn.BatchNorm1d(3)
    model = synced(nn.Sequential(shared, nn.Linear(3, 3), shared), SingleProcess())
    assert isinstance(model[0], SyncBatchNorm) and model[2] is model[0]


def of_rank(rank: int) -> nn.Module:
    """A model whose statistics differ by rank and by place."""
    model = nn.Sequential(
        nn.BatchNorm1d(3, dtype=torch.float64),
        nn.Linear(3, 3),
        nn.BatchNorm1d(3, track_running_stats=False),
        nn.BatchNorm2d(2),
    )
    for place, buffer in enumerate(model.buffers()):
        values = torch.arange(buffer.numel()).view(buffer.shape) / 7 + rank * 1000 + place * 10
        buffer.copy_(values)
    return model


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (2, 0, 5), (1, 2, 3, 4)], ids=str)
def test_statistics_are_averaged_and_come_back(weights: tuple[int, ...]) -> None:
    """Fails when the mean is not weighted, a counter is averaged, or a bit is lost afterwards."""
    models = [of_rank(rank) for rank in range(len(weights))]
    before = [copy.deepcopy(model.state_dict()) for model in models]
    expected = {
        name: sum(w * state[name].double() for w, state in zip(weights, before, strict=True))
        / sum(weights)
        for name in before[0]
        if "running" in name
    }

    def work(exchange: ThreadExchange) -> None:
        model = models[exchange.rank]
        with averaged_statistics(model, exchange, weights[exchange.rank]) as averaged:
            assert averaged is model
            for name, tensor in model.state_dict().items():
                if name in expected:
                    torch.testing.assert_close(tensor, expected[name].to(tensor.dtype))
                else:
                    assert torch.equal(tensor, before[exchange.rank][name])
        with (
            pytest.raises(LookupError),
            averaged_statistics(model, exchange, weights[exchange.rank]),
        ):
            raise LookupError

    run_ranks(connect(len(weights)), work)
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())


def test_nothing_is_averaged_where_all_ranks_hold_the_same() -> None:
    """Fails when synchronised layers, or models without any, cost an exchange."""

    def work(exchange: ThreadExchange) -> None:
        exchange.sum_later = None  # type: ignore[method-assign, assignment]
        for model in (synced(of_rank(0), exchange), nn.Linear(2, 2)):
            with averaged_statistics(model, exchange, 1.0):
                pass

    run_ranks(connect(2), work)
