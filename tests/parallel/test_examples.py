"""The examples on several workers: what they learn is what one learns."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.parallel.experiments import (
    largest_difference,
    summary_and_weights,
)
from tests.parallel.launching import BIN, CHECKOUT, horovodrun, run

TOLERANCE = 1e-9  # of each tensor's largest weight, in float64: the promise of the README
STEPS_CHECKED = 5  # every tenth of 3 epochs of 18 steps


def test_your_script(tmp_path: Path) -> None:
    """Fails if a rank's parameters are not those of the ordinary script, as they are not where
    shares of 33, 33 and 34 samples weigh the same, or if the audit does not run.
    """
    command = [str(BIN / "python"), "-m", "tests.parallel.scripts.example", str(tmp_path)]
    finished = horovodrun(3, "gloo", command)
    assert finished.exit_code == 0, finished.output
    assert finished.output.count("final loss") == 1, finished.output
    expected = runpy.run_path(str(CHECKOUT / "examples" / "your_script.py"))["model"].state_dict()
    for rank in range(3):
        weights = load_file(tmp_path / f"rank-{rank}.safetensors")
        assert largest_difference(weights, expected) < TOLERANCE
        assert f"rank {rank}: {STEPS_CHECKED} steps checked" in finished.output


IMAGES = ("image_folder_one_device.py", "image_folder.py")
SEVERAL = str(CHECKOUT / "tests" / "parallel" / "scripts" / "several_runs.py")
VIRTUAL: Mapping[str, Any] = {"virtual_workers": 4, "sync_bn": False}
CUT = 6  # a step in the middle of the second epoch, of 4 steps


def make_images(folder: Path) -> None:
    """Noise, on average a bit lighter in the images of the class that is rare."""
    generator = np.random.default_rng(3)
    for part, name, count, light in (
        ("train", "common", 44, 110),
        ("train", "rare", 12, 124),
        ("valid", "common", 15, 110),
        ("valid", "rare", 8, 124),
    ):
        (folder / part / name).mkdir(parents=True)
        for number in range(count):
            pixels = generator.normal(generator.normal(light, 14), 40, (20, 28, 3)).clip(0, 255)
            path = folder / part / name / f"{number:02}.png"
            Image.fromarray(pixels.astype(np.uint8)).save(path)


def printed(output: str) -> list[tuple[float, ...]]:
    """Loss and AUC of each epoch, as the script prints them."""
    lines = re.findall(r"^epoch \d+: loss ([\d.]+), AUC ([\d.]+)", output, re.MULTILINE)
    return [tuple(map(float, line)) for line in lines]


def recorded(folder: Path) -> list[tuple[float, ...]]:
    """Loss and AUC of each epoch of a run."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(it["valid_loss"], it["valid_auc"]) for it in records if it["kind"] == "epoch"]


def test_an_image_folder_with_weighted_sampler_average_and_early_stopping(tmp_path: Path) -> None:
    """Fails if the epochs of N = 1 or 3 differ from those of plain torch in loss, AUC, weights or
    number; or if, with virtual workers, bits depend on N or on a cut in the middle of an epoch.
    """
    make_images(tmp_path / "images")

    def line(name: str, **options: object) -> list[object]:
        script = str(CHECKOUT / "examples" / IMAGES[name != "original"])
        values = {"output": str(tmp_path), "experiment": name} | options
        return [[script, str(tmp_path / "images")], values if name != "original" else {}]

    resumed = line("cut", **VIRTUAL, resume="auto")
    several = [line("three"), line("cut", **VIRTUAL, max_steps=CUT)]
    one = [line("original"), line("one"), line("whole", **VIRTUAL), resumed]
    command = [str(BIN / "python"), SEVERAL]
    shared = horovodrun(3, "gloo", [*command, json.dumps(several)], cwd=tmp_path)
    alone = run([*command, json.dumps(one)], cwd=tmp_path)
    assert (shared.exit_code, alone.exit_code) == (0, 0), shared.output + alone.output
    text, _, others = alone.output.partition("begins one")
    expected = printed(text)
    assert 4 <= len(expected) < 30  # it stopped early
    best = torch.load(tmp_path / "best.pt")
    shown = printed(others)[: len(expected)]
    np.testing.assert_allclose(shown, recorded(tmp_path / "one"), rtol=0, atol=1e-11)
    for name in ("one", "three"):
        evaluations = recorded(tmp_path / name)
        assert np.shape(evaluations) == np.shape(expected)
        np.testing.assert_allclose(evaluations, expected, rtol=TOLERANCE, atol=1e-11)
        summary, _ = summary_and_weights(tmp_path / name)
        assert summary["best"]["valid_auc"] == pytest.approx(max(auc for _, auc in expected))
        assert "did not improve" in summary["end_reason"]
        checkpoints = tmp_path / name / "checkpoints"
        saved = checkpoints / (checkpoints / "best").read_text().strip() / "model.safetensors"
        assert largest_difference(load_file(saved), best) < TOLERANCE
    hashes = {summary_and_weights(tmp_path / it)[0]["params_sha256"] for it in ("whole", "cut")}
    assert len(hashes) == 1
    assert summary_and_weights(tmp_path / "cut")[0]["resumed_from"] == CUT
