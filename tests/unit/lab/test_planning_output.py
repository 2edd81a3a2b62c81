"""What `hvdtrain plan` measures, counts and prints: profiles, table, JSON, plot."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from torch import nn

from hvdtrain.cli import main
from hvdtrain.errors import UsageError
from hvdtrain.lab.plan.planning import draw_plot
from hvdtrain.lab.plan.predicting import METHODS, Cluster, Link, Scenario, largest_useful, predict
from hvdtrain.lab.plan.profiles import (
    WARM_UP_STEPS,
    build_layers,
    count_layers,
    measure_profile,
    share_out,
)
from tests.unit.plans import PROFILE, write
from tests.unit.strategies import work_spec

GIVEN = ("--latency-us=50", "--bandwidth-gbit-s=10", "--workers-per-host=2")
GOLDEN = """\
plan: two $layers, 8 samples a worker, 2 gradients of 5.000 MB
  compute  31.00 ms a step (forward 10.00, backward 20.00, update 1.00); by hand
  spread   30.00 to 33.00 ms over 3 steps: a step waits for the slowest worker
  network  50.0 us, 1,250 MB/s; as given
  hosts    2 workers each; inside 5.0 us, 8,000 MB/s
  servers  one parameter server per host
  queue    a cycle of 1 ms, buckets of 1 MiB or more, ranks agree on a tree
"""


class Odd(nn.Module):
    """Runs its layers in another order than they stand in, and has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(nn.init.zeros_(nn.Linear(4, 1).weight[0]))
        self.late = nn.Linear(4, 2)
        self.early = nn.Linear(4, 4)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.late(self.early(x) + self.own)


def test_layers_are_counted_as_they_run() -> None:
    """Fails when order is that of the source, or operations are counted twice or not at all."""
    layers = count_layers(Odd(), (4,))
    names = [layer.name for layer in layers]
    assert names.index("early") < names.index("late") and set(names) >= {"", "unused"}
    operations = {layer.name: layer.operations for layer in layers}
    assert operations == {"": 0, "unused": 0, "early": 2 * 4 * 4, "late": 2 * 4 * 2}
    found = share_out(layers, "odd", 2, 3.0)
    ready = {gradient.name: gradient.ready_s for gradient in found.gradients}
    assert ready["late.weight"] == pytest.approx(2.0 * 16 / 48)
    assert ready["early.weight"] == ready["own"] == pytest.approx(2.0)
    assert [g.ready_s for g in found.gradients] == sorted(g.ready_s for g in found.gradients)
    assert (found.forward_s, found.backward_s, found.step_s) == (1.0, 2.0, 3.0)


def test_operations_of_lenet_by_hand() -> None:
    """Fails when convolutions are counted other than 2 x outputs x inputs of each."""
    layers = build_layers("lenet", "synthetic:1x28x28", ".")
    expected = {
        "conv1": 2 * 26 * 26 * 20 * 9,
        "conv2": 2 * 9 * 9 * 50 * 20 * 25,
        "hidden": 2 * 800 * 128,
        "output": 2 * 128 * 10,
    }
    assert {layer.name: layer.operations for layer in layers} == expected
    assert sum(sum(layer.sizes_bytes.values()) for layer in layers) == 4 * 129_068


