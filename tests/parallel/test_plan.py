"""`hvdtrain plan` that measures for real: compute by itself, the network with two workers."""

from __future__ import annotations

import json
from pathlib import Path

from tests.parallel.launching import hvdtrain, run


def test_all_is_measured(tmp_path: Path) -> None:
    """Fails if a measurement breaks off, its figures are not those of the prediction, or a worker
    is left behind (`run` looks for them).
    """
    file, profile = tmp_path / "plan.json", tmp_path / "profile.json"
    flags = ["--model=lenet", "--data=synthetic:1x28x28", "--batch-size=8"]
    flags += ["--controller=mpi", "--max-workers=4", f"--save-profile={profile}"]
    flags += [f"--json={file}", f"--output={tmp_path / 'plot'}"]
    finished = run(hvdtrain("plan", *flags), timeout_s=150)
    assert finished.exit_code == 0, finished.output
    content = json.loads(file.read_text())
    network = content["network"]
    assert (network["workers"], network["controller"]) == (2, "mpi")
    assert network["link"] == content["cluster"]["between"] == content["cluster"]["inside"]
    assert network["link"]["bandwidth_bytes_per_s"] > 1e6
    assert content["profile"] == json.loads(profile.read_text())
    assert len(content["profile"]["step_times_s"]) == 30
    assert [p["workers"] for p in content["predictions"]] == [
        n for n in (1, 2, 4) for _ in range(4)
    ]
    assert "measured with 2 workers (mpi)" in finished.output
    assert (tmp_path / "plot" / "scaling.png").exists()
