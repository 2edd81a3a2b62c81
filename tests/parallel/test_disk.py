"""Real disks that fill or turn read-only under a run: reported, nothing lost, and the run can be
resumed.

Each is a small tmpfs of its own, mounted in a mount namespace, which needs no root where user
namespaces are allowed.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.parallel.experiments import summary_and_weights, train
from tests.parallel.launching import BIN, Finished, hvdtrain, run

FLAGS = ["--global-batch-size=64", "--max-steps=120", "--checkpoint-interval=5", "--resume=auto"]
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]

# $disk: where it is mounted; the arguments: one run of the training. Its exit code is printed.
FILLS = """
mount -t tmpfs -o size=4m none "$disk"
"$@"; echo "first: $?"
df --output=avail "$disk"
mount -o remount,size=200m "$disk"
"$@"; echo "second: $?"
"""
TURNS_READ_ONLY = """
mount -t tmpfs -o size=200m none "$disk"
kept="$disk/x/checkpoints"
(until test -e "$kept/last"; do sleep 0.02; done
 mount --bind "$kept" "$kept"; mount -o remount,bind,ro "$kept") &
"$@"; echo "first: $?"
wait
umount "$kept"
"$@"; echo "second: $?"
"""
RUINED = {
    "fills": (FILLS, "No space left on device", "gloo"),
    "turns read-only": (TURNS_READ_ONLY, "Read-only file system", "mpi"),
}


def on_a_small_disk(script: str, disk: Path, controller: str) -> Finished:
    disk.mkdir()
    command = hvdtrain("train", *FLAGS, f"--output={disk}", "--experiment=x")
    launcher = [str(BIN / "horovodrun"), "-np", "2", f"--{controller}"]
    script += 'cat "$disk/x/summary.json"; cat "$disk/x/checkpoints/last"'
    namespaced = [*NAMESPACE, "sh", "-c", script, "sh", *launcher, *command]
    return run(namespaced, variables={"disk": str(disk)})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the `params_sha256` of the run without a fault, the same on both controllers."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    finished = train(FLAGS, folder, 2, "gloo")
    assert finished.exit_code == 0, finished.output
    return str(summary_and_weights(folder)[0]["params_sha256"])


@pytest.mark.parametrize(("script", "reason", "controller"), RUINED.values(), ids=RUINED)
def test_a_disk_that_fails(
    script: str, reason: str, controller: str, undisturbed: str, tmp_path: Path
) -> None:
    """Fails on a hang, a traceback, a `last` that names a half-written checkpoint, or a resumed
    run that ends elsewhere than the undisturbed one.
    """
    allowed = subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True)
    if allowed.returncode != 0:
        pytest.skip(f"no mount namespaces here: {allowed.stderr.decode().strip()}")
    ruined = on_a_small_disk(script, tmp_path / "disk", controller)
    assert "first: 1" in ruined.output, ruined.output
    assert reason in ruined.output, ruined.output
    assert "hvdtrain/run/training.py" not in ruined.output, ruined.output  # a traceback
    assert "resume: continuing from" in ruined.output, ruined.output
    assert "second: 0" in ruined.output, ruined.output
    assert f'"params_sha256": "{undisturbed}"' in ruined.output, ruined.output
    assert ruined.output.rstrip().endswith("step-00000120"), ruined.output
    assert list((tmp_path / "disk").iterdir()) == []  # nothing was written beside the mounted disk
