"""`hvdtrain bench classic`: flags, data, epoch times, table and plot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdtrain.data.builtin import FASHION_FOLDER, FILES
from hvdtrain.errors import UsageError
from hvdtrain.lab.bench.classic import (
    SETTINGS,
    ClassicCase,
    ClassicPlan,
    ClassicResult,
    as_json,
    data_that_is_there,
    draw_classic,
    epoch_time,
    table,
)
from hvdtrain.lab.bench.rounds import measure
from tests.unit.lab.test_bench_scaling import read

PLAN = ClassicPlan(
    model="lenet",
    data="digits",
    data_dir="data",
    epochs=3,
    rounds=1,
    controller="gloo",
    time_limit_s=60.0,
)


def run(setting: ClassicCase, folder: Path) -> ClassicResult:
    """The first epoch takes longer; the rest 4, 2 and 1 s."""
    seconds = 4.0 / setting.workers * 256 / setting.global_batch_size
    return ClassicResult([9.0, seconds, seconds], 0.75)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--epochs 0", "--epochs=0"),
        ("--rounds 0", "--rounds=0"),
        ("--steps 3", "--steps: no such flag"),
        ("--json absent/x.json", "no such folder"),
    ],
)
def test_bad_flags_are_reported(flags: str, expected: str) -> None:
    """Fails if a value that cannot be goes through."""
    with pytest.raises(UsageError) as caught:
        read("classic", *flags.split())
    assert any(expected in problem for problem in caught.value.problems)


def test_fashion_mnist_where_all_of_it_is_there(tmp_path: Path) -> None:
    """Fails if a file that is missing is noticed only by the runs."""
    (tmp_path / FASHION_FOLDER).mkdir(parents=True)
    for name in FILES:
        assert data_that_is_there(tmp_path) == "digits"
        (tmp_path / FASHION_FOLDER / name).touch()
    assert data_that_is_there(tmp_path) == "fashion-mnist"


def test_the_first_epoch_is_left_out() -> None:
    """Fails if an epoch with imports and warm-up counts, or a single one is lost."""
    assert (
        epoch_time([ClassicResult([9.0, 2.0, 4.0], 0.5), ClassicResult([9.0, 3.0, 8.0], 0.5)])
        == 3.5
    )
    assert epoch_time([ClassicResult([9.0], 0.5)]) == 9.0


def test_table_json_and_plot(tmp_path: Path) -> None:
    """Fails if ours and the published figures are not beside one another, with speed-ups."""
    results = measure(SETTINGS, PLAN.rounds, run, tmp_path, lambda line: None)
    found = [" ".join(line.split()) for line in table(PLAN, results).splitlines()]
    assert found[2:5] == [
        "1 256 0.1 4.000 1.00x 0.7500 14.2 1.00x 2.6 1.00x",
        "2 256 0.1 2.000 2.00x 0.7500 10.2 1.39x 2.6 1.00x",
        "2 512 0.2 1.000 4.00x 0.7500 8.1 1.75x 2.4 1.08x",
    ]
    rows = json.loads(json.dumps(as_json(PLAN, results)))["rows"]
    assert [row["speed_up"] for row in rows] == [1.0, 2.0, 4.0]
    assert [ClassicCase(r["workers"], r["global_batch_size"], r["lr"]) for r in rows] == [*SETTINGS]
    assert len(draw_classic(PLAN, results).png) > 5000
