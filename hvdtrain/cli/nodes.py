"""The flags of `hvdtrain launch` that start a job over several hosts without SSH."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.cgroups import usable_cores
from hvdtrain.cli.flags import Flag, Section, find_hosts
from hvdtrain.cli.metrics import A_TOKEN, LARGEST_PORT, read_token
from hvdtrain.config.fields import Check, at_least
from hvdtrain.errors import UsageError, attempt, refuse
from hvdtrain.launcher.addresses import is_loopback, name_problem
from hvdtrain.launcher.hosts import MOST_HOSTS, Host
from hvdtrain.launcher.nodes import SECRET, Rendezvous, own_secret
from hvdtrain.launcher.sites import hosts_of_site
from hvdtrain.slurm import SlurmStep, is_step
from hvdtrain.topology import Topology

BY_KIND = ("auto", "gpu", "cpu")
GPUS = "nvidia[0-9]*"  # in /dev
# Environment variables, the first that is set wins: of PyTorchJob and TrainJob of Kubeflow (PET_),
# which set the others too, and of a Job of Kubernetes with completion mode Indexed.
VARIABLES = {
    "--nnodes": ("PET_NNODES", "WORLD_SIZE"),
    "--node-rank": ("PET_NODE_RANK", "JOB_COMPLETION_INDEX", "RANK"),
    "host": ("PET_MASTER_ADDR", "MASTER_ADDR"),
    "port": ("PET_MASTER_PORT", "MASTER_PORT"),
    "--nproc-per-node": ("PET_NPROC_PER_NODE",),
}
OF_A_WORKER = "LOCAL_RANK"  # beside which RANK and WORLD_SIZE are those of a worker of torchrun

NODES_FLAGS = Section(
    "several hosts without SSH: the same command on each (default: the variables of PyTorchJob)",
    (
        Flag(
            "--nnodes",
            "wait for this many hosts that run the same command",
            int,
            metavar="N",
            check=at_least(1),
        ),
        Flag(
            "--node-rank",
            "be this one of them, from 0; 0 runs the launcher",
            int,
            metavar="R",
            check=at_least(0),
        ),
        Flag("--rendezvous", "meet at this address of node rank 0", metavar="HOST:PORT"),
        Flag(
            "--rendezvous-secret-file",
            f"admit those who have the secret in FILE (default: that in {SECRET})",
            Path,
            metavar="FILE",
        ),
        Flag(
            "--nproc-per-node",
            "start N workers on each host; gpu, cpu: by its devices (default: -np divided by "
            "--nnodes, else one for each NVIDIA GPU, or 1)",
            metavar="N",
            check=Check(
                lambda text: text in BY_KIND or (text.isdigit() and int(text) > 0),
                "={}: must be a number of at least 1, or auto, gpu or cpu",
            ),
        ),
    ),
)


class Value(NamedTuple):
    """A value, and the flag or variable that it comes from."""

    text: str
    source: str


def find_job_hosts(
    arguments: dict[str, Any], command: list[str], environment: Mapping[str, str] = os.environ
) -> tuple[tuple[Host, ...], Rendezvous | None]:
    """Return the hosts of the flags or the site, else this machine; with --nnodes the nodes, and
    where they meet. Raises UsageError.
    """
    if rendezvous := read_rendezvous(arguments, command, environment):
        slots = rendezvous.slots
        if rendezvous.nodes == 1:
            return (Host("localhost", slots, source="--nnodes"),), None
        nodes = range(rendezvous.nodes)
        return tuple(Host(f"node-rank-{n}", slots, None, "--nnodes", n) for n in nodes), rendezvous
    hosts, np = find_hosts(arguments), arguments["np"]
    if is_step(environment):
        raise UsageError("srun has started a launcher on each host: leave out -H and --hostfile")
    if hosts:
        return hosts, None
    if np is None:
        raise UsageError("how many workers? Give -np N, or hosts by -H or --hostfile")
    if around := Topology.from_environment(environment).in_job_of_several:
        raise UsageError(
            f"{around}: this is one of several hosts or processes, and launch would start a job of "
            "its own in each. Start it once, with all hosts by -H or --hostfile, or on each host "
            "with --nnodes, --node-rank and --rendezvous; for a job on this machine alone, add "
            f"-H localhost:{np}"
        )
    return (Host("localhost", max(1, np), source="-np"),), None


def read_rendezvous(
    arguments: dict[str, Any], command: list[str], environment: Mapping[str, str] = os.environ
) -> Rendezvous | None:
    """Return where the nodes of the job meet; None for a job that one command starts.

    Raises UsageError with every problem.
    """
    by_hosts = _given(arguments, "--hosts") or _given(arguments, "--hostfile")
    in_step = is_step(environment) and not by_hosts
    values = _values(arguments, environment, _of_step(environment) if in_step else {})
    typed = any(_given(arguments, flag) for flag in ("--nnodes", "--node-rank", "--rendezvous"))
    if not typed and not in_step and not _is_node(arguments, values, environment):
        refuse(_unused(arguments))
        return None
    reason = "" if typed else f". {_why_node(values)}"
    problems = _excluded(arguments)
    nodes = attempt(problems, lambda: _number(values, "--nnodes", 1, MOST_HOSTS))
    if nodes is None:
        refuse(problems, reason)
    assert nodes is not None
    is_one = nodes == 1
    rank = 0 if is_one else attempt(problems, lambda: _number(values, "--node-rank", 0, nodes - 1))
    slots = attempt(problems, lambda: _slots(arguments["np"], nodes, values))
    host, port = ("", 0) if is_one else attempt(problems, lambda: _meet(values)) or ("", 0)
    # Hosts of Slurm usually share the home folder, and so the user's own secret.
    secret = attempt(problems, lambda: _secret(arguments, environment, host, in_step))
    if not is_one and arguments["controller"] == "mpi":
        problems.append(
            "--controller=mpi: Open MPI starts its processes on other hosts by SSH or a batch "
            "system alone; with --nnodes use --controller gloo"
        )
    refuse(problems, reason)
    assert rank is not None and slots is not None and secret is not None
    return Rendezvous(nodes, rank, host, port, secret, slots, tuple(command))


def _excluded(arguments: dict[str, Any]) -> list[str]:
    """Return the problems of flags that do not go with --nnodes."""
    problems = [
        f"{flag}: with --nnodes hosts join by themselves, without SSH: leave it out"
        for flag in ("--hosts", "--hostfile", "--ssh-port", "--ssh-identity-file")
        if _given(arguments, flag)
    ]
    if arguments["detach"]:
        problems.append("--detach: the commands of all nodes end with the job: leave it out")
    return problems


def _given(arguments: dict[str, Any], flag: str) -> bool:
    return arguments[flag.lstrip("-").replace("-", "_")] is not None


def _of_step(environment: Mapping[str, str]) -> dict[str, Value]:
    """Return the values of a step of Slurm, in which srun has started this command once on each
    host. Raises UsageError if it has not.
    """
    step = SlurmStep.from_environment(environment)
    hosts = environment.get("SLURM_STEP_NUM_NODES", "1")
    if str(step.size) != hosts:
        raise UsageError(
            f"SLURM_STEP_NUM_TASKS={step.size}: srun has started that many copies of the launcher "
            f"on {hosts} hosts: one on each is enough, which starts the host's workers. Use srun "
            "--ntasks-per-node=1, and --nproc-per-node N for N workers on each host"
        )
    values = {
        "--nnodes": Value(str(step.size), "SLURM_STEP_NUM_TASKS"),
        "--node-rank": Value(str(step.task.rank), "SLURM_PROCID"),
        "host": Value(step.first_host, "SLURM_STEP_NODELIST"),
        "port": Value(str(step.ports[0]), "SLURM_STEP_ID"),
    }
    if gpus := environment.get("SLURM_GPUS_ON_NODE"):
        values["--nproc-per-node"] = Value(gpus, "SLURM_GPUS_ON_NODE")
    return values


def _values(
    arguments: dict[str, Any], environment: Mapping[str, str], of_step: dict[str, Value]
) -> dict[str, Value]:
    """Return the values of flags, else of Slurm's step, if any, else of the environment."""
    is_worker = OF_A_WORKER in environment
    values: dict[str, Value] = {}
    for name, variables in VARIABLES.items():
        usable = [v for v in variables if not (is_worker and v in ("RANK", "WORLD_SIZE"))]
        if variable := next((v for v in usable if environment.get(v)), None):
            values[name] = Value(environment[variable], variable)
    values |= of_step
    for name in ("--nnodes", "--node-rank", "--nproc-per-node"):
        if _given(arguments, name):
            values[name] = Value(str(arguments[name.lstrip("-").replace("-", "_")]), name)
    if (address := arguments["rendezvous"]) is not None:
        host, _, port = address.rpartition(":") if ":" in address else (address, "", "")
        values |= {"host": Value(host, "--rendezvous"), "port": Value(port, "--rendezvous")}
    return values


