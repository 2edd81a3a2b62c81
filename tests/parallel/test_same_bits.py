"""Virtual workers: a run that goes on at other numbers of workers, and faults that show."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.parallel.breakages import BREAKAGES
from tests.parallel.experiments import summary_and_weights, train
from tests.parallel.launching import horovodrun

# 100 samples in 12 shares: 8 or 9 each, which are others where 33 samples are cut in 4.
RUN = [
    "--model=tests.parallel.plugins:dropout_and_lazy_buffer",
    "--virtual-workers=12",
    "--lr=0.05",
]
RUN += ["--global-batch-size=100", "--seed=6"]


def test_a_run_that_goes_on_at_other_numbers_of_workers(tmp_path: Path) -> None:
    """Fails if the state of a virtual worker is lost, mixed up or made anew on another rank."""
    assert train([*RUN, "--max-steps=30"], tmp_path / "alone", 1, "none").exit_code == 0
    expected, _ = summary_and_weights(tmp_path / "alone")
    for size, controller, steps in (
        (3, "gloo", 9),
        (2, "mpi", 16),
        (1, "none", 21),
        (4, "mpi", 30),
    ):
        flags = [*RUN, f"--max-steps={steps}", "--resume=auto"]
        done = train(flags, tmp_path / "moved", size, controller)
        assert done.exit_code == 0, done.output
    summary, _ = summary_and_weights(tmp_path / "moved")
    assert (summary["world_size"], summary["resumed_from"]) == (4, 21)
    for key in ("params_sha256", "valid_loss", "samples_seen"):
        assert summary[key] == expected[key], key


def test_faults_change_what_is_learned(tmp_path: Path) -> None:
    """Fails if a hash does not show shares, random numbers, statistics or sums that depend on N."""
    flags = [*RUN, "--max-steps=6"]
    assert train(flags, tmp_path / "alone", 1, "none").exit_code == 0
    expected, _ = summary_and_weights(tmp_path / "alone")
    (tmp_path / "experiments.json").write_text(json.dumps(dict.fromkeys(BREAKAGES, flags)))
    command = [sys.executable, "-m", "tests.parallel.breakages", str(tmp_path)]
    done = horovodrun(3, "gloo", command, timeout_s=180)
    assert done.exit_code == 0, done.output
    # Ranks that do not agree on exponents end with different parameters each.
    differ = "exit code 1: parameters differ between ranks"
    assert (tmp_path / "exponents by rank.rank-0").read_text().startswith(differ)
    ended = [name for name in BREAKAGES if name != "exponents by rank"]
    hashes = {name: summary_and_weights(tmp_path / name)[0]["params_sha256"] for name in ended}
    same = [name for name, found in hashes.items() if found == expected["params_sha256"]]
    assert same == ["none"], hashes
