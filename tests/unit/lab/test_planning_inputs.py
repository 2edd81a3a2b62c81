"""What `hvdtrain plan` reads: flags, profiles, networks."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.cli import make_parser
from hvdtrain.cli.plan import check_flags
from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.lab.plan.predicting import Cluster, Link, ring
from hvdtrain.lab.plan.probe import Point, fit, read_network
from hvdtrain.lab.plan.profiles import read_profile
from hvdtrain.topology import Topology
from tests.unit.plans import PROFILE, write


def flags(*arguments: str) -> dict[str, Any]:
    """What these flags come to, once they are checked."""
    parsed, unknown = make_parser().parse_known_args(["plan", *arguments])
    check_flags(vars(parsed), parsed.explain(unknown), Topology())
    return vars(parsed)


BAD_FLAGS = {
    "--latency-us=-1 --bandwidth-gbit-s=1": "--latency-us=-1.0: must be from 0 to 1e+09",
    "--latency-us=nan --bandwidth-gbit-s=1": "--latency-us=nan: must be from 0 to 1e+09",
    "--latency-us=inf --bandwidth-gbit-s=1": "--latency-us=inf: must be from 0 to 1e+09",
    "--latency-us=1 --bandwidth-gbit-s=0": "--bandwidth-gbit-s=0.0: must be from 1e-09 to 1e+09",
    "--latency-us=1": "give both, or neither",
    "--bandwidth-gbit-s=1": "give both, or neither",
    "--latency-us=1 --bandwidth-gbit-s=1 --network=f": "--network: not allowed with",
    "--latency-us=1 --bandwidth-gbit-s=1e-300": "must be from 1e-09 to 1e+09",
    "--workers-per-host=0": "--workers-per-host=0: must be at least 1",
    "--workers-per-host=2 --intra-latency-us=1": "--intra-bandwidth-gbit-s: give both",
    "--intra-latency-us=1 --intra-bandwidth-gbit-s=1": "give --workers-per-host too",
    "--cores-per-host=0": "--cores-per-host=0: must be at least 1",
    "--step-time-s=0": "--step-time-s=0.0: must be from 1e-09 to 1e+09",
    "--batch-size=0": "--batch-size=0: must be above 0",
    "--max-workers=1": "--max-workers=1: must be from 2 to 1,048,576",
    "--max-workers=1048577": "--max-workers=1048577: must be from 2",
    "--min-efficiency=0": "--min-efficiency=0.0: must be above 0 and at most 1",
    "--min-efficiency=1.1": "--min-efficiency=1.1: must be above 0 and at most 1",
    "--profile=p --model=lenet": "--model: not allowed with --profile",
    "--profile=p --step-time-s=1": "--step-time-s: not allowed with --profile",
    "--profile=p --save-profile=q": "--save-profile: not allowed with --profile",
    "--json=no/such/folder/f": "there is no such folder",
    "--save-profile=no/such/folder/f": "there is no such folder",
    "--output=/dev/null": "is not a folder",
    "--controller=nccl": "--controller",
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
        flags(
            "--latency-us=-1", "--batch-size=0", "--max-workers=0", "--profile=p", "--data=d", "-x"
        )
    assert len(caught.value.problems) == 6


def test_it_is_run_once() -> None:
    """Fails when every worker of a job begins to plan, and to start workers."""
    parsed, unknown = make_parser().parse_known_args(["plan"])
    launched = Topology(rank=0, size=2, launched=True)
    with pytest.raises(UsageError, match="without a launcher"):
        check_flags(vars(parsed), parsed.explain(unknown), launched)


def test_a_profile_comes_back_as_it_was(tmp_path: Path) -> None:
    """Fails when a figure is lost on the way to the file and back."""
    assert read_profile(write(tmp_path, asdict(PROFILE))) == PROFILE


def test_a_profile_by_hand_need_not_be_in_order(tmp_path: Path) -> None:
    """Fails when gradients travel in the file's order, or spread and source must be there."""
    content = json.loads(json.dumps(asdict(PROFILE)))
    del content["step_times_s"], content["source"]
    content["gradients"].reverse()
    found = read_profile(write(tmp_path, content))
    assert found.gradients == PROFILE.gradients and found.step_times_s == ()


GRADIENT = {"name": "w", "size_bytes": 4, "ready_s": 0.01}
BAD_PROFILES: dict[str, tuple[object, str]] = {
    "no JSON": ("{", "is not JSON"),
    "a list": ([1], "a JSON object was expected"),
    "an unknown field": ({"speed": 3}, "speed: no such field"),
    "no name": ({"name": None}, "name=None: a string was expected"),
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
    "no gradients": ({"gradients": []}, "gradients: a list of at least 1"),
    "not a gradient": ({"gradients": [3]}, "gradients[0]: an object such as"),
    "too little of one": ({"gradients": [{"name": "w"}]}, "gradients[0]: an object such as"),
    "empty": ({"gradients": [GRADIENT | {"size_bytes": 0}]}, "gradients[0].size_bytes=0"),
    "huge": ({"gradients": [GRADIENT | {"size_bytes": 10**400}]}, "a whole number of at least 1"),
    "nameless": ({"gradients": [GRADIENT | {"name": 3}]}, "gradients[0].name=3: a string"),
    "too late": ({"gradients": [GRADIENT | {"ready_s": 1.0}]}, "must be from 0 to backward_s"),
    "too early": ({"gradients": [GRADIENT | {"ready_s": -1.0}]}, "gradients[0].ready_s=-1.0"),
}


@pytest.mark.parametrize("kind", BAD_PROFILES)
def test_bad_profiles(kind: str, tmp_path: Path) -> None:
    """Fails when such a file is taken, breaks with a traceback, or the place is not named."""
    content, expected = BAD_PROFILES[kind]
    if isinstance(content, dict):
        content = asdict(PROFILE) | content
    with pytest.raises(UsageError) as caught:
        read_profile(write(tmp_path, content))
    assert expected in str(caught.value) and "--profile=" in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Fails when a missing file, a folder or bytes end in a traceback."""
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name in ("absent", ".", "bytes"):
        with pytest.raises(UsageError, match="--profile="):
            read_profile(tmp_path / name)


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
    points = timed(agreement, Link(latency, bandwidth), workers)
    found = fit(workers, "gloo", 0.001, points)
    assert found.link.latency_s == pytest.approx(latency, rel=1e-4, abs=1e-8)
    assert found.link.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=1e-4)
    messages = 2 * math.ceil(math.log2(workers))
    assert found.negotiation_message_s == pytest.approx(agreement / messages, rel=1e-3)
    assert found.worst_residual < 1e-4


def test_a_fit_tolerates_noise_and_reports_it() -> None:
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
    "no controller": ({"controller": 3}, "controller=3: a string"),
    "no cycle": ({"cycle_s": -1}, "cycle_s=-1: seconds"),
    "few points": ({"points": [POINT] * 3}, "points: a list of at least 4"),
    "no point": ({"points": [POINT, 3, POINT, POINT]}, "points[1]: an object such as"),
    "no time": ({"points": [POINT | {"seconds": 0}] * 4}, "points[0].seconds=0: seconds above 0"),
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