def _is_node(
    arguments: dict[str, Any], values: dict[str, Value], environment: Mapping[str, str]
) -> bool:
    """Return whether the environment alone says that this is one of several nodes.

    It must name all of number, rank and address, and there must be no hosts by flags, Slurm or the
    MPI Operator. JOB_COMPLETION_INDEX is no sign: the pods of a Job may be independent.
    """
    if arguments["hosts"] is not None or arguments["hostfile"] is not None:
        return False
    if not {"--nnodes", "--node-rank", "host", "port"} <= values.keys():
        return False
    if values["--nnodes"].text in ("0", "1") or values["--node-rank"].source.startswith("JOB_"):
        return False
    return not hosts_of_site(environment)


def _why_node(values: dict[str, Value]) -> str:
    """Return which variables make this a node, and what to do if it should be none."""
    named = [f"{values[name].source}={values[name].text}" for name in ("--nnodes", "--node-rank")]
    return (
        f"({' and '.join(named)} make this one of several hosts; for a job on this machine alone, "
        "add -H localhost:N)"
    )


def _unused(arguments: dict[str, Any]) -> list[str]:
    flags = ("--rendezvous-secret-file", "--nproc-per-node")
    return [f"{flag}: applies to --nnodes" for flag in flags if _given(arguments, flag)]


