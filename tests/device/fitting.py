"""Checks of `--micro-batch auto`, on a device whose memory has a limit."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from tests.device.fake_gpu import let_train
from tests.device.running import VIRTUAL, check_same, hvdtrain, remove, script, train

# Passes over 960 and 480 samples need more memory than FITTING_BYTES, those over 240 less.
FITTED = ["--model=tests.device.models:small", "--data=digits", "--global-batch-size=960"]
FITTED += ["--opt=adamw", "--max-steps=3", "--checkpoint-interval=1", "--trace-every=1"]
FITTING_BYTES = 1_200_000
FITTING_PASSES = 4


@contextmanager
def limited(more: int) -> Iterator[None]:
    """Let the device have so many bytes more than it has in use."""
    compiled = let_train()
    gc.collect()
    compiled.limit_memory(compiled.memory_used() + more)
    try:
        yield
    finally:
        compiled.limit_memory(-1)


def check_micro_batch(folder: Path) -> None:
    """The passes that fit are chosen, recorded and kept on resume; trying them changes no bit."""
    fitted = f"--grad-accum-steps={FITTING_PASSES}"
    with limited(FITTING_BYTES):
        printed = train(folder, "auto", [*FITTED, "--micro-batch=auto"], "cuda")
    assert f"micro-batch: {fitted}, with 240 samples at most in a pass" in printed, printed
    config = yaml.safe_load((folder / "auto" / "config.yaml").read_text())
    assert (config["grad_accum_steps"], config["micro_batch"]) == (FITTING_PASSES, None)
    train(folder, "fixed", [*FITTED, fitted], "cuda")
    check_same(folder / "auto", folder / "fixed")
    for path in ("checkpoints/step-00000003", "checkpoints/step-00000002", "summary.json"):
        remove(folder / "auto" / path)
    flags = [*FITTED, "--micro-batch=auto", "--resume=auto"]
    printed = train(folder, "auto", flags, "cuda")  # all would fit
    assert f"micro-batch: {fitted}, as before" in printed and "step-00000001" in printed, printed
    check_same(folder / "auto", folder / "fixed")
    assert "3 steps agreed" in hvdtrain("replay", folder / "auto", "--trust-code")
    printed = train(folder, "whole", [*FITTED, "--micro-batch=auto"], "cuda")
    assert "micro-batch: --grad-accum-steps=1, with 960 samples" in printed, printed
    with limited(20_000):
        printed = train(folder, "none", [*FITTED, "--micro-batch=auto"], "cuda", exit_code=2)
    assert "no memory for a forward and backward pass over a single sample" in printed, printed


def check_micro_batch_of_virtual_workers(folder: Path) -> None:
    """The passes of virtual workers stay as they are: no bit is another, or the run is refused."""
    train(folder, "plain", VIRTUAL, "cuda")
    printed = train(folder, "auto", [*VIRTUAL, "--micro-batch=auto"], "cuda")
    assert "micro-batch: --grad-accum-steps=1, with 16 samples" in printed, printed
    check_same(folder / "auto", folder / "plain")
    flags = [*FITTED, "--virtual-workers=2", "--micro-batch=auto"]
    with limited(FITTING_BYTES):
        printed = train(folder, "refused", flags, "cuda", exit_code=2)
    assert "pass over the samples of a virtual worker" in printed, printed
    assert "give --grad-accum-steps=2, with 240 samples" in printed, printed
    assert not (folder / "refused").exists()


def check_micro_batch_of_a_script(folder: Path) -> None:
    """The trial of a script's loss leaves its model, gradients and random numbers alone."""
    with limited(FITTING_BYTES):
        printed = script(folder, "auto", name="trial_loop.py")
    assert f"micro-batch: grad_accum_steps={FITTING_PASSES}, with 240 samples" in printed, printed
    script(folder, "fixed", FITTING_PASSES, name="trial_loop.py")
    check_same(folder / "auto", folder / "fixed")
