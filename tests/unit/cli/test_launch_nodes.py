"""When `hvdtrain launch` is one node of several: its flags, and the variables of batch systems."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.cli import make_parser
from hvdtrain.cli.nodes import find_job_hosts, read_rendezvous
from hvdtrain.errors import UsageError
from hvdtrain.launcher.nodes import SECRET, Rendezvous

TOKEN = "a-secret-of-the-nodes"
# As Kubeflow sets them: PyTorchJob, and TrainJob with its runtime for torch.
PYTORCH_JOB = {
    "WORLD_SIZE": "3",
    "RANK": "2",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
}
TRAIN_JOB = {
    "PET_NNODES": "3",
    "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "2",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
}
# As srun sets them in a step of one task on each of three hosts.
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[08-10]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}
FLAGS = "--nnodes=3 --rendezvous=job-master-0:23456"


def parse(flags: str) -> dict[str, object]:
    return vars(make_parser().parse_args(["launch", *shlex.split(flags), "--", "train"]))


def read(flags: str, **environment: str) -> Rendezvous | None:
    return read_rendezvous(parse(flags), ["train"], {SECRET: TOKEN, **environment})


@pytest.mark.parametrize(
    ("flags", "environment", "slots"),
    [
        (f"{FLAGS} --node-rank=2", {}, 1),
        (f"{FLAGS} --node-rank=2 -np 6", {}, 2),
        (f"{FLAGS} --node-rank=2 --nproc-per-node=4", TRAIN_JOB, 4),
        (FLAGS, {"JOB_COMPLETION_INDEX": "2"}, 1),
        ("", PYTORCH_JOB, 1),
        ("", TRAIN_JOB, 2),
        ("", {**TRAIN_JOB, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "9"}, 2),
        ("", {**TRAIN_JOB, "PET_NNODES": "3:3"}, 2),
        (FLAGS, {**PYTORCH_JOB, "MASTER_ADDR": "elsewhere"}, 1),
        (FLAGS, {"JOB_COMPLETION_INDEX": "2", "PET_NPROC_PER_NODE": "1"}, 1),
    ],
)
def test_a_node_is_what_flags_then_variables_say(
    flags: str, environment: dict[str, str], slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a value is not read, if a variable has precedence over a flag, or a variable that
    torchrun sets in a worker is taken for one of a node.
    """
    monkeypatch.setattr("hvdtrain.cli.nodes.GPUS", "no such device")
    node = read(flags, **environment)
    assert node == Rendezvous(3, 2, "job-master-0", 23456, TOKEN, slots, ("train",))


def test_a_step_of_slurm_makes_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if launchers that srun starts, one on each host, do not meet; if several on a host, or
    hosts by flags, are taken for nodes; or if a secret is required where the home is shared.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("hvdtrain.cli.nodes.GPUS", "no such device")
    nodes = [
        read_rendezvous(parse("--nproc-per-node=2"), ["train"], STEP | {"SLURM_PROCID": rank})
        for rank in ("0", "1")
    ]
    assert nodes[0] is not None and nodes[1] == replace(nodes[0], rank=1)
    assert (nodes[0].nodes, nodes[0].host, nodes[0].slots) == (3, "gpu08", 2)
    assert 20_000 <= nodes[0].port < 30_000
    with_gpus = read_rendezvous(parse(""), [], STEP | {"SLURM_GPUS_ON_NODE": "4"})
    assert with_gpus is not None and with_gpus.slots == 4
    assert read_rendezvous(parse("-H a:2"), [], STEP) is None
    with pytest.raises(UsageError, match="copies of the launcher on 2 hosts: one on each"):
        read_rendezvous(parse(""), [], STEP | {"SLURM_STEP_NUM_NODES": "2"})


@pytest.mark.parametrize(
    ("flags", "environment"),
    [
        ("-np 2", {}),
        ("-np 2", {"JOB_COMPLETION_INDEX": "1"}),
        ("-np 2", {**PYTORCH_JOB, "LOCAL_RANK": "0"}),
        ("-np 2", {**PYTORCH_JOB, "WORLD_SIZE": "1", "RANK": "0"}),
        ("-np 2", {"MASTER_ADDR": "alpha", "MASTER_PORT": "29500"}),
        ("-np 2", {"MASTER_ADDR": "a", "MASTER_PORT": "9", "PET_NNODES": "2"}),
        ("-np 2 -H localhost:2", TRAIN_JOB),
        ("--hostfile hosts", PYTORCH_JOB),
        ("-np 2", {**PYTORCH_JOB, "SLURM_JOB_NODELIST": "gpu[1-2]"}),
        (
            "-np 2",
            {"JOB_COMPLETION_INDEX": "1", "PET_NNODES": "2"}
            | {"MASTER_ADDR": "a", "MASTER_PORT": "9"},
        ),
    ],
)
def test_a_plain_launch_is_never_a_node(flags: str, environment: dict[str, str]) -> None:
    """Fails if variables alone make a node of a launch for which they do not name number, rank and
    address, or that has hosts by flags or of Slurm.
    """
    assert read(flags, **environment) is None


