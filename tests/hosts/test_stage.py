"""`hvdtrain stage` to hosts with disks of their own, and a job that starts from the copies."""

from __future__ import annotations

import os
import sys
import sysconfig
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


@pytest.mark.timeout(300)
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
    print(done.output)
    assert done.exit_code == 0, done.output
    assert done.seconds > 2.5, "the slow host has 1 MB/s"
    assert scene.on(2, "data").read_bytes() == (scene.job / "data").read_bytes()
    assert scene.on(2, "a link").readlink() == Path("data")
    assert not scene.on(2, "runs").exists()
    launch = ("launch", "-np", "2", "-H", "beta,gamma", "--controller=gloo", "--", "python")
    ran = scene.run(*launch, "train.py")
    print(ran.output)
    assert ran.exit_code == 0, ran.output
    for host in ("beta", "gamma"):
        assert f"first {host} {scene.place}/env 3.0" in ran.output
    again = scene.stage()
    print(again.output)
    assert "beta, gamma, delta: unchanged" in again.output
    (scene.job / "helper.py").write_text("WORDS = 'third'\n")  # of the same size
    (scene.job / "data").unlink()
    changed = scene.stage()
    print(changed.output)
    assert "beta, gamma, delta: 1 file copied (0.0 MB)" in changed.output
    assert not scene.on(1, "data").exists()
    assert scene.on(1, "made/by-the-job").read_text() == "once more "
    assert "third beta" in scene.run(*launch, "train.py").output
    removed = scene.stage("--remove")
    print(removed.output)
    assert removed.exit_code == 0, removed.output
    assert not any(scene.cluster.path(3, scene.place).iterdir())
    left = [str(it.relative_to(scene.on(1))) for it in scene.on(1).rglob("*") if it.is_file()]
    assert sorted(left) == [".hvdtrain-staged.json", "made/by-the-job"]
    assert scene.on(0, "helper.py").exists()
