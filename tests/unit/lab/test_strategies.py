"""The systems that are compared, as far as one process can show."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import nn

from hvdtrain.cli import compare as compare_options
from hvdtrain.errors import UsageError
from hvdtrain.lab.systems import SYSTEMS, Strategy, find_strategy
from hvdtrain.lab.systems.contract import CountedTransport, Traffic, socket_traffic
from hvdtrain.lab.systems.model_parallel import choose_cuts, cut_into_stages, shapes_between
from hvdtrain.lab.systems.parameter_server import AsynchronousServer
from hvdtrain.lab.systems.plain_torch import NO_GPU, TorchDataParallel
from hvdtrain.lab.systems.towers import REDUCTIONS, Towers, split_along
from hvdtrain.lab.systems.work import (
    GlobalBatch,
    Work,
    flatten_gradients,
    flatten_parameters,
    parameters_of,
)
from hvdtrain.models import LeNet
from hvdtrain.ring import all_reduce
from tests.rings import run_in_process
from tests.unit.strategies import make_spec, run_alone, run_single, work_spec

SIZE = 12 * 8  # of gradients, for formulas


def largest_difference(strategy: Strategy, oracle: Strategy) -> float:
    own, expected = strategy.parameters(), oracle.parameters()
    assert own.keys() == expected.keys()
    return max((own[n] - w).abs().max().item() / w.abs().max().item() for n, w in expected.items())


@pytest.mark.parametrize("dimension", [0, 1, 3])
@pytest.mark.parametrize("towers", [2, 3, 7])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_towers_learn_what_one_device_learns(reduction: str, towers: int, dimension: int) -> None:
    """Fails if a reduction weighs uneven parts wrong (2 to 5 samples over 7 towers: some have
    none), leaves a tower behind, or splits another dimension than that of the samples.
    """
    spec = make_spec("towers", towers, towers_reduction=reduction, towers_dim=dimension)
    strategy = run_alone(Towers, spec)
    assert largest_difference(strategy, run_single()) < 1e-13
    expected = Towers.formula(spec, strategy.work.bytes_of_gradients)
    steps = spec.work.steps
    for name, traffic in strategy.traffic().items():
        mean = traffic.since(Traffic(), steps)
        assert (mean.sent, mean.received) == (expected[name].sent, expected[name].received)
    assert strategy.traffic().keys() == expected.keys()
    strategy.close()


def test_a_tensor_is_split_along_the_dimension() -> None:
    """Fails if parts are lost, or cut along another dimension."""
    tensor = torch.arange(2 * 5 * 3).reshape(2, 5, 3)
    parts = split_along(tensor, 1, 3)
    assert [part.shape for part in parts] == [(2, 1, 3), (2, 2, 3), (2, 2, 3)]
    assert torch.equal(torch.cat(parts, dim=1), tensor)


def test_shares_add_up_to_the_gradient_of_the_mean() -> None:
    """Fails if an uneven or empty share counts for more or less than its samples."""
    work = Work(work_spec())
    gradients = flatten_gradients(work.model)
    batch = GlobalBatch(np.arange(5), 0)
    work.add_gradient_of_share(batch, 0, 1)
    whole = gradients.clone()
    gradients.zero_()
    for worker in range(7):
        work.add_gradient_of_share(batch, worker, 7)
    assert (gradients - whole).abs().max() < 1e-14 * whole.abs().max()


def test_flat_tensors_are_the_models_own() -> None:
    """Fails if a change of the flat tensor is not one of the model, or the other way round."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    values, gradients = flatten_parameters(model), flatten_gradients(model)
    assert torch.equal(values, torch.cat([p.reshape(-1) for p in before]))
    values.add_(1)
    assert all(torch.equal(p, b + 1) for p, b in zip(model.parameters(), before, strict=True))
    model(torch.ones(1, 2)).sum().backward()
    assert gradients[-1] == 1  # that of the last bias
    assert gradients.abs().sum() > 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="it shows what happens without a GPU")
def test_data_parallel_without_a_gpu_has_a_note() -> None:
    """Fails if one replica passes for several, or its result is another."""
    strategy = run_alone(TorchDataParallel, make_spec("data_parallel", 2))
    assert strategy.notes() == [NO_GPU]
    assert largest_difference(strategy, run_single()) == 0


class ScriptedMessages:
    """Pushes that come in a given order; notes who is answered."""

    def __init__(self, senders: Sequence[int]) -> None:
        self.senders = list(senders)
        self.answered: list[tuple[int, float]] = []

    def receive_from_any(self, tensor: torch.Tensor) -> int:
        tensor.fill_(1.0)
        return self.senders.pop(0)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self.answered.append((to, float(tensor[0])))


def test_staleness_counts_updates_since_the_worker_received_parameters() -> None:
    """Fails if staleness counts a worker's own update, or is not that of the push."""
    messages = ScriptedMessages([0, 1, 1, 1, 0, 0])
    work = Work(work_spec(momentum=0.0))
    server = AsynchronousServer(work, torch.zeros(3), 2, messages)  # type: ignore[arg-type]
    for _ in range(3):
        server.step()
    # Seen by worker 0: received at the beginning, then after update 1, then after update 5.
    assert server.figures() == {"staleness_mean": (0 + 1 + 0 + 0 + 3 + 0) / 6, "staleness_max": 3}
    assert [worker for worker, _ in messages.answered] == [0, 1, 1, 1, 0, 0]
    assert messages.answered[-1][1] == pytest.approx(-6 * 0.05)  # each push is an update


