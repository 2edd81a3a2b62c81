"""Activations that are computed again (--grad-checkpointing): the same bits, in less memory."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hvdtrain.config.options import build_config
from hvdtrain.data.builtin import import_torchvision
from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange, SingleProcess
from hvdtrain.models import build_model
from hvdtrain.train.job import Job
from hvdtrain.train.recomputation import use_grad_checkpointing
from tests.unit.jobs import (
    CLASSES,
    CPU,
    check_ranks_and_resumption,
    equal,
    made_up_data,
    make_job,
    run_job,
    with_batch_norm,
    with_dropout,
)

SINGLE = SingleProcess()


class Noisy(nn.Module):
    """Its values depend on buffers that each call changes, in place and not, and on all random
    generators; one of three calls skips a layer. Counts its calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("sum", torch.zeros(16))
        self.register_buffer("last", None)
        self.calls = 0

    def forward(self, values: torch.Tensor, *, scale: float) -> torch.Tensor:
        self.calls += 1
        if self.training:
            self.sum += values.detach().mean(0)
            self.last = values.detach().amax() if self.last is None else 0.5 * self.last
        noise = torch.rand_like(values) + random.random() + np.random.random()
        inner = self.layer(values).tanh() if random.randrange(3) else values.tanh()
        return scale * (inner * noise + self.sum.clone() + (0 if self.last is None else self.last))


class NoisyNetwork(nn.Module):
    """Its second block is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Noisy(), Noisy()])
        self.head = nn.Linear(16, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        values = images.flatten(1)
        for number in (0, 1, 1):
            values = self.blocks[number](values, scale=0.3)
        return self.head(values)


def again(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same network, whose activations are computed again."""

    def made() -> nn.Module:
        model = build()
        use_grad_checkpointing(model, CPU)
        return model

    return made


@pytest.mark.parametrize("settings", [{}, {"virtual": 3}, {"accum": 2}, {"amp": "bf16"}])
@pytest.mark.parametrize("build", [NoisyNetwork, with_dropout])
def test_runs_end_with_the_same_bits(build: Any, settings: dict[str, Any]) -> None:
    """Fails if the second computation has other random numbers, buffers or types than the first, or
    leaves other ones behind.
    """
    jobs, runs = [], []
    for network in (build, again(build)):
        options = {"dtype": torch.float32} | settings
        data = made_up_data(24, torch.float32)
        jobs.append(make_job(data, 8, SINGLE, build=network, total_steps=7, **options))
        random.seed(1)
        np.random.seed(1)
        runs.append(run_job(jobs[-1], SINGLE))
    plain, computed_again = jobs
    assert equal(computed_again.model.state_dict(), plain.model.state_dict())
    assert runs[1].recording.records == runs[0].recording.records
    if build is NoisyNetwork:
        calls = [sum(block.calls for block in job.model.blocks) for job in jobs]
        assert calls[1] > 1.3 * calls[0]


def test_synchronised_batch_norm_over_ranks() -> None:
    """Fails if a second exchange of its sums hangs, or changes the statistics or the result."""

    def make(exchange: Exchange) -> Job:
        options = {"build": again(with_batch_norm), "total_steps": 7, "sync_bn": True}
        return make_job(made_up_data(20), 8, exchange, **options)

    alone = check_ranks_and_resumption(make, 2)
    plain = make_job(
        made_up_data(20), 8, SINGLE, build=with_batch_norm, total_steps=7, sync_bn=True
    )
    run_job(plain, SINGLE)
    assert equal(alone.model.state_dict(), plain.model.state_dict())


def small_vit() -> nn.Module:
    kind = import_torchvision().models.VisionTransformer
    return kind(32, 8, 3, 2, 24, 48, dropout=0.1, attention_dropout=0.1, num_classes=CLASSES)


def small_vgg() -> nn.Module:
    vgg = import_torchvision().models.vgg
    layers = vgg.make_layers([8, 8, "M", 8, 8, "M", 8, 8, "M"], batch_norm=True)
    return nn.Sequential(layers, nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, CLASSES))


def small_densenet() -> nn.Module:
    return import_torchvision().models.DenseNet(4, (3, 3), 8, num_classes=CLASSES)


