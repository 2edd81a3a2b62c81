"""Networks and optimizers by name, and the hash that distinguishes models."""

from __future__ import annotations

import hashlib
import struct
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hvdtrain.errors import UsageError
from hvdtrain.models import build_model
from hvdtrain.tensors import params_sha256
from hvdtrain.train.optimizers import BY_NAME, UNSUITABLE_ALONE, build_optimizer

MODULE = """
import torch
from torch import nn

NUMBER = 3


def build(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))


def no_module(shape, classes):
    return "a string"


def frozen(shape, classes):
    return build(shape, classes).requires_grad_(False)


def empty(shape, classes):
    return nn.Flatten()
"""

FAULTY = """
import torch
import faulty_part


def own(shape, classes):
    raise LookupError("my own fault")


def part(shape, classes):
    return faulty_part.build()


def library(shape, classes):
    return torch.zeros(2, 3) @ torch.zeros(2, 3)


def leaves(shape, classes):
    raise SystemExit(3)


def greedy(shape, classes, more):
    pass


class Greedy(torch.nn.Module):
    def __init__(self):
        super().__init__()
"""
PART = """

def build():
    size = 0
    raise ValueError("too small")
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "shape", "parameters"),
    [
        ("lenet", (1, 28, 28), 200 + 25_050 + 102_528 + 1_290),
        ("lenet", (3, 28, 28), 560 + 25_050 + 102_528 + 1_290),
        ("mlp", (1, 8, 8), 64 * 2048 + 2048 + 2048 * 2048 + 2048 + 2048 * 10 + 10),
        ("resnet18-small", (1, 28, 28), 11_689_512 - 9_408 + 576 - 513_000 + 5_130),
        ("resnet18-small", (3, 32, 32), 11_689_512 - 9_408 + 1_728 - 513_000 + 5_130),
        ("mlp", (3, 2, 5), 30 * 2048 + 2048 + 2048 * 2048 + 2048 + 2048 * 10 + 10),
    ],
)
def test_built_in_networks(name: str, shape, parameters: int, dtype: torch.dtype) -> None:
    """Fails when a layer has another size than documented, or is left in another type."""
    model = build_model(name, shape, 10, dtype)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model(torch.zeros(2, *shape, dtype=dtype)).shape == (2, 10)


def test_initial_parameters_follow_the_seed() -> None:
    """Fails when ranks with one seed start apart, or two seeds start alike."""
    hashes = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        hashes.append(params_sha256(build_model("lenet", (1, 28, 28), 10, torch.float32)))
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with modules that no other test has imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "my_net.py").write_text(MODULE)
    (tmp_path / "old_net.py").write_text("import torch\nbuild = torch.nn.Conv9d\n")
    (tmp_path / "needy_net.py").write_text("import no_such_package_at_all\n")
    (tmp_path / "bad_net.py").write_text("import torch\n\nbuild = (\n")
    (tmp_path / "faulty_net.py").write_text(FAULTY)
    (tmp_path / "faulty_part.py").write_text(PART)
    for name in ("my_net", "old_net", "needy_net", "bad_net", "faulty_net", "faulty_part"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_a_network_of_the_user(folder: Path) -> None:
    """Fails when a module beside the user is not found, or built for other data or another type."""
    model = build_model("my_net:build", (3, 4, 5), 7, torch.float64)
    assert model(torch.zeros(2, 3, 4, 5, dtype=torch.float64)).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "resnet9000",
            "choose from lenet, mlp, resnet18-small, torchvision's networks (resnet50, ",
        ),
        ("unlike", "unknown; choose from lenet"),
        ("my_net", "unknown; choose from"),
        ("resnet-50", "unknown (did you mean resnet50?)"),
        ("lenet5", "unknown (did you mean lenet"),
        ("resnet18_small", "unknown (did you mean resnet18-small?)"),
        ("no_such_net:build", "No module named 'no_such_net'"),
        ("needy_net:build", "No module named 'no_such_package_at_all'"),
        ("my_net:bulid", "my_net has no 'bulid'"),
        ("my_net:", "expected package.module:callable"),
        (":build", "expected package.module:callable"),
        (".my_net:build", "expected package.module:callable"),
        ("my_net:NUMBER", "is of type int, and cannot be called"),
        ("my_net:no_module", "returned str, expected torch.nn.Module"),
        ("my_net:frozen", "has no parameter to train"),
        ("my_net:empty", "has no parameter to train"),
    ],
)
def test_networks_that_are_not_available(folder: Path, name: str, expected: str) -> None:
    """Fails when a wrong --model is no UsageError, or the reason is not given."""
    with pytest.raises(UsageError) as caught:
        build_model(name, (1, 4, 4), 3, torch.float32)
    assert str(caught.value).startswith(f"--model={name}: ") and expected in str(caught.value)


def test_a_fault_in_the_users_module_is_not_blamed_on_the_flag(folder: Path) -> None:
    """Fails when an AttributeError inside the module reads as "old_net has no 'build'"."""
    with pytest.raises(UsageError) as caught:
        build_model("old_net:build", (1, 4, 4), 3, torch.float32)
    assert "Conv9d" in str(caught.value)
    assert f"{folder / 'old_net.py'}:2: AttributeError: " in str(caught.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("needy_net:build", "needy_net.py:1: ModuleNotFoundError: No module named 'no_such_pack"),
        ("bad_net:build", "bad_net.py:3: SyntaxError: '(' was never closed"),
        ("faulty_net:own", "faulty_net.py:7: LookupError: my own fault"),
        ("faulty_net:part", "faulty_part.py:5: ValueError: too small"),
        ("faulty_net:library", "faulty_net.py:15: RuntimeError: "),
        ("faulty_net:leaves", "faulty_net.py:19: SystemExit: 3"),
        ("faulty_net:greedy", "faulty_net.py:22: TypeError: greedy() missing 1 required"),
        ("faulty_net:Greedy", "faulty_net.py:27: TypeError: "),
    ],
)
def test_faults_of_the_users_code_name_its_line(folder: Path, name: str, expected: str) -> None:
    """Fails when a plug-in's exception comes as a traceback, or with a place outside its files."""
    with pytest.raises(UsageError) as caught:
        build_model(name, (1, 4, 4), 3, torch.float32)
    reported = str(caught.value)
    assert reported.startswith(f"--model={name}: ") and f"{folder}/{expected}" in reported
    assert "\n" not in reported
    assert ("called with ((1, 4, 4), 3)" in reported) == name.startswith("faulty_net")


