"""`hvdtrain bench` on real workers: it runs, and measures what its table states."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.fashion import write_fashion_mnist
from tests.parallel.cpu_as_gpu import write_gpus
from tests.parallel.launching import CHECKOUT, CONTROLLERS, horovodrun, hvdtrain, run

PEERS = {"gloo": ["torch.distributed"], "mpi": ["our ring over MPI", "mpi4py Allreduce"]}


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_bench_ring(controller: str, tmp_path: Path) -> None:
    """Fails if the bench breaks off, leaves out a contestant, or writes no JSON."""
    target = tmp_path / "ring.json"
    flags = ["--megabytes", "0.1", "--rounds", "2", "--steps", "2", "--json", str(target)]
    finished = horovodrun(2, controller, hvdtrain("bench", "ring", *flags))
    assert finished.exit_code == 0, finished.output
    result = json.loads(target.read_text())
    others = {*PEERS[controller], "Horovod"}
    assert set(result["seconds_per_step"]) == {"our ring", *others}
    assert all(len(times) == 2 for times in result["seconds_per_step"].values())
    assert set(result["ratios"]) == {f"our speed / {other}" for other in others}
    assert (result["megabytes"], result["device"]) == (0.1, "cpu")
    assert ", on cpu, one thread each; " in finished.output
    assert "MB/s" in finished.output
    assert "middle half" in finished.output


RATIOS = {
    "step": {
        "bare Horovod loop",
        "bare single-device loop",
        "bare single-device loop, in step",
        "hvdtrain.Loop to bare Horovod loop, over a DataLoader",
        "hvdtrain.Loop to bare single-device loop, over a DataLoader",
    },
    "checkpoint": {"in the background", "waited for"}
    | {"in memory at every step", "in memory at every 20th step"},
    "audit": {"1/100 at every step", "all at every step", "all at every 100th step"}
    | {"trace of every step", "trace of every 10th step"}
    | {"computation at every step", "computation at every 100th step"},
}


@pytest.mark.parametrize(
    ("bench", "controller"), list(zip(RATIOS, ("gloo", "mpi", "gloo"), strict=True))
)
def test_bench_of_steps(bench: str, controller: str, tmp_path: Path) -> None:
    """Fails if a bench breaks off, or leaves out what it is to compare."""
    target = tmp_path / "bench.json"
    flags = ["--batch-size=8", "--rounds=2", "--steps=2", f"--json={target}"]
    finished = horovodrun(2, controller, hvdtrain("bench", bench, *flags))
    assert finished.exit_code == 0, finished.output
    result = json.loads(target.read_text())
    assert set(result["ratios"]) == RATIOS[bench]
    assert all(value["median"] > 0 for value in result["ratios"].values())


@pytest.mark.parametrize(
    ("bench", "contestant"), [("ring", "Horovod, on GPUs"), ("step", "bare Horovod loop")]
)
def test_benches_on_gpus(bench: str, contestant: str, tmp_path: Path) -> None:
    """Fails if --device cuda does not reach the contestants, or the table does not say where they
    ran. (The CPU stands for the GPUs.)
    """
    write_gpus(tmp_path)
    variables = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{CHECKOUT}"}
    flags = ["--megabytes=0.1", "--batch-size=8", "--rounds=2", "--steps=2", "--device=cuda"]
    flags += [f"--json={tmp_path / 'bench.json'}"]
    finished = horovodrun(2, "gloo", hvdtrain("bench", bench, *flags), variables=variables)
    assert finished.exit_code == 0, finished.output
    result = json.loads((tmp_path / "bench.json").read_text())
    assert result["device"] == "cpu:0" and contestant in result["seconds_per_step"]
    assert ", on cpu:0, one thread each; " in finished.output


def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    """Fails if a bench that was to use GPUs measures CPUs instead."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    finished = run(hvdtrain("bench", "step", "--device", "cuda"), variables=hidden)
    assert finished.exit_code == 2
    assert "--device=cuda: no GPU is visible; use --device cpu" in finished.output


def test_a_ring_of_one_is_refused() -> None:
    """Fails if one process is measured against itself."""
    finished = run(hvdtrain("bench", "ring"))
    assert finished.exit_code == 2
    assert "2 ranks or more" in finished.output


def test_bench_scaling(tmp_path: Path) -> None:
    """Fails if a contestant does not run on one worker or on two, or plots or JSON are missing."""
    target, plots = tmp_path / "scaling.json", tmp_path / "plots"
    flags = ["--models=lenet", "--batch-size=4", "--workers=1,2", "--rounds=1", "--turn-s=0.1"]
    flags += ["--mode=strong"]
    flags += ["--controller=mpi", f"--json={target}", f"--output={plots}"]
    finished = run(hvdtrain("bench", "scaling", *flags), timeout_s=240)
    assert finished.exit_code == 0, finished.output
    result = json.loads(target.read_text())
    assert {(r["workers"], r["global_batch_size"]) for r in result["runs"]} == {(1, 8), (2, 8)}
    for found in result["runs"]:
        rates = found["samples_per_s"]
        assert set(rates) == {"hvdtrain", "DDP", "limit"}
        assert all(len(values) == 1 and values[0] > 0 for values in rates.values())
    assert all(point["over_ddp"]["median"] > 0 for point in result["points"])
    assert {path.name for path in plots.iterdir()} == {"scaling.png", "ratios.png"}
    assert "strong scaling" in finished.output


