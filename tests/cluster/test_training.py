"""Training on three containers over SSH: correct, repeatable, and resumed after failures."""

from __future__ import annotations

import re

import pytest

from launch.containers.engine import launcher_label
from tests.cluster.containers import HOSTFILE, RUNS, Containers, docker, must, run, start
from tests.hosts.trials import END_S, Lines

TRAIN = ["train", "--model", "lenet", "--data", "digits", "--dtype", "float64", "--seed", "3"]
TRAIN += ["--global-batch-size", "64", "--max-steps", "8", "--audit-every", "2", "-j", "0"]
FARTHEST = """\
import glob, sys
from safetensors.numpy import load_file
one, other = (load_file(glob.glob(f"{run}/checkpoints/step-*/model.safetensors")[0])
              for run in sys.argv[1:])
assert one.keys() == other.keys() and all(t.dtype == "float64" for t in one.values())
print(max(abs(one[n] - other[n]).max() / abs(one[n]).max() for n in one))
"""
EXCHANGE = """\
from mpi4py import MPI
import numpy as np
rank, numbers = MPI.COMM_WORLD.rank, np.arange(1 << 20, dtype=float)
found = np.empty_like(numbers)
MPI.COMM_WORLD.Sendrecv(numbers + rank, 1 - rank, 0, found, 1 - rank, 0)
print("right\\n" if (found == numbers + 1 - rank).all() else "wrong\\n", end="")
"""
RIGHTS = {"CapInh": 0, "CapPrm": 0, "CapEff": 0, "CapBnd": 1 << 19, "CapAmb": 0, "NoNewPrivs": 1}


@pytest.fixture(scope="module")
def alone(containers: Containers) -> str:
    """Train with the same global batch in one container, without Horovod; return its name."""
    must(run(containers.beside("hvdtrain", *TRAIN, "--experiment", "alone")))
    return "alone"


@pytest.mark.parametrize(
    ("controller", "ways"), [("gloo", ["launch"]), ("mpi", ["plain", "launch"])]
)
def test_learns_what_one_container_learns(
    containers: Containers, alone: str, controller: str, ways: list[str]
) -> None:
    """By plain horovodrun from the hostfile, and by launch. Fails when gradients are wrong over
    SSH, a host takes no part, or the two starts differ in a bit.
    """
    plain = ["horovodrun", "-np", "3", "-hostfile", HOSTFILE, f"--{controller}", "hvdtrain"]
    launch = ["hvdtrain", "launch", "-np", "3", "--controller", controller, "--"]
    starts = {"plain": plain, "launch": launch}
    hashes = set()
    for how in ways:
        experiment = f"{how}-{controller}"
        must(run(containers.beside(*starts[how], *TRAIN, "--experiment", experiment)))
        summary = containers.summary(experiment)
        assert (summary["world_size"], summary["controller"]) == (3, controller)
        assert summary["audit"]["checked"] == 4 and summary["audit"]["failed"] == 0
        hashes.add(summary["params_sha256"])
    assert len(hashes) == 1, "params_sha256 does not repeat"
    runs = [f"{RUNS}/{alone}", f"{RUNS}/launch-{controller}"]
    farthest = must(docker("exec", containers.hosts[0], "python", "-c", FARTHEST, *runs))
    assert float(farthest) < 1e-9


def test_no_process_holds_a_capability(containers: Containers) -> None:
    """Fails when sshd, or what starts beside the hosts, has a capability, may get one but
    CAP_SYS_PTRACE (bit 19), or may gain rights from a setuid program.
    """
    show = ["sh", "-c", "cat /proc/[0-9]*/status"]
    on_host = must(docker("exec", containers.hosts[0], *show))
    for text in (on_host, must(run(containers.beside(*show)))):
        found = re.findall(r"^(Cap\w+|NoNewPrivs):\t(\w+)$", text, re.MULTILINE)
        assert {name: int(value, 16) for name, value in found} == RIGHTS
        assert len(set(found)) == len(RIGHTS), "processes differ"


def test_copies_between_processes_of_a_host(containers: Containers) -> None:
    """Fails when the engine forbids the system call that Open MPI is configured to copy by: then it
    prints "Read -1, expected ..., errno = 1" and takes a slower way.
    """
    mpirun = ["mpirun", "-np", "2", "--oversubscribe", "python", "-c", EXCHANGE]
    assert must(run(containers.beside(*mpirun))).split() == ["right", "right"]


def test_goes_on_after_a_host_is_killed(containers: Containers) -> None:
    """Fails when a dead host, whose name is gone, ends the job for good, or steps are lost.

    tests/hosts has those that lose their network.
    """
    launch = ["hvdtrain", "launch", "-np", "3", "--min-np", "1", "--restarts", "3"]
    train = ["train", "--model", "lenet", "--data", "digits", "--max-steps", "150", "-j", "0"]
    train += ["--global-batch-size", "64", "--checkpoint-interval", "10", "--experiment", "faults"]
    command = containers.beside(*launch, "--start-timeout-s", "60", "--", *train)
    third = containers.hosts[2]
    with start(command) as process:
        lines = Lines(process)
        try:
            lines.wait_for("step 20/", END_S)
            must(docker("kill", third))
            assert lines.wait(END_S) == 0, lines.text
        finally:
            process.kill()
            docker("start", third)
            which = f"label={launcher_label(containers.name)}"
            for left in docker("ps", "--quiet", "--filter", which).stdout.split():
                docker("rm", "--force", left)
    summary = containers.summary("faults")
    assert (summary["status"], summary["steps"], summary["world_size"]) == ("finished", 150, 2)
