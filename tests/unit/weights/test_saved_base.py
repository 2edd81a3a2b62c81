"""Checkpoints of a script's own loop that leave out frozen parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hvdtrain
from hvdtrain import exchange
from hvdtrain.errors import HvdtrainError
from hvdtrain.train.checkpoint import load_checkpoint
from tests.parallel.experiments import summary_and_weights

SAMPLES = [(torch.linspace(-1, 1, 4) * number, torch.tensor([1.0])) for number in range(12)]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that has joined no others."""
    monkeypatch.setattr(exchange, "_joined", None)
    monkeypatch.chdir(tmp_path)


def make_model(seed: int = 0) -> nn.Sequential:
    """Return a model with a frozen first layer, drawn from `seed`, and a last one to train."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    model[0].requires_grad_(False)
    with torch.no_grad():
        model[2].weight.fill_(0.1)
    return model


def train(model: nn.Sequential, change: object = None, **options: object) -> nn.Sequential:
    """Train the model in a loop; `change`: called with the model after each step."""
    trained = [it for it in model.parameters() if it.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.01)
    given = {"output": "runs", "experiment": "x", "save_frozen": False, "epochs": 3} | options
    with hvdtrain.Loop(model, optimizer, SAMPLES, global_batch_size=5, **given) as loop:
        for step in loop:
            for x, y in step.batches():
                step.backward((model(x.double()) - y).square().sum(), len(y))
            step.update()
            if callable(change):
                change(model)
    return model


def test_frozen_parameters_are_left_out_and_made_again() -> None:
    """Fails if a checkpoint holds them, if a resume or a start after the end lacks them, or if the
    moving average does.
    """
    whole = train(make_model(), experiment="whole", model_ema=True)
    train(make_model(), model_ema=True, max_steps=4)
    resumed = train(make_model(), model_ema=True, resume="auto")
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    weights, state = load_checkpoint(Path("runs/x/checkpoints/step-00000009"))
    for held in (weights, state["model"], state["update"]["average"]):
        assert any("2.weight" in name for name in held)
        assert any("1.running_mean" in name for name in held)
        assert not any("0.weight" in name or "0.bias" in name for name in held)
    again = train(make_model(), model_ema=True, resume="auto")  # a finished run: its last weights
    assert torch.equal(again[2].weight, weights["2.weight"])
    hashes = {summary_and_weights(Path("runs") / it)[0]["params_sha256"] for it in ("whole", "x")}
    assert len(hashes) == 1


@pytest.mark.parametrize("steps", [4, 9], ids=["on the way", "at the end"])
def test_a_resume_over_another_base_is_refused(steps: int) -> None:
    """Fails if an adapter is trained on, or used, with frozen parameters that it was not for."""
    train(make_model(), max_steps=steps)
    before = sorted(Path("runs/x").rglob("*"))
    with pytest.raises(HvdtrainError, match=r"frozen parameters.* not those of the run: 2 tensors"):
        train(make_model(seed=1), max_steps=steps, resume="auto")
    assert sorted(Path("runs/x").rglob("*")) == before
    with pytest.raises(HvdtrainError, match="not those of the run"):
        train(make_model(seed=1), resume="auto")


def test_a_base_that_changes_is_not_left_out_silently() -> None:
    """Fails if training changes what no checkpoint holds."""
    with pytest.raises(HvdtrainError, match=r"step 3: parameters that were frozen .* have changed"):
        train(make_model(), lambda model: model[0].bias.data.add_(1))


def test_leaving_out_nothing_is_refused() -> None:
    """Fails if `save_frozen=False` is accepted where no parameter is frozen."""
    with pytest.raises(HvdtrainError, match="no parameter is frozen"):
        train(make_model().requires_grad_(True))