def _number(values: dict[str, Value], name: str, least: int, most: int) -> int:
    """Return a whole number; of torchrun's form 2:2 too. Raises UsageError."""
    if name not in values:
        raise UsageError(f"{name}: is missing; give it, or set {' or '.join(VARIABLES[name])}")
    text, source = values[name]
    first, colon, last = text.partition(":")
    if colon and first != last:
        raise UsageError(f"{source}={text}: a job has a fixed number of nodes, such as {last}")
    if not first.isdigit() or not least <= int(first) <= most:
        raise UsageError(f"{source}={text}: must be a whole number from {least} to {most}")
    return int(first)


def _slots(np: int | None, nodes: int, values: dict[str, Value]) -> int:
    """Return the number of workers of each node. Raises UsageError."""
    text, source = values.get("--nproc-per-node", Value("", ""))
    gpus = len(list(Path("/dev").glob(GPUS)))
    if not text and np is not None:
        if np % nodes or np < nodes:
            raise UsageError(
                f"-np {np}: cannot be divided by {nodes} nodes; give --nproc-per-node N"
            )
        return np // nodes
    if text == "gpu" and not gpus:
        raise UsageError(f"{source}=gpu: this host has no NVIDIA GPU; use auto, cpu or a number")
    if text in ("", "gpu", "auto", "cpu"):
        cores = usable_cores() if text in ("auto", "cpu") else 1
        return gpus if gpus and text != "cpu" else cores
    if not text.isdigit() or not int(text):
        raise UsageError(f"{source}={text}: must be a number of at least 1, or auto, gpu or cpu")
    return int(text)


def _meet(values: dict[str, Value]) -> tuple[str, int]:
    """Return host and port of the rendezvous. Raises UsageError."""
    if "host" not in values or "port" not in values:
        raise UsageError(
            "--rendezvous: is missing; give HOST:PORT, an address of node rank 0, or set "
            "MASTER_ADDR and MASTER_PORT"
        )
    (host, source), (port, _) = values["host"], values["port"]
    if problem := "not an IPv4 address, or name" if ":" in host else name_problem(host):
        raise UsageError(f"{source}={host}: {problem}")
    if not port.isdigit() or not 1 <= int(port) <= LARGEST_PORT:
        raise UsageError(f"{source}: must end with a port from 1 to {LARGEST_PORT}, not {port!r}")
    return host, int(port)


def _secret(
    arguments: dict[str, Any], environment: Mapping[str, str], host: str, shares_home: bool
) -> str:
    """Return the secret of the nodes, by default the user's own on loopback, and where the hosts
    share the home folder; empty without a rendezvous. Raises UsageError.
    """
    if not host:
        return ""
    if path := arguments["rendezvous_secret_file"]:
        return read_token(path.read_text, f"--rendezvous-secret-file={path}")
    if SECRET in environment:
        return read_token(lambda _: environment[SECRET], SECRET)
    with suppress(OSError):
        if is_loopback(host) or shares_home:
            return own_secret()
    raise UsageError(
        f"--rendezvous={host}: others could join the job, and run code as you: give all nodes the "
        f"same secret by --rendezvous-secret-file FILE, or in {SECRET} (such as that of {A_TOKEN})"
    )


def describe(rendezvous: Rendezvous) -> str:
    """Return what --dry-run says of the nodes."""
    there = f"node rank {rendezvous.rank} of {rendezvous.nodes}"
    if rendezvous.rank:
        return f"{there}: joins node rank 0 at {rendezvous.address}, and starts what it asks for"
    return f"{there}: waits for the others at {rendezvous.address}, then runs this command"
