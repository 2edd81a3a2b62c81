"""Channels last and compiled networks: the same names, values and sums as without."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hvdtrain.config.options import build_config
from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.exchange import SingleProcess
from hvdtrain.exchange.distributed_optimizer import GradientsInFlight
from hvdtrain.models import execution
from hvdtrain.models.execution import (
    compile_forward,
    copied,
    is_compiled,
    require_compiler,
    use_channels_last,
)
from hvdtrain.ring.orders import OPEN_MPI_RING
from hvdtrain.train.job import Job
from hvdtrain.train.simulated import SimulatedRanks
from tests.unit.jobs import CLASSES, CPU, equal, made_up_data, make_job, run_job, with_dropout

LAST = torch.channels_last
SINGLE = SingleProcess()


def network() -> nn.Module:
    """Its kernels have strides that differ between the formats; the input has one channel."""
    layers = [nn.Conv2d(1, 4, 2), nn.ReLU(), nn.Conv2d(4, 3, 2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(12, CLASSES))


def last_network() -> nn.Module:
    model = network()
    use_channels_last(model)
    return model


def is_last(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=LAST) and not tensor.is_contiguous()


class Taking(nn.Module):
    """Keeps what it is called with."""

    def forward(self, *inputs: Any, **named: Any) -> None:
        self.taken = [*inputs, *named.values()]


def test_channels_last() -> None:
    """Fails if a kernel or an image keeps its format, another tensor is changed, or a result is."""
    model, same = last_network(), network()
    same.load_state_dict(model.state_dict())
    assert is_last(model[2].weight) and model.state_dict().keys() == same.state_dict().keys()
    inputs = torch.rand(5, 1, 4, 4)
    torch.testing.assert_close(model(inputs), same(inputs))
    taking = Taking()
    use_channels_last(taking)
    taking(torch.rand(2, 3, 4, 5), 7, torch.rand(2, 3), pixels=torch.rand(2, 3, 4, 5))
    first, number, matrix, named = taking.taken
    assert is_last(first) and is_last(named)
    assert number == 7 and matrix.is_contiguous()


def fused(job: Job) -> Job:
    rate = {"lr": 0.05, "momentum": 0.9, "fused": True}
    return replace(job, optimizers=(torch.optim.SGD(job.model.parameters(), **rate),))


@pytest.mark.parametrize("virtual", [None, 3])
def test_layouts_do_not_change_what_is_learned(virtual: int | None) -> None:
    """Fails if a fused step combines a parameter with a gradient or a momentum that is laid out
    otherwise: after a canonical sum, or after a resumption, which must not change a bit.
    """

    def job(build: Any) -> Job:
        made = make_job(made_up_data(20), 8, SINGLE, build=build, total_steps=7, virtual=virtual)
        return fused(made).distributed(SINGLE)

    plain, last, resumed = job(network), job(last_network), job(last_network)
    run_job(plain, SINGLE)
    run_job(last, SINGLE)
    stopped = run_job(job(last_network), SINGLE, stop_at=4)
    assert stopped.snapshot is not None
    run_job(resumed, SINGLE, state=stopped.snapshot.state)
    assert is_last(last.optimizers[0].state[last.model[2].weight]["momentum_buffer"])
    for name, weight in plain.model.state_dict().items():
        torch.testing.assert_close(last.model.state_dict()[name], weight, rtol=1e-12, atol=1e-14)
    assert equal(resumed.model.state_dict(), last.model.state_dict())
    assert equal(resumed.optimizers[0].state_dict(), last.optimizers[0].state_dict())


def test_simulated_ranks_lay_out_their_sums() -> None:
    """Fails if `replay` gives a fused step a gradient that is laid out otherwise."""
    model = last_network()
    messages = [dict(list(model.named_parameters())[:1]), dict(list(model.named_parameters())[1:])]
    ranks = SimulatedRanks(model, 2, OPEN_MPI_RING, CPU, 0, messages)
    ranks.begin_step([0])
    expected = torch.zeros_like(model[2].weight)
    for rank in range(2):
        ranks.begin_pass(1, rank, 0, rank == 1)
        model(torch.rand(2, 1, 4, 4)).square().sum().backward()
        expected += model[2].weight.grad
    ranks.reduce_gradients()
    assert model[2].weight.grad.stride() == model[2].weight.stride()
    torch.testing.assert_close(model[2].weight.grad, expected)


def test_horovod_receives_contiguous_gradients() -> None:
    """Fails if Horovod is given a gradient that it refuses, code appears to have changed it, or the
    sum is left in another layout, or in another order.
    """
    model, given = last_network(), {}

    def submit(parameter: nn.Parameter) -> tuple[int, None]:
        assert parameter.grad is not None and parameter.grad.is_contiguous()
        given[parameter] = parameter.grad
        return 1, None

    def synchronize() -> None:
        for parameter, gradient in given.items():
            parameter.grad.set_(gradient.detach() * 2)  # as Horovod does

    reducer = SimpleNamespace(
        _allreduce_grad_async=submit,
        synchronize=synchronize,
        _requires_update=set(model.parameters()),
        _parameter_names={it: name for name, it in model.named_parameters()},
    )
    flight = GradientsInFlight(reducer)
    model(torch.rand(2, 1, 4, 4)).square().sum().backward()
    expected = {it: it.grad.clone() * 2 for it in model.parameters()}
    assert is_last(model[2].weight.grad)
    for parameter in model.parameters():
        reducer._allreduce_grad_async(parameter)
    flight.synchronize()
    for parameter, gradient in expected.items():
        assert parameter.grad.stride() == parameter.stride()
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize(("copies", "changes"), [(0, 1), (1, 2)])
def test_a_change_during_a_reduction_is_found(copies: int, changes: int) -> None:
    """Fails if a change goes unnoticed, or Horovod's own copy to a GPU is taken for one."""
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    reducer = SimpleNamespace(
        _allreduce_grad_async=lambda _: (1, None),
        synchronize=lambda: None,
        _requires_update={weight},
        _parameter_names={weight: "weight"},
    )
    flight = GradientsInFlight(reducer, copies=copies)
    reducer._allreduce_grad_async(weight)
    for _ in range(copies):
        weight.grad.copy_(torch.zeros(3))
    flight.synchronize()
    reducer._allreduce_grad_async(weight)
    for _ in range(changes):
        weight.grad.mul_(2)
    with pytest.raises(TrainingError, match="code changed parameter weight"):
        flight.synchronize()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of each graph that is compiled from now on. It calls the same operations: what C++
    code computes is tested in tests/parallel.
    """
    made: list[int] = []
    torch._dynamo.reset()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        made.append(len(list(graph.graph.nodes)))
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    return made


def test_compilation_leaves_names_and_copies(compilations: list[int]) -> None:
    """Fails if nn.Sequential is not compiled, names or values change, or a copy computes in another
    way than the model.
    """
    model = network()
    before, inputs = list(model.state_dict()), torch.rand(3, 1, 4, 4)
    expected = model(inputs)
    compile_forward(model)
    assert torch.equal(model(inputs), expected)
    assert len(compilations) == 1 and list(model.state_dict()) == before
    twin = copied(model)
    assert is_compiled(twin) and not is_compiled(copied(network()))
    with torch.no_grad():
        model[4].bias += 1
    assert torch.equal(twin(inputs), expected)
    torch.testing.assert_close(model(inputs), expected + 1)


@pytest.mark.parametrize("last", [False, True])
def test_compiled_virtual_workers(compilations: list[int], last: bool) -> None:
    """Fails if a compiled pass has the buffers, mode or random numbers of another worker, or an
    evaluation is not compiled apart.
    """

    def job(compiles: bool) -> Job:
        made = make_job(made_up_data(24), 8, SINGLE, build=with_dropout, total_steps=5, virtual=3)
        if last:
            use_channels_last(made.model)
        if compiles:
            compile_forward(made.model)
        return made

    compiled, plain = job(True), job(False)
    run_job(compiled, SINGLE)
    assert 1 < len(compilations) < 12
    run_job(plain, SINGLE)
    assert equal(compiled.model.state_dict(), plain.model.state_dict())


def test_batches_of_too_many_shapes(
    compilations: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the rest is not compiled, silently, or the reason is not given."""
    monkeypatch.setattr(execution, "MOST_COMPILATIONS", 3)
    model = network()
    compile_forward(model)
    with pytest.raises(TrainingError, match=r"^--compile: .* more than 3 kinds"), torch.no_grad():
        for samples in range(30, 36):
            model(torch.rand(samples, 1, 4, 4))
    assert len(compilations) == 3


def test_synchronised_layers_are_not_compiled() -> None:
    """Fails if --compile meets layers that exchange sums, in place of a reason before the run."""
    with pytest.raises(UsageError, match=r"^--compile and --sync-bn: .*: leave one of them out$"):
        build_config({"compile": True, "sync_bn": True})


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if --compile is accepted on a host that cannot compile, or its reason is not given."""
    require_compiler(CPU)
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", (None, "/no/such/compiler"))
    with pytest.raises(UsageError, match=r"^--compile: .*C\+\+.*/no/such/compiler.*Install g\+\+"):
        require_compiler(CPU)