class ResidualNet(nn.Module):
    """Two blocks with a connection around each: between blocks alone one tensor passes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3)
        self.blocks = nn.ModuleList(nn.Linear(26, 26) for _ in range(2))
        self.scale = nn.Parameter(torch.full((26,), 1.5))  # no layer's
        self.last = nn.Linear(4 * 26 * 26, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.first(images) * self.scale
        for layer in self.blocks:
            features = features + layer(features).relu()
        scores: torch.Tensor = self.last(features.flatten(1))
        return scores


@pytest.mark.parametrize(("make", "most"), [(lambda: LeNet(1, 10), 4), (ResidualNet, 4)])
def test_stages_one_after_the_other_are_the_network(
    make: Callable[[], nn.Module], most: int
) -> None:
    """Fails if a stage loses or shares a parameter, renames one, or computes something else; with
    residual connections a cut within a block would.
    """
    model, inputs = make(), torch.randn(2, 1, 28, 28)
    expected = model(inputs)
    for count in range(1, most + 1):
        stages = cut_into_stages(model, count)
        assert len(stages) == count
        names = [name for stage in stages for name, _ in stage.named_parameters()]
        assert sorted(names) == sorted(parameters_of(model))
        value, shapes = inputs, []
        for stage in stages:
            value = stage(value)
            shapes.append(value.shape[1:])
        assert torch.equal(value, expected)
        assert shapes_between(stages, inputs[:1]) == shapes[:-1]


def test_no_more_stages_than_layers() -> None:
    """Fails if a stage without layers is made up."""
    assert len(cut_into_stages(Work(work_spec()).model, 9)) == 4


def test_cuts_share_out_layers_and_take_the_latest_place() -> None:
    """Fails if stages are uneven without need, or a cut comes before the pooling."""
    layers_before = [0, 0, 1, 1, 1, 2, 2, 3, 4]
    places = range(1, 8)
    assert choose_cuts(layers_before, places, 2) == [6]
    assert choose_cuts(layers_before, places, 4) == [4, 6, 7]
    assert choose_cuts(layers_before, [7], 4) == [7]


def test_what_cannot_be_cut_is_refused() -> None:
    """Fails if a network that branches on values, or ties parameters, is cut anyway."""

    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(UsageError, match="cannot trace"):
        cut_into_stages(Branching(), 2)
    layer = nn.Linear(3, 3)
    with pytest.raises(UsageError, match="share a parameter"):
        cut_into_stages(nn.Sequential(layer, nn.Linear(3, 3), layer), 2)


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("name", ["ddp", "gather_broadcast", "parameter_server", "ring", "horovod"])
def test_formulas_lose_no_byte(name: str, workers: int) -> None:
    """Fails if more is sent than received, or a formula leaves a process out."""
    spec = make_spec(name, workers)
    strategy = find_strategy(name)
    formula = strategy.formula(spec, SIZE)
    assert formula is not None
    assert list(formula) == strategy.processes(spec)
    sent = sum(traffic.sent for traffic in formula.values())
    assert sent == pytest.approx(sum(traffic.received for traffic in formula.values()))
    total = {"gather_broadcast": 2 * (workers - 1), "parameter_server": 2 * workers}
    assert sent == pytest.approx(total.get(name, 2 * (workers - 1)) * SIZE)


def test_a_counted_ring_sends_what_its_formula_says() -> None:
    """Fails if a message passes uncounted, or is counted twice."""

    def work(transport: object) -> Traffic:
        counted = CountedTransport(transport)  # type: ignore[arg-type]
        all_reduce(np.ones(12), counted)
        return counted.traffic

    formula = find_strategy("ring").formula(make_spec("ring", 3), SIZE)
    assert formula is not None
    assert run_in_process(3, work) == [*formula.values()]


def test_sockets_are_measured() -> None:
    """Fails if bytes over TCP are not those of the kernel, or other descriptors disturb."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        client = socket.create_connection(door.getsockname())
        server, _ = door.accept()
        with client, server:
            before = socket_traffic()
            client.sendall(bytes(100_000))
            received = 0
            while received < 100_000:
                received += len(server.recv(1 << 16))
            after = socket_traffic()
    assert before is not None and after is not None
    between = after.since(before, 1)
    assert (between.sent, between.received) == (100_000, 100_000)


def test_names_of_systems_are_the_same_everywhere() -> None:
    """Fails if the light list that --help shows is not that of the strategies."""
    assert tuple(SYSTEMS) == compare_options.SYSTEMS
    assert tuple(REDUCTIONS) == compare_options.REDUCTIONS
    for name in SYSTEMS:
        assert find_strategy(name).what


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("tests.unit.strategies:make_spec", "not a subclass of"),
        ("tests.unit.strategies:absent", "has no 'absent'"),
    ],
)
def test_what_is_no_system_is_refused(name: str, problem: str) -> None:
    """Fails if it is taken for one."""
    with pytest.raises(UsageError, match=problem):
        find_strategy(name)
