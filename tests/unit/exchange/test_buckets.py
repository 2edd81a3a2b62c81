"""Which gradients travel together, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hvdtrain.errors import AgreedFailure, TrainingError
from hvdtrain.exchange.agreement import adopt_optimizer_state
from hvdtrain.exchange.buckets import Bucket, messages_of
from hvdtrain.exchange.distributed_optimizer import GradientsInFlight, Trainable, is_reduced
from tests.unit.threads import ThreadExchange, connect, run_ranks


class Plain(nn.Module):
    """Parameters of these lengths, in this order."""

    def __init__(self, *lengths: int, dtypes: dict[int, torch.dtype] | None = None) -> None:
        super().__init__()
        for place, length in enumerate(lengths):
            values = torch.arange(1.0, length + 1, dtype=(dtypes or {}).get(place))
            self.register_parameter(f"p{place}", nn.Parameter(values))


def grouped(model: nn.Module, bucket_bytes: int) -> list[list[str]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return [list(message) for message in messages_of(model, optimizer, bucket_bytes)]


@pytest.mark.parametrize(
    ("lengths", "bucket_bytes", "expected"),
    [
        ((1, 1, 1), 0, [["p2"], ["p1"], ["p0"]]),
        ((1, 1, 1), 4, [["p2"], ["p1"], ["p0"]]),  # as large as a bucket: alone
        ((1, 1, 1), 8, [["p1", "p2"], ["p0"]]),
        ((1, 1, 1), 1000, [["p0", "p1", "p2"]]),
        ((1, 9, 1), 12, [["p1"], ["p0", "p2"]]),  # complete only with the first
        ((9, 1, 1), 12, [["p1", "p2"], ["p0"]]),
        ((2, 2, 1), 12, [["p1", "p2"], ["p0"]]),
        ((0, 1), 8, [["p0", "p1"]]),
    ],
)
def test_small_gradients_share_a_message(
    lengths: tuple[int, ...], bucket_bytes: int, expected: list[list[str]]
) -> None:
    """Fails if a message is larger than asked for, or waits for a gradient that is not its own."""
    assert grouped(Plain(*lengths), bucket_bytes) == expected


def test_a_message_has_one_type_and_one_optimizer() -> None:
    """Fails if types are mixed, or a parameter that is frozen or of another optimizer is taken."""
    model = Plain(1, 1, 1, 1, dtypes={1: torch.float64})
    assert grouped(model, 1000) == [["p2", "p3"], ["p1"], ["p0"]]
    model.p2.requires_grad_(False)
    optimizer = torch.optim.SGD([model.p0, model.p2], lr=1.0)
    assert [list(it) for it in messages_of(model, optimizer, 1000)] == [["p0"]]


class Doubled:
    """A reducer whose reduction doubles each message, into other memory as with fp16."""

    def __init__(self, model: nn.Module, passes: int, bucket_bytes: int = 1000) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        messages = messages_of(model, optimizer, bucket_bytes)
        self.sent: list[list[float]] = []
        self.buckets = [Bucket(message, passes) for message in messages]
        flats = [it.flat for it in self.buckets]
        self.reducer = SimpleNamespace(
            _allreduce_grad_async=self.submit,
            synchronize=self.synchronize,
            _requires_update=set(flats),
            _parameter_names={it: f"bucket.{n}" for n, it in enumerate(flats)},
            _handles={},
            _synchronized=False,
        )
        self.flight = self.reducer.flight = GradientsInFlight(self.reducer, self.buckets)

    def submit(self, flat: nn.Parameter) -> tuple[int, None]:
        self.sent.append(flat.grad.tolist())
        return 1, None

    def synchronize(self) -> None:
        for bucket in self.buckets:
            if self.reducer._handles.get(bucket.flat, (None,))[0] is None:
                self.reducer._allreduce_grad_async(bucket.flat)
            bucket.flat.grad.set_(bucket.flat.grad.detach() * 2)
        self.reducer._handles.clear()
        self.reducer._synchronized = True

    def reduce(self) -> None:
        """Begin what has not begun, then wait, as `reduce_gradients` does."""
        for bucket in self.buckets:
            if self.reducer._handles.get(bucket.flat, (None,))[0] is None:
                self.reducer._handles[bucket.flat] = self.reducer._allreduce_grad_async(bucket.flat)
        self.flight.synchronize()


def test_a_message_begins_with_its_last_gradient_and_is_put_back() -> None:
    """Fails if it begins earlier, in a wrong order, with an earlier pass, or sums get lost."""
    model = Plain(2, 1)
    made = Doubled(model, passes=2)
    for step in (1, 2):
        model.zero_grad()
        made.sent.clear()
        ((model.p0 * step).sum() + model.p1.sum()).backward()
        assert made.sent == [] and list(made.reducer._handles.values()) == [(None, None)]
        ((model.p0 * step).sum() + 4 * model.p1.sum()).backward()
        assert made.sent == [[2 * step, 2 * step, 5]]
        made.flight.synchronize()
        assert model.p0.grad.tolist() == [4 * step, 4 * step] and model.p1.grad.item() == 10
        assert is_reduced(made.reducer)


def test_a_missing_gradient_is_zero() -> None:
    """Fails if a rank that does not use a layer sends an old gradient of it, or ends without."""
    model = Plain(2, 1)
    made = Doubled(model, passes=1)
    for used in (model.p0, model.p1):
        model.zero_grad()
        made.sent.clear()
        used.sum().backward()
        assert made.sent == []
        made.flight.synchronize()
        expected = [[1, 1, 0]] if used is model.p0 else [[0, 0, 1]]
        assert made.sent == expected
        assert [*model.p0.grad.tolist(), *model.p1.grad.tolist()] == [2 * x for x in expected[0]]
    model.zero_grad()
    assert not is_reduced(made.reducer)


def test_a_change_of_a_gradient_on_its_way_is_named() -> None:
    """Fails if a gradient that is changed after its bucket has left is lost in silence."""
    model = Plain(2, 1)
    made = Doubled(model, passes=1)
    (model.p0.sum() + model.p1.sum()).backward()
    model.p1.grad.mul_(3)
    with pytest.raises(TrainingError, match=r"code changed parameter p1's \.grad"):
        made.flight.synchronize()


def scale(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(3)


def replace(parameter: nn.Parameter) -> None:
    parameter.grad = parameter.grad * 3


def drop(parameter: nn.Parameter) -> None:
    parameter.grad = None  # as model.zero_grad() does


@pytest.mark.parametrize("change", [scale, replace, drop])
def test_a_change_of_a_gradient_that_waits_is_named(change: Callable[..., None]) -> None:
    """Fails if a gradient that is changed while its bucket waits for an unused layer is reduced as
    changed, in silence; or if the reduction cannot be ended then.
    """
    model = Plain(2, 1)
    made = Doubled(model, passes=1)
    model.p0.sum().backward()
    change(model.p0)
    with pytest.raises(TrainingError, match=r"code changed parameter p0's .*in all: 1\)"):
        made.reduce()
    made.reduce()
    assert is_reduced(made.reducer) and len(made.sent) == 1


def test_gradients_may_change_before_the_last_pass_and_once_reduced() -> None:
    """Fails if accumulated gradients cannot be changed between passes, or reduced ones before the
    step, where a layer is unused; or if a change after the last pass goes unnoticed there.
    """
    model = Plain(2, 1)
    made = Doubled(model, passes=2)
    for _ in range(2):
        model.zero_grad()
        made.sent.clear()
        model.p0.sum().backward()
        scale(model.p0)
        model.p0.sum().backward()
        made.reduce()
        assert made.sent == [[4, 4, 0]]
        scale(model.p0)
        replace(model.p1)
    model.zero_grad()
    for _ in range(2):
        model.p0.sum().backward()
    scale(model.p0)
    with pytest.raises(TrainingError, match="code changed parameter p0's"):
        made.reduce()


def test_a_reentrant_checkpoint_is_no_change() -> None:
    """Fails if gradients made by a backward pass within another count as changed, or a change of
    one does not.
    """
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("first", "last", "unused")})
    made = Doubled(model, passes=1)
    for is_changed in (False, True):
        model.zero_grad()
        inside = checkpoint(model["first"], torch.ones(1, 2).requires_grad_(), use_reentrant=True)
        model["last"](inside).sum().backward()
        if is_changed:
            scale(model["first"].bias)
            with pytest.raises(TrainingError, match=r"first\.bias's .*in all: 1\)"):
                made.reduce()
        else:
            made.reduce()


def test_each_optimizer_watches_its_own_gradients() -> None:
    """Fails if a change of gradients that wait is put down to another optimizer of the job."""
    models = Plain(2, 1), Plain(3, 1)
    one, other = (Doubled(it, passes=1) for it in models)
    sum(it.p0.sum() for it in models).backward()
    scale(models[1].p0)
    one.reduce()
    with pytest.raises(TrainingError, match="code changed parameter p0's"):
        other.reduce()


@pytest.mark.parametrize(
    ("convert", "expected"),
    [
        (lambda it: it.double(), "p0 from torch.float32 on cpu to torch.float64 on cpu"),
        (lambda it: it.to(torch.bfloat16), "p0 from torch.float32 on cpu to torch.bfloat16 on cpu"),
        (lambda it: it.to("meta"), "p0 from torch.float32 on cpu to torch.float32 on meta"),
    ],
)
def test_a_converted_model_is_refused(
    convert: Callable[[nn.Module], nn.Module], expected: str
) -> None:
    """Fails if gradients of a model that is converted too late would be rounded, in silence; or if
    frozen and tied parameters are counted.
    """
    model = Plain(2, 1, 1)
    model.p2.requires_grad_(False)
    model.add_module("tied", nn.Module())
    model.tied.register_parameter("p1", model.p1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    watched = Trainable(model, optimizer)
    watched.check(optimizer)
    convert(model)
    with pytest.raises(TrainingError, match=rf"{expected} \(converted in all: 2\)"):
        watched.check(optimizer)


def test_a_frozen_base_may_be_converted() -> None:
    """Fails if parameters whose gradients are not reduced must keep their type."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    watched = Trainable(model, optimizer)
    model[0].to(torch.bfloat16)
    watched.check(optimizer)


