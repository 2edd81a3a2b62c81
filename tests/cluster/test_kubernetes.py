"""The pods that `hvdtrain launch --print-kubernetes` prints, as containers that have no more than
the manifest gives them: names, folders, user, capabilities and variables.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.cluster.containers import docker, must, run, wait_for

TRAIN = "train --model lenet --data digits --max-steps 4 --global-batch-size 50"
FINISHED = "finished: 1 epoch, 4 steps, 200 samples"
SECRET = secrets.token_hex(32)
START_S = 60.0
# What the operator gives each pod: keys for the job, and to the launcher a hostfile.
OPERATOR = """
cd /etc/mpi-ssh
ssh-keygen -q -t ecdsa -N '' -C '' -f id_rsa
cp id_rsa.pub authorized_keys
chgrp 1000 id_rsa
chmod 640 id_rsa
printf '%s\\n' "$@" > /etc/mpi/hostfile
"""
VOLUMES = {"job": "/job", "keys": "/etc/mpi-ssh", "config": "/etc/mpi"}


class Node:
    """A node that runs pods: a network, and volumes that all pods share."""

    def __init__(self, name: str, image: str) -> None:
        self.name, self.image = name, image
        self.pods: list[str] = []

    def start(self, pod: dict[str, Any], hostname: str, subdomain: str, given: list[str]) -> str:
        """Start a pod and return its container. `given`: volumes beside those of the manifest."""
        (container,) = pod["containers"]
        name = f"{self.name}-{hostname}"
        words = [*container.get("command", ()), *container["args"]]
        entry, words = (words[:1], words[1:]) if "command" in container else ([], words)
        argv = ["run", "--detach", "--name", name, "--hostname", hostname, "--read-only"]
        argv += ["--network", self.name, "--network-alias", f"{hostname}.{subdomain}"]
        argv += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        user = pod["securityContext"]
        argv += ["--user", f"{user['runAsUser']}:{user['runAsGroup']}"]
        argv += ["--workdir", container.get("workingDir", "/")]
        for each in container.get("env", []):
            argv += ["--env", f"{each['name']}={each.get('value', SECRET)}"]
        kinds = {volume["name"]: volume for volume in pod["volumes"]}
        for mount in container["volumeMounts"]:
            if "emptyDir" in kinds[mount["name"]]:
                argv += ["--tmpfs", f"{mount['mountPath']}:exec,uid=1000,gid=1000,mode=1777"]
            else:
                argv += ["--volume", f"{self.name}-{mount['name']}:{mount['mountPath']}:nocopy"]
        for volume in given:
            argv += ["--volume", f"{self.name}-{volume}:{VOLUMES[volume]}:ro"]
        argv += [part for word in entry for part in ("--entrypoint", word)]
        must(docker(*argv, self.image, *words))
        self.pods.append(name)
        return name

    def prepare(self, script: str, *words: str) -> None:
        """Run a script as root with all volumes; the claim belongs to the pods' user (fsGroup)."""
        mounts = [f"--volume={self.name}-{name}:{path}" for name, path in VOLUMES.items()]
        argv = ["run", "--rm", "--user=0", *mounts, "--entrypoint=/bin/sh", self.image]
        must(docker(*argv, "-euc", f"chown 1000:1000 /job\n{script}", "prepare", *words))


@pytest.fixture
def node(image: str) -> Iterator[Node]:
    """Yield a node, of which nothing is left."""
    node = Node(f"hvdtrain-pods-{os.getpid()}", image)
    must(docker("network", "create", "--internal", node.name))
    try:
        yield node
    finally:
        docker("rm", "--force", "--volumes", *node.pods)
        docker("network", "rm", node.name)
        docker("volume", "rm", *(f"{node.name}-{name}" for name in VOLUMES))


def printed(form: str, flags: str) -> list[dict[str, Any]]:
    """The objects that are printed."""
    words = f"launch --print-kubernetes {form} --image hvdtrain {flags} -- {TRAIN}".split()
    environment = [f"--unset={name}" for name in os.environ if name.startswith(("OMP_", "HOROVOD"))]
    program = [sys.executable, "-m", "hvdtrain.cli", *words]
    return list(yaml.safe_load_all(must(run(["env", *environment, *program]))))


def assert_finished(pods: list[str], launcher: str) -> None:
    """Wait until the pods have ended; the launcher's must have trained."""
    codes = [must(docker("wait", pod)).strip() for pod in pods]
    output = docker("logs", launcher).stdout
    assert (set(codes), FINISHED in output) == ({"0"}, True), output


@pytest.mark.parametrize("flags", ["-np 2", "--nnodes 2"])
def test_an_indexed_job_trains(node: Node, flags: str) -> None:
    """Fails when the pods of a Job do not find one another, or need more than they have."""
    spec = printed("job", flags)[-1]["spec"]
    pod = spec["template"]["spec"]
    name = pod["subdomain"]
    node.prepare("")
    for index in range(spec["completions"]):  # as Kubernetes numbers them
        number = {"name": "JOB_COMPLETION_INDEX", "value": str(index)}
        (container,) = pod["containers"]
        numbered = {**container, "env": [*container["env"], number]}
        node.start({**pod, "containers": [numbered]}, f"{name}-{index}", name, [])
    assert_finished(node.pods, node.pods[0])


def test_an_mpijob_trains(node: Node) -> None:
    """Fails when launcher and workers do not reach one another over SSH as the operator sets it
    up, or need more than they have.
    """
    job = printed("mpijob", "--nnodes 2")[-1]
    name, spec = job["metadata"]["name"], job["spec"]
    roles = {role: each["template"]["spec"] for role, each in spec["mpiReplicaSpecs"].items()}
    names = [f"{name}-worker-{index}" for index in (0, 1)]
    slots = f"slots={spec['slotsPerWorker']}"
    node.prepare(OPERATOR, *(f"{each}.{name}.default.svc {slots}" for each in names))
    for each in names:
        worker = node.start(roles["Worker"], each, f"{name}.default.svc", ["keys"])
        wait_for(
            lambda: re.search("Server listening", docker("logs", worker).stdout),  # noqa: B023
            START_S,
            lambda: docker("logs", worker).stdout,  # noqa: B023
        )
    launcher = node.start(roles["Launcher"], f"{name}-launcher", name, ["keys", "config"])
    assert_finished([launcher], launcher)
