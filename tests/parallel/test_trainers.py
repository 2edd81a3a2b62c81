"""The trainers of other libraries under `hvdtrain launch`, as they are and with AuditCallback."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from tests.parallel.experiments import Weights, largest_difference
from tests.parallel.launching import BIN, CHECKOUT, Finished, hvdtrain, run

PLAIN, WITH_AUDIT = (CHECKOUT / "examples" / f"trainer{end}.py" for end in ("_one_device", ""))
TOLERANCE = 1e-9  # of each tensor's largest weight, in float64
SIZE = 3
SEED_0 = torch.Generator().manual_seed(0)
CHECKED = "audit: {} steps compared with the ring reference, 0 failed; worst error 0."

RUN_PLAIN = f"""
import runpy
from hvdtrain.data.builtin import import_torchvision
import_torchvision()
from safetensors.torch import save_file
weights = runpy.run_path({str(PLAIN)!r}, run_name="__main__")["model"].state_dict()
save_file({{name: weights[name] for name in weights if "lora_" in name}}, "alone.safetensors")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainers")


@pytest.fixture(scope="module")
def job(folder: Path) -> Finished:
    """All trainings of trainers.py, in one start of three workers."""
    script = ("python", "-m", "tests.parallel.scripts.trainers", str(folder))
    options = ("-np", str(SIZE), "--controller=gloo", "--watchdog-timeout-s=12")
    return run(hvdtrain("launch", *options, "--", *script), cwd=folder)


def of_rank(folder: Path, script: str, rank: int) -> Weights:
    return load_file(folder / f"{script}.{rank}.safetensors")


def learned_in_plain_torch(prefixes: list[str], batch_size: int, order: torch.Tensor) -> Weights:
    """What the loops on digits learn, from the same weights, where nothing is distributed."""
    torch.manual_seed(42)
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels[order] / 16), torch.tensor(labels[order])
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.double().parameters(), lr=0.1)
    for inputs, targets in zip(x.split(batch_size), y.split(batch_size), strict=True):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    layers = zip(prefixes, (model[0], model[2]), strict=True)
    return {f"{p}.{n}": value for p, layer in layers for n, value in layer.state_dict().items()}


def test_lora_by_the_trainer(job: Finished, folder: Path) -> None:
    """Fails if three workers with AuditCallback do not learn what the plain script learns on one
    device, print another loss, or do not audit every fifth of the 20 steps.
    """
    alone = run([str(BIN / "python"), "-c", RUN_PLAIN], cwd=folder)
    assert alone.exit_code == 0, alone.output
    losses = [re.findall(r"final loss ([\d.]+)", text) for text in (alone.output, job.output)]
    assert [len(numbers) for numbers in losses] == [1, 1], alone.output + job.output
    assert float(losses[1][0]) == pytest.approx(float(losses[0][0]), rel=TOLERANCE)
    expected = load_file(folder / "alone.safetensors")
    assert len(expected) == 2 * 2 * 3  # of three layers in each of two blocks
    for rank in range(SIZE):
        weights = of_rank(folder, "trainer", rank)
        trained = {name: value for name, value in weights.items() if "lora_" in name}
        assert largest_difference(trained, expected) < TOLERANCE
    assert CHECKED.format(4) in job.output, job.output


@pytest.mark.parametrize(
    ("script", "prefixes", "batch_size", "order", "checked"),
    [
        ("accelerate_loop", ["0", "2"], 60, torch.arange(1200), 10),
        # Two backward passes a step. On several workers Lightning always shuffles, by this seed.
        ("lightning_loop", ["first", "last"], 120, torch.randperm(1200, generator=SEED_0), 5),
    ],
    ids=["accelerate", "lightning"],
)
def test_loops_on_digits(
    job: Finished,
    folder: Path,
    script: str,
    prefixes: list[str],
    batch_size: int,
    order: torch.Tensor,
    checked: int,
) -> None:
    """Fails if Accelerate or Lightning, each with clipping, do not run on the workers of a launch
    together, or if the audit takes a gradient that was clipped, or is still accumulated, for wrong.
    """
    expected = learned_in_plain_torch(prefixes, batch_size, order)
    for rank in range(SIZE):
        weights = of_rank(folder, script, rank)
        assert largest_difference(weights, expected) < TOLERANCE, job.output
    assert CHECKED.format(checked) in job.output, job.output


@pytest.mark.parametrize(("trainer", "step"), [("trainer", 4), ("lightning", 3)])
def test_a_fault_is_named(job: Finished, folder: Path, trainer: str, step: int) -> None:
    """Fails if a wrong element that DDP delivers to one rank, here after a resume, with
    accumulation and reentrant checkpointing, is not found at its step on all ranks, and named.
    """
    for rank in range(SIZE):
        path = folder / f"{trainer}.{rank}.txt"
        assert path.exists(), job.output
        message = path.read_text()
        assert f"audit: reduced gradients are wrong at step {step}\n" in message
        pattern = r"  rank 1: parameter \S+, index \[.*\]: reduced \S+, reference \S+, error 0.001,"
        assert re.search(pattern, message), message
        assert "rank 0: " not in message
        assert "Rank 1: the copy there differs from that of ranks 0, 2, which is right" in message
    assert len([*(folder / "evidence" / "step-00000004").iterdir()]) == SIZE


def test_what_is_refused(job: Finished) -> None:
    """Fails if the loops of Lightning with several exchanges a step are audited wrongly."""
    assert "AuditCallback: automatic_optimization=False: which exchange" in job.output


def test_a_stuck_trainer_is_noticed(job: Finished) -> None:
    """Fails if a rank that stops in its forward pass is not found by the launcher, or those that
    wait for it are blamed.
    """
    assert job.exit_code != 0
    assert "no progress for 12 s (--watchdog-timeout-s)" in job.output, job.output
    assert re.search(r"rank 1 on localhost.*compute", job.output), job.output
    assert "in forward" in job.output


def test_the_example_has_three_more_lines() -> None:
    """Fails if more than the lines that docs/migrating.md names are added, or one is changed."""
    plain, audited = (path.read_text().splitlines() for path in (PLAIN, WITH_AUDIT))
    lines = list(difflib.unified_diff(plain, audited, n=0, lineterm=""))[2:]
    changes = [line for line in lines if line[0] in "+-" and line[1:].strip()]
    page = (CHECKOUT / "docs" / "migrating.md").read_text()
    assert len(changes) == 3
    assert all(line[0] == "+" and f"\n{line}\n" in page for line in changes), changes
