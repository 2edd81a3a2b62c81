"""`hvdtrain bench start`: flags, parts, ratios, table and plot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.lab.bench.rounds import measure
from hvdtrain.lab.bench.start import (
    CONTESTANTS,
    LAUNCH,
    PARTS,
    TORCHRUN,
    TRAIN,
    Started,
    StartPlan,
    draw_start,
    marks_of,
    pulse_lines,
    ratios_of,
    started,
    table,
)
from tests.unit.lab.test_bench_scaling import read

PLAN = StartPlan(workers=2, rounds=3, controller="mpi", time_limit_s=60.0)
TOTALS = {LAUNCH: 6.0, TORCHRUN: 4.0}


def run(name: str, folder: Path) -> Started:
    """Slower by a second from round to round; launch cannot be taken apart."""
    total_s = TOTALS.get(name, 2.0) + int(folder.name[0])
    return Started(total_s, {}) if name == LAUNCH else started([0, 0.1, 0.2, 0.3, 0.4, total_s])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("-np 1", "-np=1: must be at least 2"),
        ("--rounds 0", "--rounds=0"),
        ("--time-limit-s -1", "--time-limit-s=-1"),
        ("--output setup.py", "is not a folder"),
        ("--models lenet", "--models: no such flag"),
    ],
)
def test_bad_flags_are_reported(flags: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a value that cannot be goes through."""
    monkeypatch.chdir(Path(__file__).parents[3])
    with pytest.raises(UsageError) as caught:
        read("start", *flags.split())
    assert any(expected in problem for problem in caught.value.problems)


def test_commands_take_turns(tmp_path: Path) -> None:
    """Fails if a command is left out of a round, or two starts share a folder."""
    reported: list[str] = []
    starts = measure(CONTESTANTS, PLAN.rounds, run, tmp_path, reported.append)
    assert [start.total_s for start in starts[LAUNCH]] == [6, 7, 8]
    names = [line.split(": ")[1] for line in reported]
    assert names == [*CONTESTANTS, *reversed(CONTESTANTS), *CONTESTANTS]
    assert len(list(tmp_path.iterdir())) == len(reported)


def test_table_ratios_and_plot(tmp_path: Path) -> None:
    """Fails if a ratio is upside down, or parts are reported of what cannot be taken apart."""
    starts = measure(CONTESTANTS, PLAN.rounds, run, tmp_path, lambda line: None)
    ratio = ratios_of(starts)[f"{LAUNCH} / {TORCHRUN}"]
    assert (ratio.median, ratio.highest) == (7 / 5, 6 / 4)
    lines = table(PLAN, starts).splitlines()
    (launch,) = [line for line in lines if line.startswith(f"  {LAUNCH} ")]
    assert launch.split()[2:] == ["7.00"] + ["-"] * len(PARTS)
    (alone,) = [line for line in lines if line.startswith(f"  {TRAIN} ")]
    assert alone.split()[3:] == ["3.00", "0.10", "0.10", "0.10", "0.10", "2.60"]
    assert len(draw_start(starts).png) > 5000


def test_parts_are_between_the_marks() -> None:
    """Fails if a mark is taken for another, or a late reading makes a part negative."""
    lines = [
        (10.01, "@10.000000"),
        (12.5, "?"),
        (12.4, "+prepare 0 12.400000"),
        (13.0, "+data 1 13.000000"),
        (13.5, "+compute 1 13.100000"),
        (14.0, "+data 2 13.900000"),
    ]
    assert marks_of(lines) == [10.0, 12.4, 12.4, 13.0]
    parts = started([9.0, *marks_of(lines), 13.8]).parts_s
    assert list(parts) == list(PARTS)
    assert parts == pytest.approx(dict(zip(PARTS, (1.0, 2.4, 0.0, 0.6, 0.8), strict=True)))


@pytest.mark.parametrize(("rank", "stamps"), [("0", 1), ("1", 0)])
def test_rank_0_alone_is_stamped(rank: str, stamps: int, tmp_path: Path) -> None:
    """Fails if a worker does not become its command, the pipe does not reach it, or other ranks
    write into it.
    """
    pipe = tmp_path / "pulse"
    program = "import sys; from hvdtrain.pulse import Pulse; Pulse.from_environment().beat('x')"
    command = [sys.executable, "-m", "hvdtrain.lab.bench.stamp", str(pipe), sys.executable, "-c"]
    names = {"HOROVOD_RANK": rank, "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": rank}
    with pulse_lines(pipe) as lines:
        done = subprocess.run([*command, program], env=os.environ | names, timeout=60, check=False)
    assert done.returncode == 0
    reported = [line[0] for _, line in lines]
    assert reported == ["@", "?", "+", "#"] if stamps else ["#"]
