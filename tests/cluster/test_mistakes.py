"""The messages for common mistakes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launch.containers.cluster_keys import PORT
from tests.cluster.containers import Containers, docker, must

OWN_KEYS = "python /etc/hvdtrain/cluster_keys.py > /dev/null"
DOCTOR = "hvdtrain doctor --no-ring -H {host}:1"
OTHER_VERSION = """\
FROM {image}
USER root
RUN sed -i 's/^__version__ = .*/__version__ = "9.9.9"/' \\
    /opt/hvdtrain/lib/python3*/site-packages/hvdtrain/__init__.py
USER hvdtrain
"""


def outside(containers: Containers, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script in the cluster's network, without the cluster's keys."""
    network = f"{containers.name}_cluster"
    return docker(
        "run", "--rm", "--network", network, *options, containers.image, "sh", "-euc", script
    )


def test_wrong_key_is_refused_and_named(containers: Containers) -> None:
    """Fails when a host lets another key in, or doctor does not say what is wrong."""
    known = must(docker("exec", containers.hosts[0], "cat", ".ssh/known_hosts")).strip()
    doctor = DOCTOR.format(host=containers.hosts[1])
    script = f'{OWN_KEYS}; echo "$KNOWN" > .ssh/known_hosts; {doctor}'
    done = outside(containers, script, "--env", f"KNOWN={known}")
    assert done.returncode == 3, done.stdout
    assert f"{containers.hosts[1]}: the host accepts none of the keys offered" in done.stdout


def test_changed_host_key_is_refused_and_named(containers: Containers) -> None:
    """Fails when a host that shows another host key than the known one is trusted."""
    host = containers.hosts[1]
    another = f'echo "[{host}]:{PORT} $(cat .ssh/host_ed25519.pub)" > .ssh/known_hosts'
    done = outside(containers, f"{OWN_KEYS}; {another}; {DOCTOR.format(host=host)}")
    assert done.returncode == 3, done.stdout
    assert f"{host}: the host key has changed since it was stored" in done.stdout


@pytest.fixture
def other_version(containers: Containers, tmp_path: Path):
    """Yield the name of a fourth host, with another version of hvdtrain."""
    (tmp_path / "Dockerfile").write_text(OTHER_VERSION.format(image=containers.image))
    image = must(docker("build", "--quiet", str(tmp_path))).split()[-1]
    name = f"{containers.name}-odd"
    sshd = ["/usr/sbin/sshd", "-D", "-e", "-f", "/etc/hvdtrain/sshd_config"]
    place = ["--network", f"{containers.name}_cluster", "--volumes-from", containers.hosts[0]]
    try:
        must(docker("run", "--detach", "--name", name, *place, image, *sshd))
        yield name
    finally:
        docker("rm", "--force", name)
        docker("rmi", image)


def test_other_version_is_refused_before_the_start(
    containers: Containers, other_version: str
) -> None:
    """Fails when a job begins on hosts with different versions, or they are not named."""
    hosts = f"{containers.hosts[0]}:1,{other_version}:1"
    train = ["train", "--model", "lenet", "--data", "digits", "--experiment", "odd"]
    command = containers.beside("hvdtrain", "launch", "-H", hosts, "--", *train)
    done = docker(*command[1:])
    assert done.returncode == 3, done.stdout
    assert "9.9.9" in done.stdout and other_version in done.stdout
