"""`hvdtrain stage` to hosts with disks of their own, and a job that starts from the copies."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import time
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.namespaces import Cluster
from tests.parallel.launching import BIN, Finished

MIB = 1 << 20
SCRIPT = """\
import os, sys
import horovod.torch as hvd
import torch
from helper import WORDS
hvd.init()
total = hvd.allreduce(torch.tensor([1.0 + hvd.rank()]), op=hvd.Sum).item()
print(f"{WORDS} {os.uname().nodename} {sys.prefix} {total}", flush=True)
os.makedirs("made", exist_ok=True)
open("made/by-the-job", "a").write("once more ")
"""


def make_environment(folder: Path) -> None:
    """Make a small virtual environment that imports the packages of this one."""
    venv.EnvBuilder(symlinks=True).create(folder)
    packages = Path(sysconfig.get_path("purelib"))
    own = folder / packages.relative_to(sys.prefix)
    (own / "packages.pth").write_text(f"{packages}\n")
    for name in ("hvdtrain", "horovodrun"):
        text = (BIN / name).read_text().replace(str(BIN), str(folder / "bin"))
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)


class Scene:
    """Four hosts: alpha, where the commands run, and three with empty disks at `place`."""

    def __init__(self, make_cluster: Callable[..., Cluster], place: Path, full_mib: int = 64):
        self.place, self.job = place, place / "work" / "job"
        make_environment(place / "env")
        self.job.mkdir(parents=True)
        (self.job / "train.py").write_text(SCRIPT)
        (self.job / "helper.py").write_text("WORDS = 'first'\n")
        (self.job / "data").write_bytes(os.urandom(3 * MIB))
        (self.job / "a link").symlink_to("data")
        (self.job / "runs").mkdir()
        (self.job / "runs" / "large").write_bytes(os.urandom(MIB))
        self.cluster = make_cluster([1, 1, 1, 1])
        for host, mib in ((1, 64), (2, 64), (3, full_mib)):
            self.cluster.make_private(host, place, mib)

    def run(self, *arguments: str, timeout_s: float = 100) -> Finished:
        command = [str(self.place / "env" / "bin" / "hvdtrain"), *arguments]
        return self.cluster.run(command, cwd=self.job, timeout_s=timeout_s)

    def stage(self, *arguments: str, hosts: str = "alpha,beta,gamma,delta") -> Finished:
        return self.run("stage", "-H", hosts, *arguments)

    def on(self, host: int, name: str = "") -> Path:
        """Return a path in the job's folder of a host, as seen from here."""
        return self.cluster.path(host, self.job / name)

    def names(self, host: int) -> list[str]:
        """Return what is at `place` on a host, hidden names included."""
        return sorted(it.name for it in self.cluster.path(host, self.place).iterdir())


@pytest.mark.timeout(600)
def test_a_job_starts_from_what_was_staged(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """Fails if a host lacks something that a job needs, if an unchanged host is copied to again,
    if a change is not brought, if what jobs have made is lost by it, or if `--remove` leaves
    something of ours or removes something of others.
    """
    scene = Scene(make_cluster, tmp_path / "place")
    scene.cluster.shape(8e6, [2])
    done = scene.stage()
    assert done.exit_code == 0, done.output
    assert done.seconds > 2.5, "the slow host has 1 MB/s"
    assert scene.on(2, "data").read_bytes() == (scene.job / "data").read_bytes()
    assert scene.on(2, "a link").readlink() == Path("data")
    assert not scene.on(2, "runs").exists()
    launch = ("launch", "-np", "2", "-H", "beta,gamma", "--controller=gloo", "--", "python")
    ran = scene.run(*launch, "train.py")
    assert ran.exit_code == 0, ran.output
    for host in ("beta", "gamma"):
        assert f"first {host} {scene.place}/env 3.0" in ran.output
    again = scene.stage()
    assert "beta, gamma, delta: unchanged" in again.output
    (scene.job / "helper.py").write_text("WORDS = 'third'\n")  # of the same size
    (scene.job / "data").unlink()
    changed = scene.stage()
    assert "beta, gamma, delta: 1 file copied (0.0 MB)" in changed.output
    assert not scene.on(1, "data").exists()
    assert scene.on(1, "made/by-the-job").read_text() == "once more "
    assert "third beta" in scene.run(*launch, "train.py").output
    removed = scene.stage("--remove")
    assert removed.exit_code == 0, removed.output
    assert scene.names(3) == []
    left = [str(it.relative_to(scene.on(1))) for it in scene.on(1).rglob("*") if it.is_file()]
    assert sorted(left) == [".hvdtrain-staged.json", "made/by-the-job"]
    assert scene.on(0, "helper.py").exists()


@pytest.mark.timeout(120)
def test_hosts_that_cannot_take_it_are_named_before_anything_is_copied(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """Fails if a full disk, a missing Python or a folder of others is found only while copying, if
    one of them hides another, or if a host is changed although another one was refused.
    """
    scene = Scene(make_cluster, tmp_path / "place", full_mib=2)
    done = scene.stage(hosts="gamma,delta")
    assert done.exit_code == 3, done.output
    found = re.search(r"delta: .*: ([0-9,]+) bytes are needed, and ([0-9,]+) are free", done.output)
    assert found, done.output
    needed, free = (int(number.replace(",", "")) for number in found.groups())
    assert free <= 2 * MIB < 3 * MIB < needed < 5 * MIB
    assert (scene.names(2), scene.names(3)) == ([], [])
    scene.on(1).mkdir(parents=True)
    scene.on(1, "own work").write_text("precious")
    python = sys._base_executable  # type: ignore[attr-defined]
    scene.cluster._nodes[2].tool(["mount"], "mount", "--bind", os.devnull, python)
    done = scene.stage()
    assert done.exit_code == 3, done.output
    assert f"beta: {scene.job} exists, and was not brought by hvdtrain stage" in done.output
    assert f"gamma: there is no {python}, which this environment needs" in done.output
    assert (scene.names(1), scene.names(3)) == (["work"], [])
    assert scene.on(1, "own work").read_text() == "precious"


@pytest.mark.timeout(120)
def test_an_interrupted_copy_leaves_the_old_one(
    make_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """Fails if a launcher that is killed in the middle leaves a mixture, half files, or processes;
    or if a later command does not complete the work.
    """
    scene = Scene(make_cluster, tmp_path / "place")
    assert scene.stage(hosts="beta").exit_code == 0
    scene.cluster.shape(8e6, [1])
    for name, text in (("helper.py", "new"), ("added", "new"), ("data", "new" * MIB)):
        (scene.job / name).write_text(text)
    before = scene.cluster.processes()
    command = [str(scene.place / "env" / "bin" / "hvdtrain"), "stage", "-H", "beta"]
    process = scene.cluster.start(command, cwd=scene.job)
    beside = scene.on(1).parent / ".hvdtrain-job"
    deadline = time.monotonic() + 30
    while not (beside / "data").exists():
        assert time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    scene.cluster.kill(process)
    process.communicate()
    assert not scene.cluster.wait_until_gone(before)
    assert not beside.exists()
    assert scene.on(1, "helper.py").read_text() == "WORDS = 'first'\n"
    assert not scene.on(1, "added").exists()
    assert "beta: 3 files copied" in scene.stage(hosts="beta").output
    assert scene.on(1, "helper.py").read_text() == "new"