def test_more_passes_than_announced_are_refused() -> None:
    """Fails if a second pass adds to gradients that are on their way."""
    model = Plain(2, 1)
    Doubled(model, passes=1)
    model.p0.sum().backward()
    with pytest.raises(TrainingError, match=r"grad_accum_steps=1: give hvdtrain\.distribute"):
        model.p0.sum().backward()


def test_the_layout_of_a_gradient_is_kept() -> None:
    """Fails if elements change their places in a layer that is laid out by channels last."""
    model = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    made = Doubled(model, passes=1)
    model(torch.rand(1, 2, 4, 4)).square().sum().backward()
    expected = {name: it.grad.clone() * 2 for name, it in model.named_parameters()}
    made.flight.synchronize()
    for name, it in model.named_parameters():
        assert torch.equal(it.grad, expected[name]) and it.grad.stride() == it.stride()


Built = tuple[nn.Module, list[nn.Parameter]]  # a model, and the parameters of its optimizer


def built(names: str = "abc", ordered: str = "", **layers: nn.Module) -> Built:
    """Layers of these names, in this order, and their weights; `ordered`: for the optimizer."""
    model = nn.ModuleDict({name: layers.get(name) or nn.Linear(2, 2, False) for name in names})
    return model, [model[name].weight for name in ordered or names]


