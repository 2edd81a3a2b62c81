"""`hvdtrain compare` with real processes: every system runs, agrees, and is caught if it does not.

Global batches are uneven throughout, or smaller than N.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdtrain.cli.compare import SYSTEMS
from tests.parallel.launching import Finished, hvdtrain, run

Rows = dict[str, dict]
SOCKETS_MORE = 1.15  # headers and negotiation, at most, over the formula
WRONG = "tests.parallel.wrong_strategies:MeanOfMeans"
FAILING = "tests.parallel.wrong_strategies:Failing"


def compare(folder: Path, *flags: str) -> tuple[Finished, Rows]:
    """Run it; the rows of its JSON by system."""
    target = folder / "rows.json"
    places = ["--json", str(target), "--output", str(folder / "page"), "--controller", "gloo"]
    finished = run(hvdtrain("compare", *flags, *places), timeout_s=240)
    assert target.exists(), finished.output
    return finished, {row["system"]: row for row in json.loads(target.read_text())["rows"]}


def check_traffic(row: dict) -> None:
    """What was measured agrees with the formula; on sockets a little more."""
    assert row["traffic"].keys() == row["formula"].keys()
    most = SOCKETS_MORE if row["traffic_source"] == "sockets" else 1.0
    for rank, expected in row["formula"].items():
        for way in ("sent", "received"):
            found = row["traffic"][rank][way]
            assert expected[way] <= found <= expected[way] * most, (row["system"], rank, way)


def test_every_system_on_two_workers(tmp_path: Path) -> None:
    """Fails if a system does not run, ends elsewhere than `single`, sends other than it should by
    its formula, or if plots or page are missing.
    """
    finished, rows = compare(tmp_path, "-np", "2", "--steps", "4", "--global-batch-size", "9")
    assert finished.exit_code == 0, finished.output
    assert tuple(rows) == SYSTEMS
    judged = set(SYSTEMS) - {"single", "parameter_server_async"}
    assert {name for name, row in rows.items() if row["status"] == "agrees"} == judged
    assert all(rows[name]["difference"] <= 1e-9 for name in judged)
    assert rows["parameter_server_async"]["figures"].keys() == {"staleness_mean", "staleness_max"}
    assert {name for name, row in rows.items() if row["traffic_source"] == "sockets"} == {
        "ddp",
        "horovod",
    }
    for name in judged - {"data_parallel", "model_parallel"}:
        check_traffic(rows[name])
    sent = {rank: t["sent"] for rank, t in rows["model_parallel"]["traffic"].items()}
    assert sent == dict.fromkeys(("stage 0", "stage 1"), 9 * 50 * 4 * 4 * 8)  # behind the pooling
    for name in ("throughput", "phases", "traffic", "difference", "memory"):
        assert (tmp_path / "page" / f"{name}.png").stat().st_size > 5000
    page = (tmp_path / "page" / "index.html").read_text()
    assert page.count("data:image/png;base64,") == 5
    assert all(name in page for name in SYSTEMS)


def test_more_workers_than_samples(tmp_path: Path) -> None:
    """Fails if an empty share is not one of no weight, or if traffic over three processes is not
    what the formulas say: with two, rings and stars send the same.
    """
    systems = "towers,gather_broadcast,parameter_server,ring"
    flags = ["--towers-reduction", "tensorflow", "--towers-dim", "2", "--systems", systems]
    finished, rows = compare(
        tmp_path, "-np", "3", "--steps", "3", "--global-batch-size", "2", *flags
    )
    assert finished.exit_code == 0, finished.output
    assert {row["status"] for name, row in rows.items() if name != "single"} == {"agrees"}
    for name in ("towers", "gather_broadcast", "parameter_server"):
        check_traffic(rows[name])
    size = json.loads((tmp_path / "rows.json").read_text())["gradient_bytes"]
    for traffic in rows["ring"]["traffic"].values():  # segments differ by an element of 8 bytes
        assert traffic["sent"] == pytest.approx(2 * 2 / 3 * size, abs=4 * 8)
    assert rows["gather_broadcast"]["traffic"]["worker 0"]["sent"] == 2 * size
    assert rows["gather_broadcast"]["traffic"]["worker 1"]["sent"] == size


def test_a_wrong_system_is_caught(tmp_path: Path) -> None:
    """Fails if the mean of means over uneven shares passes, if one system's failure ends the
    others', or if it leaves a process waiting.
    """
    flags = ["--steps", "2", "--global-batch-size", "5", "--systems", f"{FAILING},{WRONG}"]
    finished, rows = compare(tmp_path, "-np", "2", *flags)
    assert finished.exit_code == 17, finished.output
    assert rows[WRONG]["status"] == "DISAGREES"
    assert rows[WRONG]["difference"] > 1e-6
    assert rows[FAILING]["status"] == "failed"
    assert rows[FAILING]["problem"] == "ArithmeticError: as requested"