def test_a_missing_module_names_the_folder_that_was_searched(folder: Path) -> None:
    """Fails when the message does not name the folder in which somebody started."""
    for name in ("no_such_net:build", "no_such_net.part:build", "my_net.part:build"):
        with pytest.raises(UsageError, match=f"No module named .*; searched {folder} and"):
            build_model(name, (1, 4, 4), 3, torch.float32)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model[2].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize("name", sorted(BY_NAME.keys() - UNSUITABLE_ALONE.keys()))
def test_every_suitable_optimizer_builds_and_steps(name: str) -> None:
    """Fails when an optimizer refuses its settings, or moves nothing, or what is frozen."""
    model = small_model()
    optimizer = build_optimizer(name.upper(), model, lr=0.25, momentum=0.5, weight_decay=0.125)
    before = [parameter.clone() for parameter in model.parameters()]
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert moved[0] and not moved[-1]
    wanted = {"lr": 0.25, "momentum": 0.5, "weight_decay": 0.125}
    (group,) = optimizer.param_groups
    assert {key: group[key] for key in wanted if key in group}.items() <= wanted.items()
    assert group["lr"] == 0.25


def test_sgd_gets_momentum_and_weight_decay() -> None:
    """Fails when one of them is not handed on."""
    optimizer = build_optimizer("sgd", small_model(), lr=0.1, momentum=0.7, weight_decay=0.01)
    assert (optimizer.defaults["momentum"], optimizer.defaults["weight_decay"]) == (0.7, 0.01)


@pytest.mark.parametrize(("amp", "fused"), [("none", True), ("bf16", True), ("fp16", False)])
def test_the_step_goes_once_over_memory_where_it_can(amp: str, fused: bool) -> None:
    """Fails when the slower step is built, or the fused one where it would have to find infinite
    gradients.
    """
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    optimizer = build_optimizer("sgd", model, lr=0.1, momentum=0.0, weight_decay=0.0, amp=amp)
    before = [parameter.clone() for parameter in model.parameters()]
    model(torch.tensor([1, 4])).square().sum().backward()
    optimizer.step()
    assert [group["fused"] for group in optimizer.param_groups] == [fused]
    for old, new in zip(before, model.parameters(), strict=True):
        assert new.grad is not None
        torch.testing.assert_close(new.detach(), old.detach() - 0.1 * new.grad)


