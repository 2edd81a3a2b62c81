"""`hvdtrain bench` on real workers: it runs, and measures what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.parallel.launching import CONTROLLERS, horovodrun, hvdtrain, run

PEERS = {"gloo": "torch.distributed", "mpi": "mpi4py Allreduce"}


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_bench_ring(controller: str, tmp_path: Path) -> None:
    """Fails if the bench breaks off, leaves out a contestant, or writes no JSON."""
    target = tmp_path / "ring.json"
    flags = ["--megabytes", "0.1", "--rounds", "2", "--steps", "2", "--json", str(target)]
    finished = horovodrun(2, controller, hvdtrain("bench", "ring", *flags))
    assert finished.exit_code == 0, finished.output
    result = json.loads(target.read_text())
    assert set(result["seconds_per_step"]) == {"our ring", PEERS[controller], "Horovod"}
    assert all(len(times) == 2 for times in result["seconds_per_step"].values())
    assert set(result["ratios"]) == {f"our speed / {PEERS[controller]}", "our speed / Horovod"}
    assert result["megabytes"] == 0.1
    assert "MB/s" in finished.output
    assert "middle half" in finished.output


RATIOS = {
    "step": {"bare Horovod loop", "bare single-device loop"},
    "checkpoint": {"in the background", "waited for"},
    "audit": {"1/100 at every step", "all at every step", "all at every 100th step"},
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


def test_a_ring_of_one_is_refused() -> None:
    """Fails if one process is measured against itself."""
    finished = run(hvdtrain("bench", "ring"))
    assert finished.exit_code == 2
    assert "2 ranks or more" in finished.output


def test_bench_scaling(tmp_path: Path) -> None:
    """Fails if a contestant does not run on one worker or on two, or plots or JSON are missing."""
    target, plots = tmp_path / "scaling.json", tmp_path / "plots"
    flags = ["--models=lenet", "--batch-size=4", "--workers=1,2", "--rounds=1", "--steps=10"]
    flags += ["--controller=gloo", f"--json={target}", f"--output={plots}"]
    finished = run(hvdtrain("bench", "scaling", *flags), timeout_s=240)
    assert finished.exit_code == 0, finished.output
    result = json.loads(target.read_text())
    assert {(r["workers"], r["global_batch_size"]) for r in result["runs"]} == {
        *((1, 4), (2, 8)),  # weak
        *((1, 8), (2, 8)),  # strong
    }
    for found in result["runs"]:
        rates = found["samples_per_s"]
        assert set(rates) == {"hvdtrain", "DDP", "limit"}
        assert all(len(values) == 1 and values[0] > 0 for values in rates.values())
    assert all(point["over_ddp"]["median"] > 0 for point in result["points"])
    assert {path.name for path in plots.iterdir()} == {"scaling.png", "ratios.png"}
    assert "weak scaling" in finished.output


def test_a_bench_that_starts_workers_is_refused_under_horovodrun() -> None:
    """Fails if each of several workers would start workers of its own."""
    finished = horovodrun(2, "gloo", hvdtrain("bench", "scaling"))
    assert finished.exit_code == 1  # as horovodrun has it
    assert "starts its workers itself" in finished.output
