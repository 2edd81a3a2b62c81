"""`hvdtrain bench peers`: flags, orders of samples, the check of weights, tables and plot."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler

from hvdtrain.cli import bench_peers
from hvdtrain.errors import UsageError
from hvdtrain.evidence.children import ChildFailure
from hvdtrain.lab.bench import peer_runs, peers
from hvdtrain.lab.bench.jobs import run_peer_command
from hvdtrain.lab.bench.peer_runs import OURS, SAME, SYSTEMS, PeerRun, difference, write_images
from hvdtrain.lab.bench.peers import STEPS, PeerCase, PeerResults, PeersPlan, lines_of, table
from hvdtrain.lab.peers.same_work import CHECKED_STEPS, MODELS, PeerWork
from tests.unit.house.test_layers import imported_names
from tests.unit.lab.test_bench_scaling import read

WORK = PeerWork("lenet", "", 0, batch_size=4, workers=2, steps=6, folder="")
PLAN = PeersPlan(
    models={"lenet": 4},
    data=("memory",),
    systems=("loop", "ddp"),
    workers=2,
    readers=1,
    steps=6,
    rounds=2,
    controller="gloo",
    time_limit_s=60.0,
)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--models vgg", "--models=vgg: choose from lenet, mlp, resnet18-small, gpt, each once"),
        ("--models lenet,lenet", "each once"),
        ("--data disk", "--data=disk: choose from memory, images, each once"),
        ("--systems ddp,composer", "--systems=ddp,composer: choose from train, loop, ddp"),
        ("--models gpt --data images", "--models=gpt: takes no images: give --data memory"),
        ("--batch-size 1,2", "--batch-size=1,2: expected one number"),
        ("--steps 5", "--steps=5: must be at least 6"),
        ("--rounds 0", "--rounds=0"),
        ("--readers -1", "--readers=-1"),
        ("-np 1", "-np=1: must be at least 2"),
    ],
)
def test_bad_flags_are_reported(flags: str, expected: str) -> None:
    """Fails if a value that cannot be goes through, or the message does not say what can."""
    with pytest.raises(UsageError) as caught:
        read("peers", *flags.split())
    assert any(expected in problem for problem in caught.value.problems)


def test_flags_make_the_cases() -> None:
    """Fails if a name is lost on the way, or the lists of the command line are not the bench's."""
    assert ((*MODELS,), (*SYSTEMS,)) == (bench_peers.MODELS, bench_peers.SYSTEMS)
    assert set(STEPS) == set(MODELS)
    found = read("peers", "--models=gpt,mlp", "--batch-size=2,3", "--systems=ddp,loop")
    assert (found["models"], found["systems"]) == ({"gpt": 2, "mlp": 3}, ("ddp", "loop"))
    assert (found["controller"], found["workers"]) == ("gloo", 2)
    plan = replace(PLAN, models=found["models"], data=found["data"])
    assert plan.cases() == [("gpt", "memory"), ("mlp", "memory"), ("mlp", "images")]


def test_orders_are_those_of_the_samplers() -> None:
    """Fails if a batch that the check takes is not the one that two workers together have."""
    parts = [list(DistributedSampler(range(48), 2, rank)) for rank in range(2)]  # type: ignore[arg-type]
    order = SYSTEMS["ddp"].order(WORK)
    for step in range(WORK.steps):
        both = {n for part in parts for n in part[4 * step : 4 * step + 4]}
        assert both == set(order[8 * step : 8 * step + 8].tolist())
    for system in SYSTEMS.values():
        assert sorted(system.order(WORK).tolist()) == [*range(48)]


def test_weights_are_compared_with_one_process(tmp_path: Path) -> None:
    """Fails if the right weights are refused, or wrong ones pass."""
    samples = CHECKED_STEPS * WORK.global_batch_size
    order = SYSTEMS["ddp"].order(WORK).tolist()
    for name, indices, is_same in (
        ("right", order[:samples], True),
        ("another order", SYSTEMS["loop"].order(WORK).tolist()[:samples], False),
        ("one sample twice", [*order[: samples - 1], order[0]], False),
    ):
        learned = peer_runs.learned_alone(WORK, tuple(indices))
        assert learned is not None
        path = tmp_path / f"{name}.weights"
        learned[1].tofile(path)
        apart = difference(WORK, SYSTEMS["ddp"], [path])
        assert apart is not None and (apart <= SAME) == is_same, name
    normalised = replace(WORK, model="resnet18-small")
    assert difference(normalised, SYSTEMS["ddp"], []) is None


def test_images_are_read_as_they_are_written(tmp_path: Path) -> None:
    """Fails if the folder has another number of images, or those that follow are not the same."""
    write_images(tmp_path / "images", 260)
    data = replace(WORK, images=str(tmp_path / "images")).make_data()
    assert len(data) == 260  # type: ignore[arg-type]
    x, y = data[0]
    assert (x.shape, y) == ((3, 28, 28), 0)
    assert torch.equal(x, data[25][0])  # 25 distinct ones in each class, then their other names
    assert len(np.unique([float(data[n][0].sum()) for n in range(25)])) == 25


def test_lines_are_those_of_the_code(tmp_path: Path) -> None:
    """Fails if text or empty lines are counted, or a line of code is not."""
    script = tmp_path / "script.py"
    script.write_text(
        '"""What it is.\n\nMore.\n"""\n\nimport torch\n'
        "import torchvision_operators  # noqa: F401\n\n\ndef f():\n"
        '    """Text."""\n    # a comment\n    return torch\n'
    )
    assert lines_of(script) == 3


