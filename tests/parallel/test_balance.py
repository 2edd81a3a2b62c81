"""`--rank-weights auto`: a slow worker gets a smaller share, at the start and later."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from tests.parallel.experiments import summary_and_weights, train
from tests.parallel.plugins import BUSY

THROTTLED = ["--model=tests.parallel.plugins:throttled", "--global-batch-size=60", "--lr=0.01"]
# 1,433 samples: the last batch of an epoch has 33, in shares of 5 or 6.
BUSY_AT_TIMES = ["--model=tests.parallel.plugins:busy_at_times", "--virtual-workers=6", "--seed=6"]
BUSY_AT_TIMES += ["--global-batch-size=100", "--lr=0.05", "--log-interval=5", "--trace-every=7"]
CHECKS = ["--audit-every=3", "--audit=exact", "--audit-compute=4", "--rank-weights=auto"]
MEASURED = 21  # passes of a worker before the first step: 7 times 3


def test_a_slow_worker_gets_a_smaller_share(tmp_path: Path) -> None:
    """Fails if speeds are not measured, or the weights, on which rounding depends, change on a
    resume.
    """
    auto = [*THROTTLED, "--rank-weights=auto"]
    done = train([*auto, "--max-steps=3"], tmp_path / "auto", 2, "gloo")
    assert done.exit_code == 0, done.output
    found = re.search(r"rank weights: ([\d.,]+) \(measured\)", done.output)
    assert found, done.output
    fast, slow = map(float, found[1].split(","))
    assert fast == 1 and 0 < slow < 0.8  # about 1/10, on a machine that is otherwise idle
    config = yaml.safe_load((tmp_path / "auto" / "config.yaml").read_text())
    assert config["rank_weights"] == found[1]
    done = train([*auto, "--max-steps=6", "--resume=auto"], tmp_path / "auto", 2, "gloo")
    assert (done.exit_code, f"rank weights: {found[1]} (as before)" in done.output) == (0, True)
    assert "virtual workers move" not in done.output


def test_virtual_workers_leave_a_busy_worker_and_come_back(tmp_path: Path) -> None:
    """Fails if they do not follow the speeds; or if what is learned depends on a move, before or
    after a resume, or a step that is audited or traced does.
    """
    counts: list[list[int]] = []
    for busy, steps in ((f"0:{MEASURED + 12}", 50), (f"{MEASURED + 9}:9999", 90)):
        flags = [*BUSY_AT_TIMES, *CHECKS, f"--max-steps={steps}", "--resume=auto"]
        done = train(flags, tmp_path / "moved", 2, "gloo", variables={BUSY: busy})
        assert done.exit_code == 0, done.output
        first = re.search(r"\(measured\), virtual workers by rank: (\d)", done.output)
        assert first, done.output
        moves = re.findall(r"virtual workers move: rank 0 (\d) -> (\d), rank 1", done.output)
        assert all(old != new for old, new in moves), moves
        counts.append([int(first[1]), *(int(new) for _, new in moves)])
    # Away from the worker that was busy when the run began; towards the one that is busy later.
    (before, *_, back), (*_, away) = counts
    assert before > back < away, counts
    assert train([*BUSY_AT_TIMES, "--max-steps=90"], tmp_path / "alone", 1, "none").exit_code == 0
    (moved, _), (alone, _) = (summary_and_weights(tmp_path / it) for it in ("moved", "alone"))
    for key in ("params_sha256", "valid_loss", "samples_seen"):
        assert moved[key] == alone[key], key
    assert (moved["audit"]["checked"], moved["audit"]["failed"]) == (30, 0)
    assert (moved["compute_audit"]["checked"], moved["compute_audit"]["failed"]) == (22, 0)
    texts = [(tmp_path / it / "trace.jsonl").read_text().splitlines() for it in ("moved", "alone")]
    traces = [{r["step"]: r for r in map(json.loads, lines) if "step" in r} for lines in texts]
    assert {7, 49, 63, 84} <= traces[0].keys() & traces[1].keys()
    for step in traces[0].keys() & traces[1].keys():
        for key in ("samples", "batches", "gradients", "reduced", "parameters"):
            assert traces[0][step][key] == traces[1][step][key], (step, key)
