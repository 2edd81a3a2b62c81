"""What `hvdtrain plan` is told, and what it tells: flags, profiles, networks, table, plot."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hvdtrain.cli import _parser, main
from hvdtrain.cli.plan_options import check_plan_flags
from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.planning.costs import Cluster, Link, ring
from hvdtrain.planning.counting import build_layers, count_layers, share_out
from hvdtrain.planning.measuring import WARM_UP_STEPS, measure_profile
from hvdtrain.planning.network import Point, fit, read_network
from hvdtrain.planning.overlap import Queue
from hvdtrain.planning.plots import draw_plot
from hvdtrain.planning.predicting import METHODS, Setting, largest_useful, predict_all
from hvdtrain.planning.profiles import Gradient, Profile, read_profile, write_profile
from hvdtrain.report.canvas import to_png
from hvdtrain.topology import Topology
from tests.unit.strategies import work_spec

PROFILE = Profile(
    name="two $layers",
    batch_size=8,
    forward_s=0.01,
    backward_s=0.02,
    update_s=0.001,
    gradients=(Gradient("last", 4_000_000, 0.004), Gradient("first", 1_000_000, 0.02)),
    step_times_s=(0.030, 0.031, 0.033),
    source="by hand",
)
GIVEN = ("--latency-us=50", "--bandwidth-gbit-s=10", "--workers-per-host=2")
GOLDEN = """\
plan: two $layers, 8 samples a worker, 2 gradients of 5.000 MB
  compute  31.00 ms a step (forward 10.00, backward 20.00, update 1.00); by hand
  spread   30.00 to 33.00 ms over 3 steps: of N workers the slowest is waited for
  network  50.0 us, 1,250 MB/s; as given
  hosts    of 2 workers; inside 5.0 us, 8,000 MB/s
  servers  one a host, of the parameter server
  queue    a cycle of 1 ms, no fusion, ranks agree on a tree
