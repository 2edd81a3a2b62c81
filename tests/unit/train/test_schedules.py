"""Learning rates: shapes, warm-up, scaling by the batch, and the flag that offers the shapes."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from pathlib import Path

import pytest

from hvdtrain.config import ScheduleConfig
from hvdtrain.train.schedules import SCHEDULES, make_schedule, scaled_lr

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("shape", SCHEDULES)
@pytest.mark.parametrize("warmup", [1, 4, 10])
def test_warm_up_is_linear_and_ends_at_the_peak(shape: str, warmup: int) -> None:
    """Fails when warm-up starts at zero, bends, or misses the peak by a step."""
    schedule = make_schedule(shape, 0.5, total_steps=100, warmup_steps=warmup)
    rates = [schedule(step) for step in range(warmup)]
    assert rates == pytest.approx([0.5 * (step + 1) / warmup for step in range(warmup)])
    assert rates[-1] == 0.5
    assert schedule(warmup) == 0.5


@pytest.mark.parametrize("shape", SCHEDULES)
def test_a_run_that_is_all_warm_up(shape: str) -> None:
    """Fails when a shape is asked for steps that it does not have."""
    assert [make_schedule(shape, 2.0, 5, 5)(step) for step in (0, 4)] == [0.4, 2.0]


def test_cosine_falls_to_zero() -> None:
    """Fails when a rate is higher than the one before it, when the rates a quarter and half of the
    way down are not those of a cosine, or when the last one is zero or far from zero.
    """
    schedule = make_schedule("cosine", 2.0, total_steps=1010, warmup_steps=10)
    rates = [schedule(step) for step in range(10, 1010)]
    assert rates == sorted(rates, reverse=True)
    assert rates[500] == pytest.approx(1.0) and rates[250] == pytest.approx(1 + math.sqrt(0.5))
    assert 0 < rates[-1] < 1e-5


@pytest.mark.parametrize("shape", SCHEDULES)
def test_a_lowest_rate(shape: str) -> None:
    """Fails if a schedule falls below it, does not come near it, or warms up from it."""
    schedule = make_schedule(shape, 2.0, total_steps=1000, warmup_steps=10, min_lr=0.5)
    rates = [schedule(step) for step in range(1000)]
    assert (rates[0], rates[9]) == (0.2, 2.0)
    parts = {"constant": 1.0, "cosine": 0.0, "step": 0.001}
    assert min(rates[10:]) == pytest.approx(0.5 + 1.5 * parts[shape], rel=1e-4)


@pytest.mark.parametrize("total", [9, 18, 90, 9_000, 99_999])
def test_step_decays_at_the_milestones(total: int) -> None:
    """Fails when a decay comes a step early or late, or is not a tenth."""
    schedule = make_schedule("step", 3.0, total, warmup_steps=0)
    for decays, first in enumerate((total // 3, total * 2 // 3, total * 8 // 9)):
        assert schedule(first - 1) == pytest.approx(3.0 * 0.1**decays)
        assert schedule(first) == pytest.approx(3.0 * 0.1 ** (decays + 1))
    assert schedule(total - 1) == pytest.approx(0.003)


def test_constant_stays() -> None:
    """Fails when a constant rate moves."""
    schedule = make_schedule("constant", 0.1, 50, 0)
    assert {schedule(step) for step in range(50)} == {0.1}


def test_an_unknown_shape_is_refused() -> None:
    """Fails when a shape that is not in the table makes a schedule, or the shapes are not named."""
    with pytest.raises(ValueError, match="linear: must be one of constant, cosine, step"):
        make_schedule("linear", 0.1, 50, 0)


def test_the_flag_offers_every_shape() -> None:
    """Fails when a shape of the table is missing from --sched, its help or the guide, or one of
    these names a shape that is not in the table.
    """
    (sched,) = [field for field in fields(ScheduleConfig) if field.name == "sched"]
    assert sched.metadata["choices"] == tuple(SCHEDULES)
    described = sched.metadata["help"].partition(": ")[2].split("; ")
    assert [re.split(r"\W", text)[0] for text in described] == list(SCHEDULES)
    (row,) = re.findall(r"^\|.*`--sched .*$", (ROOT / "docs/guide.md").read_text(), re.MULTILINE)
    listed = row.partition("`--sched ")[2].partition(";")[0]
    assert re.findall(r"\w+", listed) == list(SCHEDULES)


@pytest.mark.parametrize(("rule", "expected"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_scaled_lr(rule: str, expected: float) -> None:
    """Fails when four times the base batch does not give 1, 4 or 2 times the rate."""
    assert scaled_lr(0.1, rule, 1024, 256) == pytest.approx(expected)
    assert scaled_lr(0.1, rule, 256, 256) == 0.1
