"""launch/mpijob.yaml as the MPI Operator uses it: its launcher, its workers and their hostfile."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from hvdtrain.cli import make_parser
from hvdtrain.cli.launch import read_launch
from hvdtrain.launcher.sites import hosts_of_site
from tests.unit.cli.test_kubernetes import MPIJOB, ROLES, Objects, container_of


@pytest.fixture
def recipe() -> Objects:
    return list(yaml.safe_load_all(MPIJOB.read_text("utf-8")))


def test_launcher_and_worker_fit(recipe: Objects, tmp_path: Path) -> None:
    """Fails when the launcher's shell script does not run, does not trust the job's own key, or
    connects to another port than the workers' sshd listens on.
    """
    launcher, worker = (container_of(recipe, role) for role in ROLES)
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "id_rsa").write_text("private\n")
    (keys / "id_rsa.pub").write_text("ecdsa public\n")
    fake = tmp_path / "hvdtrain"
    fake.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/arguments\n')
    fake.chmod(0o755)
    mount = recipe[-1]["spec"]["sshAuthMountPath"]
    script, *words = launcher["args"]
    assert mount in script
    subprocess.run(
        [*launcher["command"], script.replace(mount, str(keys)), *words],
        env={"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        check=True,
    )
    assert (tmp_path / ".ssh/known_hosts").read_text() == "* ecdsa public\n"
    assert (tmp_path / ".ssh/id_rsa").stat().st_mode & 0o777 == 0o600
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert ["hvdtrain", *arguments] == words[1:]
    assert not {"-H", "--hostfile", "-np"} & set(arguments), "the operator's hostfile is read"
    port = arguments[arguments.index("--ssh-port") + 1]
    assert worker["command"][0] == "/usr/sbin/sshd"
    assert {f"-oPort={port}", f"-oHostKey={mount}/id_rsa"} <= set(worker["args"])
    assert [entry["containerPort"] for entry in worker["ports"]] == [int(port)]
    assert int(port) > 1024


@pytest.mark.parametrize(
    "form",
    ["{name}-worker-{index}.{name}.{space}.svc slots={slots}", "{name}-worker-{index}:{slots}"]
    + ["{name}-worker-{index}.{name}-worker.{space}.svc slots={slots}"],
)
def test_hostfile(recipe: Objects, tmp_path: Path, monkeypatch, form: str) -> None:
    """Fails when the hostfile that the operator writes for this job gives other hosts, or launch
    refuses the flags that it gets in the pod.
    """
    job = recipe[-1]
    name, slots = job["metadata"]["name"], job["spec"]["slotsPerWorker"]
    replicas = job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
    written = [
        form.format(name=name, index=index, slots=slots, space="default")
        for index in range(replicas)
    ]
    (tmp_path / "hostfile").write_text("".join(f"{line}\n" for line in written))
    hosts = hosts_of_site({}, tmp_path / "hostfile")
    assert [host.slots for host in hosts] == [slots] * replicas
    assert [host.name for host in hosts] == [re.split("[ :]", line)[0] for line in written]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hvdtrain.cli.flags.hosts_of_site", lambda environment: hosts)
    words = container_of(recipe, "Launcher")["args"][3:]
    arguments, unknown = make_parser().parse_known_args(words)
    launch = read_launch(vars(arguments), arguments.explain(unknown))
    assert (launch.plan.workers, launch.plan.hosts) == (slots * replicas, hosts)
