"""What a bench says of a noisy machine: ratios that it does not print, and its disturbance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdtrain.lab import disturbance
from hvdtrain.lab.bench.rounds import advice, ratio, ratio_and_spread, ratio_lines
from hvdtrain.lab.disturbance import Disturbance
from hvdtrain.lab.findings import Findings, publish

CLEAR = ratio([1.0, 1.1, 1.2, 1.3], [1.0] * 4)
UNCLEAR = ratio([0.7, 1.0, 1.1, 1.6], [1.0] * 4)


def test_a_ratio_of_rounds_that_differ_is_not_printed() -> None:
    """Fails if the median of such rounds is shown, or a clear one is not, or no advice follows."""
    assert ratio_and_spread(CLEAR) == "1.150 (1.075 to 1.225)"
    assert ratio_and_spread(UNCLEAR) == "unclear (0.925 to 1.225)"
    assert ratio_and_spread(ratio([2.0], [1.0])) == "2.000 (2.000 to 2.000)"
    assert advice([CLEAR, None]) == []
    lines = ratio_lines({"a": CLEAR, "b": UNCLEAR})
    assert [line.split()[2] for line in lines[1:3]] == ["1.150", "unclear"]
    assert "wider than 20 %" in lines[3] and "more --rounds" in lines[3]


def test_stolen_time_is_printed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if another field is read, time before the measurement counts, or JSON lacks it."""
    stat, target = tmp_path / "stat", tmp_path / "out.json"
    monkeypatch.setattr(disturbance, "STAT", stat)
    stat.write_text("cpu  100 0 50 900 0 0 0 70 9 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    watched = Disturbance()
    stat.write_text("cpu  150 0 50 1000 0 20 0 100 99 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    publish(Findings(["table"], {"figure": 1}), {"json": target, "disturbance": watched})
    printed = capsys.readouterr().out
    assert printed.startswith("table\nmachine: ")
    assert "; 15.0 % of their time went to other virtual machines" in printed  # 30 of 200
    content = json.loads(target.read_text())
    assert content["figure"] == 1 and content["machine"]["stolen"] == pytest.approx(0.15)
