"""torchvision's networks by name: for any channels, classes and image size, or refused."""

from __future__ import annotations

import pytest
import torch

from hvdtrain.data.builtin import import_torchvision
from hvdtrain.errors import UsageError
from hvdtrain.models import build_model


def test_torchvision_runs() -> None:
    """Fails when torchvision cannot be imported beside this torch, or its networks do not run."""
    torchvision = import_torchvision()
    assert import_torchvision() is torchvision
    network = torchvision.models.resnet18(num_classes=3).eval()
    with torch.no_grad():
        assert network(torch.zeros(1, 3, 64, 64)).shape == (1, 3)


def test_resnet18_small_keeps_small_images() -> None:
    """Fails when the first layers shrink the image, as those of ResNet-18 for ImageNet do."""
    model = build_model("resnet18-small", (3, 32, 32), 10, torch.float32)
    assert isinstance(model, import_torchvision().models.ResNet)
    images = torch.zeros(1, 3, 32, 32)
    stem = model.maxpool(model.relu(model.bn1(model.conv1(images))))
    assert stem.shape == (1, 64, 32, 32)
    assert 0.055 < model.conv1.weight.std() < 0.063  # sqrt(2 / (64 * 9)): He, by outputs


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("resnet18", 32),
        ("mobilenet_v3_small", 32),
        ("densenet121", 32),
        ("squeezenet1_1", 32),
        ("googlenet", 32),
        ("swin_t", 32),
        ("vit_b_32", 32),
    ],
)
def test_networks_of_torchvision(name: str, side: int, channels: int) -> None:
    """Fails when one does not take the data's channels, or gives other than its classes.

    Without values: only shapes are computed.
    """
    with torch.device("meta"):
        model = build_model(name, (channels, side, side), 7, torch.float32)
        assert model(torch.zeros(2, channels, side, side)).shape == (2, 7)


@pytest.mark.parametrize("name", ["mnasnet1_0", "regnet_y_400mf"])
def test_more_networks_of_torchvision(name: str) -> None:
    """Fails when one that cannot be built without values cannot be built with them."""
    model = build_model(name, (1, 32, 32), 7, torch.float32)
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 7)


def test_the_first_convolution_keeps_its_settings() -> None:
    """Fails when a stem for other channels differs in anything but these."""
    for name in ("resnet18", "densenet121", "vit_b_32", "squeezenet1_1"):
        with torch.device("meta"):
            ours, theirs = (build_model(name, (c, 32, 32), 7, torch.float32) for c in (1, 3))
        text = str(ours)
        assert text != str(theirs)
        assert text.replace("Conv2d(1, ", "Conv2d(3, ") == str(theirs)
        same = {key: value.shape for key, value in theirs.state_dict().items()}
        shapes = {key: value.shape for key, value in ours.state_dict().items()}
        differing = [key for key in same if shapes[key] != same[key]]
        assert shapes.keys() == same.keys() and len(differing) == 1


def test_no_weights_are_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when building a network asks for a file of weights."""
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda *_, **__: 1 / 0)
    with torch.device("meta"):
        build_model("resnet18", (3, 32, 32), 1000, torch.float32)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("vit_b_16", (1, 28, 28), "multiples of 16, the data has 28x28"),
        ("vit_h_14", (3, 32, 32), "multiples of 14, the data has 32x32"),
        ("vit_b_16", (3, 32, 64), "needs square images, the data has 32x64"),
        ("maxvit_t", (3, 256, 256), "multiples of 224, the data has 256x256"),
    ],
)
def test_images_of_a_size_that_a_network_cannot_take(name: str, shape, expected: str) -> None:
    """Fails when such a network is built, or refused with anything but one clear line."""
    with pytest.raises(UsageError, match=expected) as caught:
        build_model(name, shape, 10, torch.float32)
    assert str(caught.value).startswith(f"--model={name}: ") and "\n" not in str(caught.value)


def test_inception_has_one_output_in_training() -> None:
    """Fails when it gives a tuple with an auxiliary output, or its building warns."""
    with torch.device("meta"):
        model = build_model("inception_v3", (1, 75, 75), 10, torch.float32).train()
        assert model(torch.zeros(2, 1, 75, 75)).shape == (2, 10)
