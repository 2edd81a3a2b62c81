"""What verifies and measures on GPUs, on the device for tests: no tensor on the wrong device."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.device.build import library
from tests.parallel.launching import BIN, CHECKOUT, Finished, hvdtrain, run

# Read by Python at its start: the device is there in all processes that use it, and Horovod, which
# takes its tensors in this process, says that it is built with NCCL. What is added or digested is
# noted, with its device.
SITE = """
import os, sys
def note(text):
    with open(f"{os.environ['NOTED']}/noted.{os.getpid()}", "a") as file:
        file.write(f"{text}\\n")
if {"verify", "bench", "hvdtrain.exchange.prove"} & set(sys.orig_argv):
    launcher = any("horovodrun" in it for it in sys.orig_argv)
    if not launcher and "HOROVOD_RANK" in os.environ:
        from tests.device.fake_gpu import let_train
        let_train()
        import horovod.torch as hvd
        hvd.cuda_built = hvd.nccl_built = lambda: True
        honest = hvd.allreduce_async
        def noting(values, *given, **named):
            note(f"{named['name']} {values.device.type}")
            return honest(values, *given, **named)
        hvd.allreduce_async = noting
elif "hvdtrain.evidence.burn_in_device" in sys.orig_argv:
    from tests.device.fake_gpu import register
    register()
    from hvdtrain.evidence import known_answer
    honest = known_answer.digest_of
    def noting(tensor):
        note(f"digest {tensor.device.type}")
        return honest(tensor)
    known_answer.digest_of = noting
"""


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """The environment in which the device is there."""
    library()  # built once, before processes ask for it
    (tmp_path / "sitecustomize.py").write_text(SITE)
    return {"PYTHONPATH": f"{tmp_path}{os.pathsep}{CHECKOUT}", "NOTED": str(tmp_path)}


def noted(folder: Path, name: str) -> set[str]:
    """The devices of what was noted under this name, such as cpu and gpu."""
    lines = [it for path in folder.glob("noted.*") for it in path.read_text().splitlines()]
    return {line.rpartition(" ")[2] for line in lines if line.startswith(name)}


def on_two(command: list[str], variables: dict[str, str]) -> Finished:
    """Run a command on two workers."""
    launcher = [str(BIN / "horovodrun"), "-np", "2", "--gloo"]
    return run([*launcher, *command], timeout_s=200, variables=variables)


def test_verify(tmp_path: Path, variables: dict[str, str]) -> None:
    """Fails if a case is not run on the device, or a tensor is handed to Horovod or to the ring
    from another device than theirs; or if a fault on the device goes unnoticed.
    """
    flags = ["--dtypes", "float32,int64", "--sizes", "4,4100"]
    finished = on_two(hvdtrain("verify", *flags, "--json", f"{tmp_path}/v.json"), variables)
    assert finished.exit_code == 0, finished.output
    content = json.loads((tmp_path / "v.json").read_text())
    on_gpu, on_cpu = (
        [(it["operation"], it["dtype"], it["lengths"]) for it in content["cases"] if test(it)]
        for test in (lambda it: it["device"] == "gpu", lambda it: it["device"] == "cpu")
    )
    assert on_gpu == on_cpu and len(on_gpu) > 50
    flags += ["--ops", "allreduce-sum", "--inject", "bitflip"]
    finished = on_two(hvdtrain("verify", *flags), variables)
    assert "Exit code: 17" in finished.output.replace("Exit code:    ", "Exit code: ")


def test_the_check_of_a_new_horovod(tmp_path: Path, variables: dict[str, str]) -> None:
    """Fails if the all-reduce of the set-up's check is not made of tensors on the device."""
    finished = on_two([sys.executable, "-m", "hvdtrain.exchange.prove"], variables)
    assert finished.exit_code == 0, finished.output
    assert noted(tmp_path, "hvdtrain.prove.cpu") == {"cpu"}
    assert noted(tmp_path, "hvdtrain.prove.gpu") == {"gpu"}


@pytest.mark.parametrize("bench", ["step", "ring", "audit", "checkpoint"])
def test_bench(bench: str, tmp_path: Path, variables: dict[str, str]) -> None:
    """Fails if a contestant has its tensors elsewhere than the device, or the table does not
    say where it ran.
    """
    flags = ["--device=cuda", "--rounds=1", "--steps=2", "--batch-size=4", "--megabytes=0.1"]
    finished = on_two(hvdtrain("bench", bench, *flags), variables)
    assert finished.exit_code == 0, finished.output
    assert ", on gpu:0, one thread each" in finished.output
    name = {"ring": "hvdtrain.bench.sum_on_gpu", "step": "hvdtrain.bench.step"}.get(bench)
    assert name is None or noted(tmp_path, name) == {"gpu"}


def test_burn_in(tmp_path: Path, variables: dict[str, str]) -> None:
    """Fails if a device is left out of the burn-in, or computes on the CPU's tensors."""
    flags = ["--no-ring", "--burn-in", "0.02", "--output", str(tmp_path)]
    finished = run(hvdtrain("doctor", *flags), timeout_s=280, variables=variables)
    assert finished.exit_code == 0, finished.output
    assert re.search(
        r"^ok    burn-in +localhost: 2 GPUs, \d+ repetitions, 0 wrong",
        *(finished.output, re.MULTILINE),
    ), finished.output
    assert "2 GPUs compared with one another (gpu, " in finished.output
    assert noted(tmp_path, "digest") == {"gpu"}
    assert "torch has no collectives for gpu" in finished.output