"""


def flags(*arguments: str) -> dict[str, Any]:
    """What these flags come to, once they are checked."""
    parsed, unknown = _parser().parse_known_args(["plan", *arguments])
    check_plan_flags(vars(parsed), unknown, Topology())
    return vars(parsed)


BAD_FLAGS = {
    "--latency-us=-1 --bandwidth-gbit-s=1": "--latency-us=-1.0: must be from 0 to 1e+09",
    "--latency-us=nan --bandwidth-gbit-s=1": "--latency-us=nan: must be from 0 to 1e+09",
    "--latency-us=inf --bandwidth-gbit-s=1": "--latency-us=inf: must be from 0 to 1e+09",
    "--latency-us=1 --bandwidth-gbit-s=0": "--bandwidth-gbit-s=0.0: must be from 1e-09 to 1e+09",
    "--latency-us=1": "give both, or neither",
    "--bandwidth-gbit-s=1": "give both, or neither",
    "--latency-us=1 --bandwidth-gbit-s=1 --network=f": "--network: not beside",
    "--latency-us=1 --bandwidth-gbit-s=1e-300": "must be from 1e-09 to 1e+09",
    "--workers-per-host=0": "--workers-per-host=0: must be at least 1",
    "--workers-per-host=2 --intra-latency-us=1": "--intra-bandwidth-gbit-s: give both",
    "--intra-latency-us=1 --intra-bandwidth-gbit-s=1": "give --workers-per-host too",
    "--cores-per-host=0": "--cores-per-host=0: must be at least 1",
    "--servers=-2": "--servers=-2: must be at least 1",
    "--fusion-bytes=-1": "--fusion-bytes=-1: must be from 0 to 1e+09",
    "--cycle-time-ms=-1": "--cycle-time-ms=-1.0: must be from 0 to 1e+09",
    "--negotiation-us=-1": "--negotiation-us=-1.0: must be from 0 to 1e+09",
    "--compute-speed=0": "--compute-speed=0.0: must be from 1e-09 to 1e+09",
    "--step-time-s=0": "--step-time-s=0.0: must be from 1e-09 to 1e+09",
    "--step-time-s=1 --steps=3": "--steps: nothing is measured",
    "--batch-size=0": "--batch-size=0: must be at least 1",
    "--steps=0": "--steps=0: must be at least 1",
    "--time-limit-s=0": "--time-limit-s=0.0: must be from 1e-09 to 1e+09",
    "--max-workers=1": "--max-workers=1: must be from 2 to 1,048,576",
    "--max-workers=1048577": "--max-workers=1048577: must be from 2",
    "--min-efficiency=0": "--min-efficiency=0.0: must be above 0, and 1 at most",
    "--min-efficiency=1.1": "--min-efficiency=1.1: must be above 0, and 1 at most",
    "--profile=p --model=lenet": "--model: not beside --profile",
    "--profile=p --step-time-s=1": "--step-time-s: not beside --profile",
    "--profile=p --save-profile=q": "--save-profile: not beside --profile",
    "--json=no/such/folder/f": "there is no such folder",
    "--save-profile=no/such/folder/f": "there is no such folder",
    "--output=/dev/null": "is not a folder",
    "--controller=nccl": "--controller",
    "--negotiation=star": "--negotiation",
    "--max-workers=many": "--max-workers",
    "--faster": "--faster: no such flag",
}


@pytest.mark.parametrize("text", BAD_FLAGS)
def test_bad_flags(text: str) -> None:
    """Fails when this is let through, or the message does not name the flag."""
    with pytest.raises(UsageError, match=r"[\s\S]") as caught:
        flags(*text.split())
    assert BAD_FLAGS[text] in str(caught.value)


def test_all_problems_of_the_flags_at_once() -> None:
    """Fails when one problem hides another."""
    with pytest.raises(UsageError) as caught:
        flags("--latency-us=-1", "--servers=0", "--max-workers=0", "--profile=p", "--data=d", "-x")
    assert len(caught.value.problems) == 6


def test_it_is_run_once() -> None:
    """Fails when every worker of a job begins to plan, and to start workers."""
    parsed, unknown = _parser().parse_known_args(["plan"])
    launched = Topology(rank=0, size=2, launched=True)
    with pytest.raises(UsageError, match="not by horovodrun"):
        check_plan_flags(vars(parsed), unknown, launched)


def write(folder: Path, content: object) -> Path:
    path = folder / "file.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_profile_comes_back_as_it_was(tmp_path: Path) -> None:
    """Fails when a figure is lost on the way to the file and back."""
    write_profile(PROFILE, tmp_path / "profile")
    assert read_profile(tmp_path / "profile") == PROFILE


def test_a_profile_by_hand_need_not_be_in_order(tmp_path: Path) -> None:
    """Fails when gradients travel in the file's order, or spread and source must be there."""
    content = json.loads(json.dumps(PROFILE.as_json()))
    del content["step_times_s"], content["source"]
    content["gradients"].reverse()
    found = read_profile(write(tmp_path, content))
    assert found.gradients == PROFILE.gradients and found.step_times_s == ()


GRADIENT = {"name": "w", "size_bytes": 4, "ready_s": 0.01}
BAD_PROFILES: dict[str, tuple[object, str]] = {
    "no JSON": ("{", "is not JSON"),
    "a list": ([1], "a JSON object was expected"),
    "an unknown field": ({"speed": 3}, "speed: no such field"),
    "no name": ({"name": None}, "name: a text was expected"),
    "half a sample": ({"batch_size": 0.5}, "batch_size=0.5: a whole number"),
    "true samples": ({"batch_size": True}, "batch_size=True"),
    "no forward": ({"forward_s": None}, "forward_s=None: seconds"),
    "negative": ({"update_s": -1}, "update_s=-1: seconds"),
    "not finite": ({"backward_s": math.nan}, "backward_s=nan: seconds"),
    "beyond floats": ({"forward_s": 10**400}, "forward_s=1000"),
    "text": ({"forward_s": "1"}, "forward_s=1: seconds"),
    "no time": ({"forward_s": 0, "backward_s": 0}, "one of them must be at least 1e-09"),
    "spread of 0": ({"step_times_s": [0]}, "step_times_s: a list of seconds above 0"),
    "spread is a number": ({"step_times_s": 3}, "step_times_s: a list"),
    "no gradients": ({"gradients": []}, "gradients: a list was expected"),
    "not a gradient": ({"gradients": [3]}, "gradients[0]: an object such as"),
    "too little of one": ({"gradients": [{"name": "w"}]}, "gradients[0]: an object such as"),
    "empty": ({"gradients": [GRADIENT | {"size_bytes": 0}]}, "gradients[0].size_bytes=0"),
    "huge": ({"gradients": [GRADIENT | {"size_bytes": 10**400}]}, "must be at least 1, whole"),
    "nameless": ({"gradients": [GRADIENT | {"name": 3}]}, "gradients[0].name: a text"),
    "too late": ({"gradients": [GRADIENT | {"ready_s": 1.0}]}, "must be from 0 to backward_s"),
    "too early": ({"gradients": [GRADIENT | {"ready_s": -1.0}]}, "gradients[0].ready_s=-1.0"),
}


