"""Image folders: read ahead by other processes, a part on each host, stopped and resumed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.parallel.experiments import largest_difference, summary_and_weights, train
from tests.parallel.launching import BIN, hvdtrain, run
from tests.unit.folders import make_folder

FLAGS = [
    *("--model", "tests.unit.jobs:plain", "--dtype", "float64", "--image-size", "12"),
    *("--epochs", "2", "--audit-every", "1", "--workers", "1", "--lr", "0.01"),
]
VIRTUAL = ["--model=tests.parallel.plugins:lenet_with_dropout", "--dtype=float32"]
VIRTUAL += ["--virtual-workers=5"]
TRAIN, VALID = 2 * 11, 2 * 4


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("pictures"), 11, 4)


@pytest.fixture(scope="module")
def alone(pictures: Path, tmp_path_factory: pytest.TempPathFactory):
    """What one process learns, reading the images itself."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    flags = [*FLAGS, "--data", f"imagefolder:{pictures}", "--global-batch-size", "10"]
    finished = train([*flags, "--workers", "0"], folder, 1, "none")
    assert finished.exit_code == 0, finished.output
    return summary_and_weights(folder)


@pytest.mark.parametrize("more", [[], VIRTUAL], ids=["float64", "virtual workers"])
def test_parts_on_two_hosts_are_one_data_set(more: list[str], tmp_path: Path) -> None:
    """Fails when a sample of a part is lost or counted twice, a gradient depends on how many
    workers a host has, with virtual workers in any bit, or hosts read the same folder. Two names of
    this machine are two hosts.
    """
    for host, images in enumerate((9, 4)):
        make_folder(tmp_path / f"part{host}", images, 2)
    found = []
    for size, slots in ((2, 1), (3, 2)):
        folder = tmp_path / f"run{size}"
        command = [str(BIN / "horovodrun"), "-np", str(size), "--gloo"]
        command += ["-H", f"localhost:{slots},127.0.0.1:1"]
        data = ["--data", f"imagefolder:{tmp_path}/part{{host}}", "--data-placement", "per-host"]
        place = ["--output", str(tmp_path), "--experiment", folder.name]
        flags = [*FLAGS, *data, *place, "--global-batch-size", "10", "--workers", "0", *more]
        finished = run([*command, *hvdtrain("train", *flags)], timeout_s=200)
        assert finished.exit_code == 0, finished.output
        assert "parts of 18 + 8 samples on 2 hosts" in finished.output
        found.append(summary_and_weights(folder))
    for summary, _ in found:
        assert (summary["samples_seen"], summary["valid_samples"]) == (2 * 26, 8)
        assert summary["audit"]["failed"] == 0
    assert largest_difference(found[1][1], found[0][1]) <= (0 if more else 1e-9)


def test_parts_of_other_classes_are_refused(tmp_path: Path) -> None:
    """Fails when hosts train on parts whose class numbers mean different things."""
    for host in range(2):
        make_folder(tmp_path / f"part{host}", 2, 1)
    for part in ("train", "valid"):
        (tmp_path / "part1" / part / "dog").rename(tmp_path / "part1" / part / "wolf")
    command = [str(BIN / "horovodrun"), "-np", "2", "--gloo", "-H", "localhost:1,127.0.0.1:1"]
    data = ["--data", f"imagefolder:{tmp_path}/part{{host}}", "--data-placement", "per-host"]
    flags = [*FLAGS, *data, "--global-batch-size", "4", "--output", str(tmp_path / "runs")]
    finished = run([*command, *hvdtrain("train", *flags)], timeout_s=240)
    assert finished.exit_code != 0
    assert re.search(r"lacks \['dog'\], and also has \['wolf'\]", finished.output)
    assert not (tmp_path / "runs").exists()


def test_a_run_on_a_folder_resumes_exactly(pictures: Path, alone, tmp_path: Path) -> None:
    """Fails when what was read ahead counts, or another number of workers or readers matters."""
    flags = [*FLAGS, "--data", f"imagefolder:{pictures}", "--global-batch-size", "10"]
    first = train([*flags, "--max-steps", "3"], tmp_path / "run", 2, "gloo")
    assert first.exit_code == 0, first.output
    second = train([*flags, "--workers", "0", "--resume", "auto"], tmp_path / "run", 1, "none")
    assert second.exit_code == 0, second.output
    assert "continuing from" in second.output
    summary, weights = summary_and_weights(tmp_path / "run")
    assert summary["resumed_from"] == 3 and summary["samples_seen"] == 2 * TRAIN
    assert largest_difference(weights, alone[1]) < 1e-9