def result(speed: float, apart: float | None = 1e-7) -> PeerRun:
    return PeerRun(speed, 2.0, 300 << 20, apart)


def test_a_ratio_that_varies_is_not_shown() -> None:
    """Fails if a ratio is upside down, is shown although its middle half is too wide, or a failed
    system has one.
    """
    case = PeerCase("lenet", "memory", 4, 6)
    case.runs = {
        "loop": [result(120.0), result(130.0), result(110.0)],
        "ddp": [result(100.0), result(110.0), result(90.0)],
        "fabric": [result(100.0), result(60.0), result(20.0, None)],
        "horovod": [None, None, None],
    }
    lines = table(case).splitlines()
    cells = {line[:18].strip(): line for line in lines}
    assert cells["DDP"].split()[1:6] == [
        "100",
        "2.0",
        "300",
        str(lines_of(SYSTEMS["ddp"].path)),
        "1e-07",
    ]
    assert "1.200 (1.191 to 1.211)" in cells["DDP"]
    assert "unclear (1.683 to 3.833)" in cells["Lightning Fabric"]
    assert "failed" in cells["Horovod"] and cells["Horovod"].split()[-1] == "-"
    assert len(peers.draw([case]).png) > 5000


def test_systems_take_turns_and_a_failed_one_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the order of rounds does not alternate, a failure ends the others, or another
    result of the training is not reported.
    """
    turns: list[str] = []

    def run(system: object, work: PeerWork, controller: str, limit_s: float) -> PeerRun:
        name = next(n for n, one in SYSTEMS.items() if one is system)
        turns.append(name)
        assert not [*Path(work.folder).iterdir()]
        if name == "ddp":
            raise ChildFailure("it broke")
        return result(100.0, 0.5)

    monkeypatch.setattr(peers, "run_peer", run)
    results = PeerResults()
    systems = ["loop", "ddp", "horovod"]
    peers.measure_case(PLAN, ("lenet", "memory"), systems, tmp_path / "case", results)
    assert turns == ["loop", "ddp", "horovod", "horovod", "loop"]
    (case,) = results.cases
    assert case.runs["ddp"] == [None, None]
    problems = "\n".join(results.problems)
    assert "lenet, memory: DDP: it broke" in problems
    assert "hvdtrain.Loop: after 3 steps its weights differ" in problems
    assert not (tmp_path / "case").exists()


def test_published_horovod_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a run would take the Horovod that is installed, or lose the user's path; or if one
    of another system gets the published one, or an unnamed one is asked for.
    """
    paths: dict[str, str | None] = {}

    def run(argv: object, environment: dict[str, str], *_: object) -> None:
        paths[name] = environment.get("PYTHONPATH")

    monkeypatch.setattr(peer_runs, "run_command", run)
    monkeypatch.setenv("PYTHONPATH", "/of-the-user")
    for name in ("horovod", "published"):
        system = SYSTEMS[name]
        if system.packages:
            system = replace(system, packages=lambda: Path("/folder"))
        work = replace(WORK, folder=str(tmp_path / name))
        Path(work.folder).mkdir()
        Path(work.folder, "process-0.log").touch()
        with pytest.raises(ChildFailure, match="0 of 2 workers"):
            peer_runs.run_peer(system, work, "mpi", 5.0)
    assert paths == {"horovod": "/of-the-user", "published": "/folder:/of-the-user"}
    assert "published" not in read("peers")["systems"]


def test_a_system_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if it ends the bench, or is left out without a word."""
    absent = replace(SYSTEMS["fabric"], package="no_such_package")
    monkeypatch.setitem(SYSTEMS, "fabric", absent)  # type: ignore[arg-type]
    monkeypatch.setattr(peers, "run_peer", lambda *arguments: result(100.0))
    flags = ["--models=lenet", "--data=memory", "--systems=loop,fabric,ddp", "--rounds=2"]
    flags += [f"--json={tmp_path / 'peers.json'}", f"--output={tmp_path / 'plots'}"]
    assert peers.run(read("peers", *flags)) == 0
    output = capsys.readouterr().out
    assert "not installed, and left out: Lightning Fabric (no_such_package)" in output
    content = json.loads((tmp_path / "peers.json").read_text())
    assert content["left_out"] == {"fabric": "no_such_package"}
    (case,) = content["cases"]
    assert set(case["runs"]) == {"loop", "ddp"}
    assert case["ratios"]["loop"]["ddp"]["median"] == 1


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name not in OURS])
def test_scripts_of_others_import_nothing_of_ours(name: str) -> None:
    """Fails if another system's start waits for our imports, or gains by what they put off."""
    for path in (SYSTEMS[name].path, SYSTEMS[name].path.with_name("same_work.py")):
        names = [module for _, module in imported_names(path.read_text("utf-8"), "")]
        assert not [module for module in names if module.startswith("hvdtrain")]


@pytest.mark.parametrize("notes", [True, False])
def test_a_peer_that_aborts_as_it_ends_is_measured(
    notes: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if an abort after the last step ends a bench, as DDP's may, or an earlier one does
    not.
    """
    noted = tmp_path / "noted"
    program = "import os, sys; sys.argv[2:] and open(sys.argv[1], 'w').close(); os.abort()"
    argv = [sys.executable, "-c", program, str(noted), *(["once"] if notes else [])]
    with nullcontext() if notes else pytest.raises(ChildFailure, match="code -6"):
        run_peer_command(argv, os.environ, tmp_path, 60, noted.exists)
    assert ("measured, though it failed" in capsys.readouterr().out) == notes