def test_a_bench_that_starts_workers_is_refused_under_horovodrun() -> None:
    """Fails if each of several workers would start workers of its own."""
    finished = horovodrun(2, "gloo", hvdtrain("bench", "scaling"))
    assert finished.exit_code == 1  # as horovodrun has it
    assert "starts its workers itself" in finished.output


def test_bench_start(tmp_path: Path) -> None:
    """Fails if a command does not come to its first step, or its parts are not the whole."""
    target, plots = tmp_path / "start.json", tmp_path / "plots"
    flags = ["--rounds=1", "--controller=gloo", f"--json={target}", f"--output={plots}"]
    finished = run(hvdtrain("bench", "start", *flags), timeout_s=240)
    assert finished.exit_code == 0, finished.output
    result = json.loads(target.read_text())
    assert len(result["starts"]) == 5
    for name, (start,) in result["starts"].items():
        assert 0 < start["total_s"] < 240
        assert bool(start["parts_s"]) == (name != "hvdtrain launch")
        if start["parts_s"]:
            assert sum(start["parts_s"].values()) == pytest.approx(start["total_s"])
            assert all(seconds > -0.01 for seconds in start["parts_s"].values())
    assert len(result["ratios"]) == 3
    assert (plots / "start.png").exists()


@pytest.mark.parametrize(
    ("data", "systems"), [("images", ("loop", "horovod")), ("memory", ("train", "ddp"))]
)
def test_bench_peers(data: str, systems: tuple[str, ...], tmp_path: Path) -> None:
    """Fails if a system does not run, or does not learn what one process learns: its weights after
    three steps would differ by more than rounding.
    """
    target, plots = tmp_path / "peers.json", tmp_path / "plots"
    flags = ["--models=lenet", "--batch-size=4", "--steps=6", "--rounds=1", f"--data={data}"]
    flags += [f"--systems={','.join(systems)}", f"--json={target}", f"--output={plots}"]
    finished = run(hvdtrain("bench", "peers", *flags), timeout_s=240)
    assert finished.exit_code == 0, finished.output
    content = json.loads(target.read_text())
    (case,) = content["cases"]
    assert set(case["runs"]) == set(systems) and not content["left_out"]
    for (measured,) in case["runs"].values():
        assert measured["difference"] < 1e-5, finished.output
        assert min(measured["samples_per_s"], measured["first_step_s"]) > 0
        assert measured["peak_bytes"] > 100 << 20
    (ratios,) = case["ratios"].values()
    assert set(ratios) == {*systems} - {"loop", "train"}
    assert (plots / "peers.png").exists()


def test_bench_classic(tmp_path: Path) -> None:
    """Fails if a setting does not run on files as Debian has them, or its figures are lost."""
    target, plots, folder = tmp_path / "classic.json", tmp_path / "plots", tmp_path / "files"
    write_fashion_mnist(folder, 1_024, 100)
    flags = ["--epochs=2", "--model=lenet", f"--data-dir={folder}", "--controller=gloo"]
    finished = run(
        hvdtrain("bench", "classic", *flags, f"--json={target}", f"--output={plots}"), timeout_s=240
    )
    assert finished.exit_code == 0, finished.output
    content = json.loads(target.read_text())
    rows = content["rows"]
    assert content["data"] == "fashion-mnist"
    assert [(row["workers"], row["global_batch_size"], row["lr"]) for row in rows] == [
        *((1, 256, 0.2), (2, 256, 0.2), (2, 512, 0.4)),
    ]
    assert all(len(row["runs"][0]["epoch_s"]) == 2 for row in rows)
    accuracies = [row["runs"][0]["accuracy"] for row in rows]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.02)  # the same global batches
    assert (plots / "classic.png").exists()


def test_a_killed_bench_leaves_nothing_behind(tmp_path: Path) -> None:
    """Fails if processes that are stopped, and cannot notice, outlive the command."""
    flags = ["scaling", "--models=lenet", "--batch-size=4", "--workers=2", "--mode=weak"]
    flags += ["--rounds=1000", "--controller=gloo", f"--output={tmp_path / 'plots'}"]
    # The shell's child is killed once it has processes that are stopped; `run` looks for the rest.
    program = (
        "import os, subprocess, sys, time\n"
        "from hvdtrain.launcher.processes import marked, process_state\n"
        "from tests.parallel.launching import MARK\n"
        "bench = subprocess.Popen(sys.argv[1:])\n"
        "def stopped():\n"
        "    own = marked(MARK, os.environ[MARK])\n"
        "    return sum(process_state(pid) == 'T' for pid in own)\n"
        "until = time.monotonic() + 90\n"
        "while stopped() < 4:\n"
        "    assert bench.poll() is None and time.monotonic() < until\n"
        "    time.sleep(0.05)\n"
        "bench.kill()\n"
        "bench.wait()\n"
    )
    finished = run([sys.executable, "-c", program, *hvdtrain("bench", *flags)], timeout_s=180)
    assert finished.exit_code == 0, finished.output