def held_bytes(model: nn.Module, inputs: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Return what a forward pass holds for its backward pass, besides parameters; and the loss."""
    storages: dict[int, torch.Tensor] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (pointer := tensor.untyped_storage().data_ptr()) not in own:
            storages[pointer] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(inputs).square().sum()
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values()), loss


@pytest.mark.parametrize(
    ("build", "blocks"),
    [
        (lambda: build_model("resnet18-small", (3, 32, 32), CLASSES, torch.float32), 8),
        (lambda: build_model("mobilenet_v3_small", (3, 32, 32), CLASSES, torch.float32), 15),
        (small_vit, 3),
        (small_vgg, 4),
        (small_densenet, 8),
    ],
    ids=["resnet", "mobilenet", "vit", "vgg", "densenet"],
)
def test_networks_hold_less_and_compute_the_same(build: Any, blocks: int) -> None:
    """Fails if a kind of network has other blocks, or one that holds its activations or has other
    gradients or statistics; or if a copy computes with the original's parameters.
    """
    torch.manual_seed(3)
    plain = build().train()
    model = copy.deepcopy(plain)
    assert use_grad_checkpointing(model, CPU).startswith(f"{blocks} blocks of ")
    twin, inputs = copy.deepcopy(model), torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    results, held = [], []
    for network in (plain, twin):
        torch.manual_seed(4)
        size, loss = held_bytes(network, inputs)
        loss.backward()
        held.append(size)
        gradients = {name: p.grad for name, p in network.named_parameters()}
        results.append([gradients, dict(network.named_buffers()), torch.rand(1)])
    assert equal(results[1], results[0])
    assert held[1] < 0.5 * held[0]


class Own(nn.Module):
    """Has a method as timm's networks do."""

    def __init__(self, *layers: nn.Module, error: str = "") -> None:
        super().__init__()
        self.layers, self.error, self.calls = nn.Sequential(*layers), error, []

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.calls.append(enable)
        if self.error:
            raise AssertionError(self.error)


def test_a_method_of_the_model() -> None:
    """Fails if it is not called, or is where it would update running statistics twice, or if its
    refusal is a traceback.
    """
    own = Own(nn.Linear(2, 2), nn.Tanh())
    assert "Own.set_grad_checkpointing(True) was called" in use_grad_checkpointing(own, CPU)
    assert own.calls == [True] and "forward" not in vars(own.layers)
    normalised = Own(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert use_grad_checkpointing(normalised, CPU).startswith("1 block of Own")
    assert normalised.calls == []
    with pytest.raises(UsageError, match=r"^--grad-checkpointing: .*failed: .*not supported\. "):
        use_grad_checkpointing(Own(error="not supported"), CPU)


def test_what_cannot_be_served_is_refused() -> None:
    """Fails if a network without blocks, or one that changes what a block keeps, is trained on."""
    with pytest.raises(UsageError, match="--grad-checkpointing: Bilinear has no blocks to compute"):
        use_grad_checkpointing(nn.Bilinear(2, 2, 2), CPU)
    block = nn.TransformerEncoderLayer(4, 1, 4)
    block.forward = lambda values: values.mul_(2)
    model = nn.Sequential(nn.Linear(4, 4), block)
    use_grad_checkpointing(model, CPU)
    with torch.no_grad(), pytest.raises(UsageError, match="TransformerEncoderLayer changes its in"):
        model(torch.rand(3, 4))
    with pytest.raises(UsageError, match=r"^--compile and --grad-checkpointing: .*: leave one of"):
        build_config({"compile": True, "grad_checkpointing": True})


def test_layers_that_work_in_place() -> None:
    """Fails if one begins a part, whose input it would change."""
    layers = [
        nn.Dropout(0.5, inplace=True),
        nn.Linear(4, 4),
        nn.ReLU(inplace=True),
        nn.Linear(4, 4),
    ]
    model = nn.Sequential(*layers, nn.ReLU(inplace=True))
    assert use_grad_checkpointing(model, CPU).startswith("1 block of Sequential")
    model(torch.rand(3, 4)).sum().backward()
    assert layers[1].weight.grad is not None