@pytest.mark.parametrize("kind", BAD_PROFILES)
def test_bad_profiles(kind: str, tmp_path: Path) -> None:
    """Fails when such a file is taken, breaks with a traceback, or the place is not named."""
    content, expected = BAD_PROFILES[kind]
    if isinstance(content, dict):
        content = PROFILE.as_json() | content
    with pytest.raises(UsageError) as caught:
        read_profile(write(tmp_path, content))
    assert expected in str(caught.value) and "--profile=" in str(caught.value)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    """Fails when a missing file, a folder or bytes end in a traceback."""
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name in ("absent", ".", "bytes"):
        with pytest.raises(UsageError, match="--profile="):
            read_profile(tmp_path / name)
    with pytest.raises(UsageError, match="--save-profile="):
        write_profile(PROFILE, tmp_path)


SHAPES = [(k, b) for k in (1, 8, 32) for b in (4, 4096, 65536, 1 << 20)]


def timed(constant_s: float, link: Link, workers: int = 2) -> list[Point]:
    """Times as the model has them."""
    cluster = Cluster(link, link)
    return [Point(k, b, constant_s + k * ring(cluster, workers, b)) for k, b in SHAPES]


@settings(deadline=None)
@given(
    latency=st.floats(1e-6, 1e-3),
    bandwidth=st.floats(1e7, 1e10),
    agreement=st.floats(1e-5, 1e-2),
    workers=st.integers(2, 6),
)
def test_a_fit_finds_what_is_there(
    latency: float, bandwidth: float, agreement: float, workers: int
) -> None:
    """Fails when exact times do not give back their latency, bandwidth and agreement."""
    points = timed(agreement + 0.0005, Link(latency, bandwidth), workers)
    found = fit(workers, "gloo", 0.001, points)
    assert found.link.latency_s == pytest.approx(latency, rel=1e-4, abs=1e-8)
    assert found.link.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=1e-4)
    messages = 2 * math.ceil(math.log2(workers))
    assert found.negotiation_message_s == pytest.approx(agreement / messages, rel=1e-3)
    assert found.worst_residual < 1e-4


def test_a_fit_bears_noise_and_tells_it() -> None:
    """Fails when a fit goes far from noisy times, leans to one side, or hides how far they are."""
    dice = np.random.default_rng(0)
    link = Link(5e-5, 1e9)
    points = [
        Point(p.tensors, p.size_bytes, p.seconds * float(np.exp(0.3 * dice.standard_normal())))
        for p in timed(0.001, link)
    ]
    found = fit(2, "mpi", 0.001, points)
    assert found.link.latency_s == pytest.approx(link.latency_s, rel=0.4)
    assert found.link.bandwidth_bytes_per_s == pytest.approx(1e9, rel=0.4)
    assert abs(np.mean(found.residuals)) < 0.02
    assert 0.15 < found.typical_residual < found.worst_residual < 1.5


def test_times_that_do_not_grow_are_no_bandwidth() -> None:
    """Fails when a bandwidth is made up, or one without end is divided by."""
    with pytest.raises(TrainingError, match="do not grow"):
        fit(2, "gloo", 0.001, [Point(k, b, 0.01 / b) for k, b in SHAPES])


def test_no_unknown_is_negative() -> None:
    """Fails when noise makes latency or agreement negative, so that more messages cost less."""
    found = fit(2, "gloo", 0.1, [Point(k, b, k * b * 1e-9) for k, b in SHAPES])
    assert found.link.latency_s >= 0 and found.negotiation_message_s == 0