def test_settings_of_recipes() -> None:
    """Fails if a setting is not passed on, or one that the optimizer lacks is dropped silently."""
    build = partial(build_optimizer, lr=0.1, momentum=0.7, weight_decay=0.01)
    adamw = build("adamw", small_model(), betas=(0.8, 0.95), eps=1e-6)
    assert (adamw.defaults["betas"], adamw.defaults["eps"]) == ((0.8, 0.95), 1e-6)
    assert build("sgd", small_model(), nesterov=True).defaults["nesterov"] is True
    for name, flags, more in (
        ("sgd", "--opt-betas and --opt-eps", {"betas": (0.9, 0.9), "eps": 1e-3}),
        ("adamw", "--nesterov", {"nesterov": True}),
        ("rprop", "--no-decay-norm-bias", {"decays_all": False}),
    ):
        with pytest.raises(UsageError, match=f"^{flags}: --opt={name} has no "):
            build(name, small_model(), **more)
    with pytest.raises(UsageError, match=r"^--opt=sgd: Nesterov momentum requires"):
        build_optimizer("sgd", small_model(), 0.1, 0.0, 0.0, nesterov=True)


def test_norms_and_biases_without_weight_decay() -> None:
    """Fails if a bias or a norm decays, a matrix does not, or a parameter is in no group."""
    model = small_model()
    optimizer = build_optimizer("sgd", model, 0.1, 0.0, 0.5, decays_all=False)
    before = {name: it.detach().clone() for name, it in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    after = dict(model.named_parameters())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(after)
    for name, value in before.items():
        factor = 0.95 if name in ("0.weight", "2.weight") else 1
        torch.testing.assert_close(after[name].detach(), value * factor)


@pytest.mark.parametrize("name", [*UNSUITABLE_ALONE, "sdg", "", "Adam W"])
def test_unsuitable_optimizers_are_refused(name: str) -> None:
    """Fails when one that cannot train here is built, or reason and others are not given."""
    with pytest.raises(UsageError) as caught:
        build_optimizer(name, small_model(), 0.1, 0.9, 0.0)
    reason = UNSUITABLE_ALONE.get(name, "unknown")
    assert str(caught.value).startswith(f"--opt={name}: {reason}")
    choices = str(caught.value).partition("; choose from ")[2]
    assert choices.startswith("adadelta, ") and "lbfgs" not in choices


def tensors() -> dict[str, torch.Tensor]:
    """A tensor of each kind of shape, layout and type."""
    return {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.tensor(3),
        "c": torch.ones(4, dtype=torch.bfloat16),
        "d": torch.arange(6.0, dtype=torch.float64).reshape(3, 2).T,
        "e": torch.zeros(0, 5),
        "f": torch.zeros(2, dtype=torch.complex64),
    }


def holding(values: dict[str, torch.Tensor]) -> nn.Module:
    """A module of these: the floating-point ones as parameters, the others as buffers."""
    model = nn.Module()
    for name, tensor in values.items():
        if tensor.dtype.is_floating_point:
            model.register_parameter(name, nn.Parameter(tensor))
        else:
            model.register_buffer(name, tensor)
    return model


@settings(deadline=None)
@given(data=st.data())
def test_the_hash_sees_every_bit(data: st.DataObject) -> None:
    """Fails when a flipped bit of any parameter or buffer leaves the hash as it was."""
    model = holding(tensors())
    before = params_sha256(model)
    name = data.draw(st.sampled_from(["a", "b", "c", "d", "f"]))
    values = model.state_dict()[name]
    raw = values.contiguous().reshape(-1).view(torch.uint8)
    place = data.draw(st.integers(0, raw.numel() - 1))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    values.copy_(raw.view(values.dtype).reshape(values.shape))
    assert params_sha256(model) != before


def test_the_hash_sees_names_types_and_shapes() -> None:
    """Fails when two models with the same bytes but other names, types or shapes hash alike."""
    zeros = torch.zeros(6, dtype=torch.int32)
    made = [
        *({}, {"w": zeros}, {"v": zeros}, {"w": zeros.reshape(2, 3)}, {"w": zeros.float()}),
        *({"w": zeros, "x": torch.zeros(0)}, {"w": zeros[:3], "x": zeros[:3]}),
    ]
    assert len({params_sha256(holding(values)) for values in made}) == len(made)


def test_the_hash_does_not_depend_on_insertion_order_or_layout() -> None:
    """Fails when equal tensors hash apart for the order or strides that they were made with."""
    values = tensors()
    other = dict(reversed(values.items())) | {"d": values["d"].contiguous()}
    assert params_sha256(holding(values)) == params_sha256(holding(other))


def test_the_hash_is_the_documented_one() -> None:
    """Fails when the hashes in older summaries and checkpoints could no longer be compared."""
    model = holding({"w": torch.tensor([[1.0, 2.0], [3.0, -4.0]]).T, "b": torch.tensor([7])})
    text = b"b|torch.int64|(1,)|" + struct.pack("<q", 7)
    text += b"w|torch.float32|(2, 2)|" + struct.pack("<4f", 1, 3, 2, -4)
    assert params_sha256(model) == hashlib.sha256(text).hexdigest()
