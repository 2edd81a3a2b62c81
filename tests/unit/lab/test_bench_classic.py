"""`hvdtrain bench classic`: flags, data, epoch times, table and plot."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.cli.bench import CLASSIC
from hvdtrain.data import builtin
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
    model=None,
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


def test_fashion_mnist_where_all_of_it_is_there(tmp_path: Path, monkeypatch) -> None:
    """Fails if a file that is missing is noticed only by the runs."""
    monkeypatch.setattr(builtin, "DEBIAN_FOLDER", tmp_path / "none")
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


def test_the_rows_that_are_measured() -> None:
    """Fails if a model cannot be chosen alone, or its epochs cannot be fewer."""
    assert {case.model for case in SETTINGS} == set(CLASSIC)
    assert replace(PLAN, epochs=None).settings == [*SETTINGS]
    lenet = replace(PLAN, model="lenet", epochs=1).settings
    assert [(case.model, case.workers, case.epochs) for case in lenet] == [
        *(("lenet", 1, 1), ("lenet", 2, 1), ("lenet", 2, 1)),
    ]


def test_table_json_and_plot(tmp_path: Path) -> None:
    """Fails if ours and the published figures are not beside one another, with speed-ups."""
    results = measure(PLAN.settings, PLAN.rounds, run, tmp_path, lambda line: None)
    found = [" ".join(line.split()) for line in table(PLAN, results).splitlines()]
    assert found[2:7] == [
        "lenet 1 256 0.2 3 4.000 1.00x 0.7500 1.8, 0.80 2.6",
        "lenet 2 256 0.2 3 2.000 2.00x 0.7500 2.5, 0.84 2.6",
        "lenet 2 512 0.4 3 1.000 4.00x 0.7500 - 2.4",
        "resnet18-small 1 256 0.1 3 4.000 1.00x 0.7500 13.2, 0.93 14.2",
        "resnet18-small 2 256 0.1 3 2.000 2.00x 0.7500 - 10.2",
    ]
    assert "1day-notebooks" in found[8] and "7.3, 0.92" in found[8]
    assert "without a source" in found[9] and "0.893 to 0.917" in found[9]
    content = json.loads(json.dumps(as_json(PLAN, results)))
    assert [row["speed_up"] for row in content["rows"]] == [1.0, 2.0, 4.0, 1.0, 2.0]
    assert [row["model"] for row in content["rows"]] == [case.model for case in SETTINGS]
    assert len(content["published"]) == 10
    assert len(draw_classic(PLAN, results).png) > 5000
