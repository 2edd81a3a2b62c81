"""Runs of the checks: flags, commands in this process, and what they leave."""

from __future__ import annotations

import io
import json
import runpy
import shutil
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hvdtrain.run import script as script_module

SMALL = ["--model=tests.device.models:small", "--data=digits", "--global-batch-size=48"]
STEPS = ["--max-steps=4", "--checkpoint-interval=2", "--trace-every=1", "--hash-every=2"]
PLAIN = [*SMALL, *STEPS, "--opt=adamw", "--grad-accum-steps=2", "--clip-grad=1", "--model-ema"]
VIRTUAL = [*SMALL, *STEPS, "--virtual-workers=3", "--log-interval=1"]
TASK = "--task=tests.device.models:Lazy"
DEVICES = ("cpu", "cuda")


def hvdtrain(*arguments: object, exit_code: int = 0) -> str:
    """Run a command of hvdtrain in this process; return what it printed."""
    from hvdtrain.cli import main

    return _printed(["hvdtrain", *map(str, arguments)], main, exit_code)


def script(*arguments: object, name: str = "own_loop.py") -> str:
    """Run a script of this folder in this process; return what it printed."""
    path = str(Path(__file__).with_name(name))

    def run() -> int:
        script_module.loops = script_module.Loops()  # as in a process of its own
        runpy.run_path(path, run_name="__main__")
        return 0

    return _printed([path, *map(str, arguments)], run, 0)


def _printed(arguments: list[str], run: Any, expected: int) -> str:
    before, sys.argv[:], printed = [*sys.argv], arguments, io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            exit_code = run()
    finally:
        sys.argv[:] = before
    text = printed.getvalue()
    assert exit_code == expected, f"{arguments}: exit code {exit_code}\n{text}"
    return text


def train(folder: Path, name: str, flags: list[str], device: str, exit_code: int = 0) -> str:
    """Train the experiment `name` in `folder` on a device; return what it printed."""
    place = ["--output", folder, "--experiment", name, "--device", device]
    return hvdtrain("train", *flags, *place, exit_code=exit_code)


def summary(run: Path) -> dict[str, Any]:
    """Return the summary of a run."""
    return json.loads((run / "summary.json").read_text())


def check_saved(run: Path) -> None:
    """Fail if a checkpoint has a tensor that another machine could only read on a GPU, or the
    weights of the last one are not those of the run.
    """
    from hvdtrain.tensors import tensors_sha256

    last = run / "checkpoints" / (run / "checkpoints" / "last").read_text().strip()
    saved = load_file(last / "model.safetensors")
    if not any(name.startswith("scale.") for name in saved):  # others leave out what is frozen
        assert tensors_sha256(saved) == summary(run)["params_sha256"]
    paths = [*run.glob("checkpoints/step-*/training_state.pt")]
    for path in paths:
        state = torch.load(path, weights_only=True)
        elsewhere = [it.shape for it in _tensors_of(state) if it.device.type != "cpu"]
        assert not elsewhere, (path, elsewhere)


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_of(item)


def check_same(one: Path, other: Path) -> None:
    """Fail unless two runs have the same parameters, records and figures."""
    names = ("params_sha256", "train_loss", "valid_loss", "valid_accuracy", "bad_samples")
    found, expected = ([summary(it)[name] for name in names] for it in (one, other))
    assert found == expected, (found, expected)
    traces = [it / "trace.jsonl" for it in (one, other)]
    if traces[0].exists() or traces[1].exists():
        lines = [[json.loads(line) for line in it.read_text().splitlines()] for it in traces]
        for left, right in zip(*lines, strict=True):
            kept = left.keys() - {"setting", "previous"}  # which name the step of a resume
            changed = [key for key in kept if left[key] != right[key]]
            assert not changed, (left["step"], changed)


def remove(path: Path) -> None:
    """Remove a file or a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
