"""`hvdtrain bench network` on real hosts with real links."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from hvdtrain.lab.bench.contestants import LIMIT
from hvdtrain.lab.bench.network import CONTESTANTS, GLOO, MPI
from hvdtrain.lab.hosts.network import why_not
from tests.parallel.launching import hvdtrain, run

_why_not = functools.cache(why_not)


@pytest.mark.timeout(600)
def test_bench_network(tmp_path: Path) -> None:
    """Fails if a contestant does not run over hosts, the links are not as slow as they are to be,
    or anything is left behind.
    """
    if reason := _why_not():
        pytest.skip(reason)
    target = tmp_path / "network.json"
    flags = ["--models=mlp", "--batch-size=4", "--rounds=1", "--turn-s=0.1", "--gbit=0.5"]
    finished = run(hvdtrain("bench", "network", *flags, f"--json={target}"), timeout_s=280)
    assert finished.exit_code == 0, finished.output
    (point,) = json.loads(target.read_text())["points"]
    assert set(point["step_ms"]) == set(CONTESTANTS)
    assert point["alone_ms"] == pytest.approx(23.2e6 * 8 / 0.5e9 * 1000, rel=0.01)
    for name in {*CONTESTANTS} - {LIMIT}:  # the links pass a burst at once
        assert point["step_ms"][name] > 0.8 * point["alone_ms"], point
    assert all(point["over_ddp"][name]["median"] > 0 for name in (GLOO, MPI))
