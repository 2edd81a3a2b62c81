"""Recipes of training: a task's own optimizer and schedule, and label smoothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from hvdtrain.data import Dataset, TensorSplit
from hvdtrain.tasks import Settings
from hvdtrain.tasks.classification import Classification
from tests.unit import commands

MINE = """
import hvdtrain
import torch

class Line(hvdtrain.Task):
    def build_data(self):
        x = torch.linspace(-1, 1, 12, dtype=self.settings.dtype)[:, None].repeat(1, 3)
        split = hvdtrain.TensorSplit(x, x.sum(1, keepdim=True) ** 2)
        return hvdtrain.Splits("line", train=split, valid=split)

    def build_model(self):
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))

    def loss(self, model, batch):
        x, y = batch
        return hvdtrain.Sums((model(x) - y).square().sum(), len(x))

class Recipe(Line):
    def build_optimizer(self, model):
        groups = [
            {"params": [model[2].weight, model[2].bias], "lr": 0.02},
            {"params": model[0].parameters(), "weight_decay": 0.3},
        ]
        return torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9))

class Scheduled(Recipe):
    def build_schedule(self, total_steps):
        return lambda step: (step + 1) / total_steps

class Foreign(Line):
    def build_optimizer(self, model):
        return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1)

class NoOptimizer(Line):
    def build_optimizer(self, model):
        return 3

class Closure(Line):
    def build_optimizer(self, model):
        return torch.optim.LBFGS(model.parameters())
"""
STEPS = 5


def run(folder: Path, task: str, *flags: str) -> tuple[int, str]:
    (folder / "mine.py").write_text(MINE)
    own = [f"--task=mine:{task}", "--global-batch-size=12", f"--max-steps={STEPS}"]
    done = commands.run_code(
        f"import sys; sys.path.insert(0, {str(folder)!r})\n{commands.CALL}",
        folder,
        "train",
        *own,
        "--dtype=float64",
        "--experiment=run",
        "--log-interval=1",
        *flags,
    )
    return done.returncode, done.stdout + done.stderr


def expected(folder: Path, task: str, factors: list[float]) -> dict[str, torch.Tensor]:
    """What a plain loop with the task's optimizer ends with."""
    names: dict = {}
    exec((folder / "mine.py").read_text(), names)
    made = names[task](Settings("none", "none", Path(), 0, torch.float64))
    model, (x, y) = made.build_model().double(), made.build_data().train.batch(np.arange(12))
    optimizer = made.build_optimizer(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    for factor in factors:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("task", "flags", "factors"),
    [
        ("Recipe", [], [1.0] * STEPS),
        ("Recipe", ["--sched=step"], [1, 1, 0.1, 0.1, 0.01]),
        ("Scheduled", ["--sched=step"], [0.2, 0.4, 0.6, 0.8, 1.0]),
    ],
)
def test_a_task_with_its_own_optimizer(
    task: str, flags: list[str], factors: list[float], tmp_path: Path
) -> None:
    """Fails if a group's learning rate, weight decay or betas are lost, a schedule makes the rates
    of all groups equal, or that of the task is not used.
    """
    code, output = run(tmp_path, task, *flags, "--resume=auto", "--checkpoint-interval=2")
    assert code == 0, output
    assert "update   adamw, learning rate " in output
    last = tmp_path / "runs" / "run" / "checkpoints" / f"step-{STEPS:08}" / "model.safetensors"
    weights = load_file(last)
    for name, value in expected(tmp_path, task, factors).items():
        torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=0)
    lines = (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()
    shown = [json.loads(line) for line in lines]
    assert [it["lr"] for it in shown if it["kind"] == "step"] == pytest.approx(
        [0.02 * factor for factor in factors]
    )


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ("Foreign", "build_optimizer: 2 parameters of it are not the model's"),
        ("NoOptimizer", "build_optimizer returned int, expected a torch optimizer"),
        ("Closure", "build_optimizer returned LBFGS, which needs step(closure)"),
    ],
)
def test_an_optimizer_that_cannot_be_used(task: str, problem: str, tmp_path: Path) -> None:
    """Fails if it is used, or refused with a traceback."""
    code, output = run(tmp_path, task)
    assert (code, f"--task=mine:{task}: {problem}" in output) == (2, True), output


def test_label_smoothing() -> None:
    """Fails if the loss of training is not smoothed, or that of the evaluation is."""
    settings = Settings("plain", "none", Path(), 0, torch.float64)
    inputs, labels = torch.rand(6, 1, 2, 2, dtype=torch.float64), torch.arange(6) % 3
    split = TensorSplit(inputs, labels)
    dataset = Dataset("made up", (1, 2, 2), 3, split, split)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3).double())
    task = Classification(settings, dataset, lambda: model, label_smoothing=0.3)
    logs = model(inputs).log_softmax(1)
    hard, flat = -logs[torch.arange(6), labels].sum(), -logs.mean(1).sum()
    sums = task.loss(model, (inputs, labels))
    torch.testing.assert_close(sums.loss, 0.7 * hard + 0.3 * flat)
    torch.testing.assert_close(task.evaluate(model, (inputs, labels)).loss, hard)