NETWORK = {"workers": 2, "controller": "gloo", "cycle_s": 0.001}
POINT = {"tensors": 1, "size_bytes": 4, "seconds": 0.1}
BAD_NETWORKS: dict[str, tuple[dict[str, object], str]] = {
    "one worker": ({"workers": 1}, "workers=1: a whole number of at least 2"),
    "no controller": ({"controller": 3}, "controller: a text"),
    "no cycle": ({"cycle_s": -1}, "cycle_s=-1: seconds"),
    "few points": ({"points": [POINT] * 3}, "points: a list of at least 4"),
    "no point": ({"points": [POINT, 3, POINT, POINT]}, "points[1]: an object such as"),
    "no time": ({"points": [POINT | {"seconds": 0}] * 4}, "points[0]: whole numbers"),
    "all alike": ({"points": [POINT | {"seconds": 1 / b} | {"size_bytes": b} for b in (1, 2, 3, 4)]}
                  , "do not grow"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_NETWORKS)
def test_bad_networks(kind: str, tmp_path: Path) -> None:
    """Fails when such a file is taken, or breaks with a traceback."""
    change, expected = BAD_NETWORKS[kind]
    points = [vars(point) for point in timed(0.001, Link(1e-5, 1e9))]
    with pytest.raises(UsageError) as caught:
        read_network(write(tmp_path, NETWORK | {"points": points} | change))
    assert expected in str(caught.value) and "--network=" in str(caught.value)


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
    layers = build_layers("lenet", "synthetic:1x28x28", ".", "float32")
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
    first's, or steps that warm up count.
    """
    found = measure_profile(work_spec(dtype="float32", steps=WARM_UP_STEPS + 4))
    assert [g.name for g in found.gradients][-2:] in (
        ["conv1.weight", "conv1.bias"],
        ["conv1.bias", "conv1.weight"],
    )
    assert found.gradient_bytes == 4 * 129_068 and len(found.gradients) == 8
    assert all(0 < g.ready_s <= 1.5 * found.backward_s for g in found.gradients)
    assert len(found.step_times_s) == 4 and found.batch_size == 5
    assert 0 < found.forward_s < max(found.step_times_s)


def run_plan(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["hvdtrain", "plan", *arguments])
    monkeypatch.setattr("hvdtrain.cli.plan.StopRequests", lambda: None)
    return main()


def test_golden_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails when a figure or its place changes; columns are held to the JSON beside it."""
    write_profile(PROFILE, tmp_path / "profile")
    file = tmp_path / "plan.json"
    inside = ("--intra-latency-us=5", "--intra-bandwidth-gbit-s=64", "--max-workers=6")
    places = (f"--profile={tmp_path / 'profile'}", f"--json={file}", f"--output={tmp_path}")
    assert run_plan(monkeypatch, *GIVEN, *inside, *places) == 0
    told = capsys.readouterr().out
    assert told.startswith(GOLDEN)
    rows = [line.split() for line in told.splitlines() if line.lstrip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["1", "2", "4", "6"]
    content = json.loads(file.read_text())
    for place, prediction in enumerate(content["predictions"]):
        row = rows[place // len(METHODS)]
        cells = row[1 + 2 * (place % len(METHODS)) :][:2]
        assert cells == [
            f"{1000 * prediction['step_s']:.2f}",
            f"{prediction['efficiency']:.3f}",
        ]
    # By hand, in ms: of two workers the slower takes 32/31.333 as long: 31.660, of which backward
    # 20.426. The last gradient is ready then, travels from the wake-up at 21 on, for 0.01 of
    # agreement and 2 (0.005 + 0.0625), and so ends 0.720 after the backward pass.
    assert rows[1][1:3] == ["32.38", "0.957"]
    assert content["network"] is None and content["profile"]["name"] == PROFILE.name
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert f"written to {tmp_path / 'scaling.png'}" in told


def test_bad_files_end_with_2_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails when workers are started although the profile or the network is bad."""

    def never(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr("hvdtrain.cli.plan.measure_network", never)
    monkeypatch.setattr("hvdtrain.cli.plan.measure_profile", never)
    path = write(tmp_path, {"name": 3})
    assert run_plan(monkeypatch, f"--profile={path}", f"--output={tmp_path}") == 2
    assert run_plan(monkeypatch, f"--network={path}", f"--output={tmp_path}") == 2
    assert "gradients: a list" in capsys.readouterr().err


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
    setting = Setting(PROFILE, Cluster(Link(1e-4, 1e8), Link(1e-5, 1e9), 4), Queue())
    counts = [1, 2, 4, 8, 16]
    predictions = predict_all(setting, counts)
    useful = {method: largest_useful(setting, method, 16, 0.5) for method in METHODS}
    figure = draw_plot(predictions, useful, 0.5, PROFILE).figure
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
    assert to_png(figure).startswith(b"\x89PNG")