def frozen(name: str) -> Built:
    model, parameters = built()
    model[name].requires_grad_(False)
    return model, parameters


def tied() -> Built:
    model, parameters = built()
    model["c"].weight = model["b"].weight
    return model, parameters[:2]


def with_mask() -> Built:
    model, parameters = built()
    model["b"].register_buffer("mask", torch.ones(2, dtype=torch.bool))
    return model, parameters


def with_one_more() -> Built:
    model, parameters = built()
    return model, [*parameters, nn.Parameter(torch.ones(5))]


@pytest.mark.parametrize(
    ("build", "found"),
    [
        (built, ""),
        (
            lambda: built("acb"),
            "Trainable parameter 2: c.weight [2, 2] torch.float32 (rank 0: b.weight [2, 2] ",
        ),
        (lambda: built("ab"), "Trainable parameter 3: none (rank 0: c.weight [2, 2] "),
        (lambda: built("abcd"), "Trainable parameter 4: d.weight [2, 2] torch.float32 (rank 0: no"),
        (lambda: built(b=nn.Linear(2, 3, False)), "parameter 2: b.weight [3, 2] torch.float32 ("),
        (lambda: built(c=nn.Linear(2, 2, False).double()), "c.weight [2, 2] torch.float64 (rank 0"),
        (lambda: frozen("b"), "Trainable parameter 2: c.weight [2, 2] torch.float32 (rank 0: b."),
        (tied, "Trainable parameter 3: none (rank 0: c.weight"),
        (lambda: built(ordered="bac"), "Optimizer's parameter 1: b.weight [2, 2] torch.float32 (r"),
        (
            with_one_more,
            "Optimizer's parameter 4: one not in the model [5] torch.float32 (rank 0: ",
        ),
        (with_mask, "Tensor of the state, by name, 2: b.mask [2] torch.bool (rank 0: b.weight "),
    ],
)
def test_a_rank_that_builds_another_model_is_named(build: Callable[[], Built], found: str) -> None:
    """Fails if parameters of one rank could meet others of rank 0, or the message does not name
    rank, place and both tensors; or if equal models are refused.
    """

    def adopt(exchange: ThreadExchange) -> str:
        model, parameters = build() if exchange.rank == 2 else built()
        try:
            adopt_optimizer_state(exchange, model, torch.optim.SGD(parameters, lr=0.1))
        except AgreedFailure as error:
            assert error.exit_code == 2
            return str(error)
        return ""

    first, *others = run_ranks(connect(3), adopt)
    assert [first] * 2 == others
    assert first.startswith("rank 2: the model or the optimizer is not" if found else "")
    assert found in first and bool(found) == bool(first)