def test_a_measured_profile(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails when a gradient is missing or out of bounds, the last layer's is not ready before the
    first's, or steps that warm up count, or the short ones at the end of an epoch.
    """
    found = measure_profile(work_spec(dtype="float32", steps=WARM_UP_STEPS + 4))
    assert [g.name for g in found.gradients][-2:] in (
        ["conv1.weight", "conv1.bias"],
        ["conv1.bias", "conv1.weight"],
    )
    assert found.gradient_bytes == 4 * 129_068 and len(found.gradients) == 8
    assert all(0 < g.ready_s <= 1.5 * found.backward_s for g in found.gradients)
    assert len(found.step_times_s) == 3 and found.batch_size == 5  # of 5, 5, 2 and 5 samples
    assert 0 < found.forward_s < max(found.step_times_s)


def test_a_batch_larger_than_the_data_is_refused() -> None:
    """Fails when steps of fewer samples are taken for those of a whole batch."""
    with pytest.raises(UsageError, match=r"--batch-size=13: .* train on \(12\)"):
        measure_profile(replace(work_spec(dtype="float32", steps=1), global_batch_size=13))


def run_plan(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["hvdtrain", "plan", *arguments])
    monkeypatch.setattr("hvdtrain.lab.plan.planning.StopRequests", lambda: None)
    return main()


def test_golden_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails when a figure or its place changes; columns are held to the JSON beside it."""
    profile = write(tmp_path, asdict(PROFILE))
    file = tmp_path / "plan.json"
    inside = ("--intra-latency-us=5", "--intra-bandwidth-gbit-s=64", "--max-workers=6")
    places = (f"--profile={profile}", f"--json={file}", f"--output={tmp_path}")
    assert run_plan(monkeypatch, *GIVEN, *inside, *places) == 0
    reported = capsys.readouterr().out
    assert reported.startswith(GOLDEN)
    rows = [line.split() for line in reported.splitlines() if line.lstrip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["1", "2", "4", "6"] * 2
    content = json.loads(file.read_text())
    for row, planned in zip(rows[4:], content["traffic"], strict=True):
        for place, kind in enumerate(("gradients", "canonical sums", "an audit")):
            sent, messages, held = row[1 + 3 * place :][:3]
            assert float(sent) == pytest.approx(planned[kind]["sent_bytes"] / 1e6, abs=0.005)
            assert int(messages.replace(",", "")) == planned[kind]["messages"]
            assert float(held) == pytest.approx(planned[kind]["held_bytes"] / 1e6, abs=0.005)
    assert rows[5][1:3] == ["5.00", "4"]  # of 5 MB in two messages, a half is sent twice
    for place, prediction in enumerate(content["predictions"]):
        row = rows[place // len(METHODS)]
        cells = row[1 + 2 * (place % len(METHODS)) :][:2]
        assert cells == [
            f"{1000 * prediction['step_s']:.2f}",
            f"{prediction['efficiency']:.3f}",
        ]
    # By hand, in ms: of two workers the slower takes 32/31.333 as long: 31.660, of which backward
    # 20.426. The last gradient is ready then, and travels at once, as the rank waits: for 0.01 of
    # agreement and 2 (0.005 + 0.0625), so it ends 0.145 after the backward pass.
    assert rows[1][1:3] == ["31.80", "0.975"]
    assert content["network"] is None and content["profile"]["name"] == PROFILE.name
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert f"written to {tmp_path / 'scaling.png'}" in reported


def test_bad_files_end_with_2_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails when workers are started although the profile or the network is bad."""

    def never(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr("hvdtrain.lab.plan.planning.measure_network", never)
    monkeypatch.setattr("hvdtrain.lab.plan.planning.measure_profile", never)
    path = write(tmp_path, {"name": 3})
    assert run_plan(monkeypatch, f"--profile={path}", f"--output={tmp_path}") == 2
    assert run_plan(monkeypatch, f"--network={path}", f"--output={tmp_path}") == 2
    assert "gradients: a list of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["lenett", "nowhere:net"])
def test_models_that_are_not_there(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Fails when an unknown model ends in a traceback, measured or counted."""
    for more in ((), ("--step-time-s=1",)):
        flags_ = (*GIVEN, f"--model={model}", f"--output={tmp_path}", *more)
        assert run_plan(monkeypatch, *flags_) == 2
        assert f"--model={model}" in capsys.readouterr().err


def test_the_plot_shows_every_prediction(tmp_path: Path) -> None:
    """Fails when a method is left out, or a curve is not what was predicted."""
    setting = Scenario(PROFILE, Cluster(Link(1e-4, 1e8), Link(1e-5, 1e9), 4))
    counts = [1, 2, 4, 8, 16]
    predictions = [predict(setting, method, n) for n in counts for method in METHODS]
    useful = {method: largest_useful(setting, method, 16, 0.5) for method in METHODS}
    plot = draw_plot(predictions, useful, 0.5, PROFILE.name)
    figure = plot.figure
    upper, lower = figure.axes
    for index, method in enumerate(METHODS):
        rows = [p for p in predictions if p.method == method]
        assert list(upper.lines[index].get_xdata()) == counts
        assert list(upper.lines[index].get_ydata()) == [row.efficiency for row in rows]
        assert list(lower.lines[index].get_ydata()) == [row.samples_per_s for row in rows]
        ((at, efficiency),) = upper.collections[index].get_offsets()
        assert (at, efficiency) == (useful[method].workers, useful[method].efficiency)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        m.replace("_", " ") for m in METHODS
    ]
    assert plot.png.startswith(b"\x89PNG")
