"""`--pretrained`: what of a file goes into a model, what is left out, and what is refused."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from hvdtrain.data.builtin import import_torchvision
from hvdtrain.errors import UsageError
from hvdtrain.weights import load_pretrained
from tests.unit.nets import net, same


def save(weights: dict[str, torch.Tensor], folder: Path) -> Path:
    torch.save(weights, folder / "saved.pth")
    return folder / "saved.pth"


def test_a_head_of_other_classes_is_reinitialised(tmp_path: Path) -> None:
    """Fails when the rest is not loaded, the new head is touched, or this is not said."""
    source, model = net(classes=10), net(classes=3, seed=1)
    head = copy.deepcopy(model.fc.state_dict())
    notes = load_pretrained(model, save(source.state_dict(), tmp_path))
    assert "head fc: 10 classes in the file, 3 here: reinitialised" in notes
    assert same(model.fc.state_dict(), head)
    rest = [name for name in source.state_dict() if not name.startswith("fc.")]
    assert all(torch.equal(model.state_dict()[n], source.state_dict()[n]) for n in rest)


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1"])
def test_a_network_of_torchvision_starts_from_its_weights(name: str, tmp_path: Path) -> None:
    """Fails when a head (a convolution in SqueezeNet) of 1000 classes cannot become one of 7."""
    build = getattr(import_torchvision().models, name)
    source, model = build(num_classes=1000), build(num_classes=7)
    notes = load_pretrained(model, save(source.state_dict(), tmp_path))
    assert sum("1000 classes in the file, 7 here" in note for note in notes) == 1
    own, theirs = model.state_dict(), source.state_dict()
    differing = [n for n in own if own[n].shape != theirs[n].shape or not own[n].equal(theirs[n])]
    assert {n.rpartition(".")[0] for n in differing} in ({"fc"}, {"classifier.1"})


def test_auxiliary_heads_are_left_out(tmp_path: Path) -> None:
    """Fails when googlenet's own file is taken for another architecture for its training heads."""
    model = nn.Sequential(OrderedDict(fc=nn.Linear(3, 2)))
    extra = {f"aux1.{part}": torch.zeros(2) for part in "ab"}
    notes = load_pretrained(model, save({**model.state_dict(), **extra}, tmp_path))
    assert "auxiliary heads: 2 tensors are ignored" in notes


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: s.pop("submodule.weight"), "1 missing in the file (submodule.weight)"),
        (lambda s: s.pop("fc.bias"), "1 missing in the file (fc.bias)"),
        (lambda s: s.update(more=torch.zeros(1)), "1 not in the model (more)"),
        (
            lambda s: s.update({"submodule.weight": torch.zeros(6, 5)}),
            "1 of other shapes (submodule.weight 6x5 and 5x5 here)",
        ),
        (
            lambda s: s.update({"fc.weight": torch.zeros(3, 6)}),
            "1 of other shapes (fc.weight 3x6 and 3x5 here)",
        ),
        (
            lambda s: s.update({"fc.weight": torch.zeros(9, 5)}),
            "1 of other shapes (fc.weight 9x5 and 3x5 here)",
        ),
        (
            lambda s: s.update({"fc.bias": torch.zeros(3, dtype=torch.int8)}),
            "1 of other shapes (fc.bias 3 int8 and 3 here)",
        ),
        (
            lambda s: [s.pop(name) for name in list(s) if name.startswith("features.1")],
            "missing in the file (features.1.weight, features.1.bias, features.1.running_mean",
        ),
        (
            lambda s: s.update({"fc.bias": torch.tensor([1, torch.nan, 0])}),
            "1 not finite (fc.bias)",
        ),
    ],
)
def test_other_weights_are_refused(change, expected: str, tmp_path: Path) -> None:
    """Fails when a model is half loaded without a word, or what does not fit is not named."""
    state = dict(net().state_dict())
    change(state)
    path = save(state, tmp_path)
    with pytest.raises(UsageError) as caught:
        load_pretrained(net(), path)
    assert str(caught.value).startswith(f"--pretrained={path}: ") and expected in str(caught.value)


def test_another_architecture_is_reported_in_one_message(tmp_path: Path) -> None:
    """Fails when only the first kind of difference is reported, or all the hundreds of names."""
    models = import_torchvision().models
    with pytest.raises(UsageError) as caught:
        load_pretrained(models.resnet18(), save(models.resnet34().state_dict(), tmp_path))
    assert "weights of another architecture: " in str(caught.value)
    assert "not in the model (layer1.2.conv1.weight, " in str(caught.value)
    assert len(str(caught.value)) < 600 and len(caught.value.problems) == 1


def test_types_are_converted(tmp_path: Path) -> None:
    """Fails when half-precision weights make a model of half precision, or this is not said."""
    source, model = net().half(), net(seed=1)
    notes = load_pretrained(model, save(source.state_dict(), tmp_path))
    assert "converted from float16 to float32" in notes
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert same(model.state_dict(), source.float().state_dict())


def test_overflow_in_conversion_is_refused(tmp_path: Path) -> None:
    """Fails when a float64 beyond float32 becomes an infinite weight."""
    state = net().double().state_dict()
    state["fc.bias"][0] = 1e300
    with pytest.raises(UsageError, match=r"1 not finite \(fc.bias\)"):
        load_pretrained(net(), save(state, tmp_path))


def test_tied_weights_may_be_there_once(tmp_path: Path) -> None:
    """Fails when a file that holds shared values under one name is reported to lack the other."""
    model = nn.Sequential(OrderedDict(one=nn.Linear(3, 3), two=nn.Linear(3, 3), fc=nn.Linear(3, 2)))
    model.two.weight = model.one.weight
    state = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    del state["two.weight"]
    load_pretrained(model, save(state, tmp_path))
    assert model.two.weight.eq(1).all()


def test_weights_of_older_releases(tmp_path: Path) -> None:
    """Fails when weights from before batch norm counted, of MNASNet or DenseNet, are refused."""
    state = net().state_dict()
    older = {name: t for name, t in state.items() if not name.endswith("num_batches_tracked")}
    model = net(seed=1)
    load_pretrained(model, save(older, tmp_path))
    assert same(model.state_dict(), state)
    models = import_torchvision().models
    model = models.mnasnet0_5(num_classes=2)
    load_pretrained(model, save(dict(model.state_dict()), tmp_path))
    model = models.DenseNet(4, (1, 1), 8, num_classes=2)
    state = {re.sub(r"(norm|conv)([12])\.", r"\1.\2.", n): t for n, t in model.state_dict().items()}
    assert "features.denseblock1.denselayer1.norm.1.weight" in state
    load_pretrained(model, save(state, tmp_path))