@pytest.mark.parametrize(
    ("flags", "environment", "problem"),
    [
        ("--nnodes=3 --rendezvous=a:1", {}, "--node-rank: is missing"),
        (f"{FLAGS} --node-rank=3", {}, "--node-rank=3: must be a whole number from 0 to 2"),
        (FLAGS, {"JOB_COMPLETION_INDEX": "x"}, "JOB_COMPLETION_INDEX=x: must be a whole number"),
        ("--nnodes=3 --node-rank=0", {}, "--rendezvous: is missing"),
        ("--nnodes=3 --node-rank=0 --rendezvous=a", {}, "--rendezvous: must end with a port"),
        ("--nnodes=3 --node-rank=0 --rendezvous=a:0", {}, "with a port from 1 to 65535"),
        ("--nnodes=3 --node-rank=0 --rendezvous=[::1]:9", {}, "not an IPv4 address"),
        ("--node-rank=0 --rendezvous=a:1", {}, "--nnodes: is missing"),
        (f"{FLAGS} --node-rank=0 -np 4", {}, "-np 4: cannot be divided by 3 nodes"),
        (f"{FLAGS} --node-rank=0 -H a:2", {}, "--hosts: with --nnodes"),
        (f"{FLAGS} --node-rank=0 -p 22", {}, "--ssh-port: with --nnodes"),
        (f"{FLAGS} --node-rank=0 --detach", {}, "--detach: "),
        (f"{FLAGS} --node-rank=0 --controller=mpi", {}, "Open MPI starts its processes on"),
        ("", {**TRAIN_JOB, "PET_NNODES": "1:3"}, "PET_NNODES=1:3: a job has a fixed number"),
        ("", {**TRAIN_JOB, "PET_NPROC_PER_NODE": "x"}, "PET_NPROC_PER_NODE=x: "),
        (
            "-np 4",
            PYTORCH_JOB,
            "(WORLD_SIZE=3 and RANK=2 make this one of several",
        ),
        ("", {**PYTORCH_JOB, SECRET: "short"}, f"{SECRET}: must hold one word of 16"),
        ("-np 2 --nproc-per-node=2", {}, "--nproc-per-node: applies to --nnodes"),
    ],
)
def test_what_makes_no_node_is_refused(
    flags: str, environment: dict[str, str], problem: str
) -> None:
    """Fails if a value that is missing, wrong or without effect is not named."""
    with pytest.raises(UsageError, match=re.escape(problem)):
        read(flags, **environment)


def test_the_secret_is_required_but_on_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if nodes could be joined from other machines without a secret, if the file has no
    precedence, or if two commands of one user do not have one secret on loopback; or another
    user could read that.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="others could join the job, and run code as you"):
        read_rendezvous(parse(f"{FLAGS} --node-rank=0"), [], {})
    (tmp_path / "secret").write_text("another-secret-of-nodes\n")
    node = read(f"{FLAGS} --node-rank=0 --rendezvous-secret-file={tmp_path / 'secret'}")
    assert node is not None and node.secret == "another-secret-of-nodes"
    on_loopback = parse("--nnodes=2 --node-rank=0 --rendezvous=127.0.0.1:9")
    first, second = (read_rendezvous(on_loopback, [], {}) for _ in range(2))
    assert first and second and first.secret == second.secret and len(first.secret) == 64
    (path,) = (tmp_path / "hvdtrain").iterdir()
    assert path.stat().st_mode & 0o077 == 0


def test_one_node_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if `--nnodes 1` waits for others, or asks for an address."""
    monkeypatch.setattr("hvdtrain.cli.nodes.GPUS", "no such device")
    (host,), meeting = find_job_hosts(parse("--nnodes 1 -np 2"), ["train"], {})
    assert (host.name, host.slots, host.node, meeting) == ("localhost", 2, None, None)
