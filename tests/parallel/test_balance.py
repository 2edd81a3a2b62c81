"""`--rank-weights auto`: a slow worker gets a smaller share, also after a resume."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tests.parallel.experiments import summary_and_weights, train

FLAGS = ["--model=tests.parallel.plugins:throttled", "--global-batch-size=60", "--lr=0.01"]
FLAGS += ["--max-steps=6", "--virtual-workers=6"]


def test_a_slow_worker_gets_a_smaller_share(tmp_path: Path) -> None:
    """Fails if speeds are not measured, or the weights are lost on a resume; or if what is learned
    depends on them.
    """
    auto = [*FLAGS, "--rank-weights=auto"]
    done = train([*auto, "--max-steps=3"], tmp_path / "auto", 2, "gloo")
    assert done.exit_code == 0, done.output
    found = re.search(r"rank weights: ([\d.,]+) \(measured\)", done.output)
    assert found, done.output
    fast, slow = map(float, found[1].split(","))
    assert fast == 1 and 0 < slow < 0.8  # about 1/10, on a machine that is otherwise idle
    config = yaml.safe_load((tmp_path / "auto" / "config.yaml").read_text())
    assert config["rank_weights"] == found[1]
    done = train([*auto, "--resume=auto"], tmp_path / "auto", 2, "gloo")
    assert (done.exit_code, f"rank weights: {found[1]} (as before)" in done.output) == (0, True)
    assert train(FLAGS, tmp_path / "equal", 1, "none").exit_code == 0
    hashes = {summary_and_weights(tmp_path / it)[0]["params_sha256"] for it in ("auto", "equal")}
    assert len(hashes) == 1
