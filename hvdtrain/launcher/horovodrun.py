"""The horovodrun command line of a job, and the environments of horovodrun and its workers."""

import glob
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from hvdtrain.cgroups import usable_cores
from hvdtrain.errors import UsageError
from hvdtrain.interpreter import module_argv, python_path
from hvdtrain.launcher.processes import is_writable, run_child
from hvdtrain.launcher.protocol import Orders
from hvdtrain.network import own_interfaces
from hvdtrain.pulse import JOB, RING_TOKEN
from hvdtrain.topology import CORES_SHARED_OUT, Topology

# User variables that horovodrun and mpirun need; no others, since with Gloo horovodrun puts its
# whole environment on every worker's command line, where all users of a host can read it.
PASSED_ON = frozenset(
    ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LOGNAME", "OMP_NUM_THREADS", "PATH")
    + ("SHELL", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV", "XDG_CACHE_HOME")
)
# Of Open MPI, for mpirun itself. Workers get what else the user has set by the agents; those that
# have none, of `doctor` and `bench`, need these settings of Horovod and NCCL.
PASSED_ON_PREFIXES = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_")
SETTINGS = frozenset(
    ("CACHE_CAPACITY", "CONTROLLER", "CPU_OPERATIONS", "CYCLE_TIME", "FUSION_THRESHOLD")
    + ("GLOO_HIERARCHICAL_ALLREDUCE", "GLOO_TIMEOUT_SECONDS", "GPU_OPERATIONS")
    + ("HIERARCHICAL_ALLGATHER", "HIERARCHICAL_ALLREDUCE", "LOG_LEVEL", "MPI_SHARED_MEMORY")
    + ("NUM_NCCL_STREAMS", "STALL_CHECK_TIME_SECONDS", "STALL_SHUTDOWN_TIME_SECONDS")
    + ("THREAD_AFFINITY",)
)
NCCL_SETTINGS = frozenset(
    ("ALGO", "BUFFSIZE", "CROSS_NIC", "DEBUG", "DEBUG_SUBSYS", "IB_DISABLE", "IB_GID_INDEX")
    + ("IB_HCA", "IB_SL", "IB_TC", "IB_TIMEOUT", "MAX_NCHANNELS", "MIN_NCHANNELS", "NET")
    + ("NET_GDR_LEVEL", "NET_PLUGIN", "NTHREADS", "P2P_DISABLE", "P2P_LEVEL", "PROTO")
    + ("SHM_DISABLE", "SOCKET_FAMILY", "SOCKET_IFNAME", "SOCKET_NTHREADS", "TOPO_FILE")
)
# Variables that horovodrun and mpirun set, and settings of Horovod: taken from the worker's host.
HOROVODRUN_PREFIXES = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "PRTE_", "ORTE_", "NCCL_")
# Variables of the login on a host; horovodrun replaces those of other hosts by the launcher's.
LOGIN_NAMES = ("HOME", "LOGNAME", "MAIL", "SHELL", "TMPDIR", "USER", "XDG_RUNTIME_DIR")
# Variables that belong to a host and a login rather than to the user's work.
HOST_NAMES = frozenset((*LOGIN_NAMES, "HOSTNAME", "OLDPWD", "PWD", "SHLVL", "_"))
HOST_PREFIXES = ("SSH_", "XDG_SESSION_")
# Variables that select some of a host's GPUs, by numbers or UUIDs that are others on another host.
GPU_SELECTION = frozenset(
    ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HIP_VISIBLE_DEVICES")
    + ("NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
)
OF_PYTHON = {
    # Sets, by which a script may number classes, have the same order on all ranks.
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",  # logs must not lag behind
    "PYTHONFAULTHANDLER": "1",  # SIGABRT, the launcher's or native code's, prints Python stacks
}
# A Linux host that has none of these files has only CPUs to compute on.
DEVICES = (
    *("/proc/driver/nvidia", "/dev/nvidia*", "/dev/kfd", "/dev/dxg", "/dev/dri/render*"),
    *("/dev/accel*", "/dev/davinci*", "/dev/hl[0-9]*", "/dev/neuron*"),
)
# Rank 0's address, set by the launcher once hosts are selected.
MASTER_ADDR, MASTER_PORT = "HVDTRAIN_MASTER_ADDR", "HVDTRAIN_MASTER_PORT"
VERSION_LIMIT_S = 30.0  # for `mpirun --version`


def agent_argv(job: str) -> list[str]:
    """Return the command that starts an agent (hvdtrain/launcher/agent.py), and so a worker."""
    return [*module_argv("hvdtrain.launcher.agent"), job]


def horovodrun_argv(
    worker: Sequence[str],
    workers: int,
    controller: str,
    hosts: Sequence[tuple[str, int]] = (),
    *,
    interface: str | None = None,
    start_timeout_s: int = 60,
    verbose: bool = False,
    prefix: str | None = None,
) -> list[str]:
    """Return the horovodrun command that starts so many processes of `worker`.

    `controller`: gloo or mpi. `hosts`: name and number of workers of each; by default all workers
    are on this machine. `interface`: of the network; None: horovodrun selects one. `prefix`: Open
    MPI's folder on other hosts; None: it is on their PATH.
    """
    argv = [str(Path(sys.executable).parent / "horovodrun"), "-np", str(workers), f"--{controller}"]
    named = hosts or [("localhost", workers)]
    argv += ["-H", ",".join(f"{name}:{slots}" for name, slots in named)]
    # The cached checks go stale when hosts change.
    argv += ["--disable-cache", "--start-timeout", str(start_timeout_s)]
    if interface:
        argv += ["--network-interface", interface]
    if controller == "mpi" and prefix:
        argv += [f"--mpi-args=--prefix {shlex.quote(prefix)}"]
    if verbose:
        argv += ["--verbose"]
    return [*argv, *worker]


def in_own_session(worker: Sequence[str]) -> list[str]:
    """Return a command that runs `worker` in a session of its own, as agents do.

    Linux divides cores among sessions first (autogroups, sched(7)): the workers of one mpirun would
    share what a single busy program of another session receives.
    """
    return ["setsid", "--wait", *worker]


def horovodrun_environment(
    environment: Mapping[str, str], settings: Mapping[str, str], ssh_folder: Path | None
) -> dict[str, str]:
    """Return `settings`, what horovodrun needs of `environment`, and `ssh_folder` first on PATH."""
    needed = (
        PASSED_ON
        | {f"HOROVOD_{name}" for name in SETTINGS}
        | {f"NCCL_{name}" for name in NCCL_SETTINGS}
    )
    kept = _selected(environment, needed, PASSED_ON_PREFIXES)
    path = (f"{ssh_folder}{os.pathsep}" if ssh_folder else "") + search_path(environment)
    overrides = {"PATH": path, "PYTHONUNBUFFERED": "1"}
    return {**settings, **_with_usable_tmpdir(kept), **python_path(environment), **overrides}


def _selected(
    variables: Mapping[str, str], names: Collection[str], prefixes: tuple[str, ...] = ()
) -> dict[str, str]:
    """Return the variables with these names and prefixes."""
    return {
        name: value
        for name, value in variables.items()
        if name in names or name.startswith(prefixes)
    }


def _with_usable_tmpdir(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without a TMPDIR in which nothing can be written: Open MPI would end
    there, while Python takes another folder.
    """
    usable = is_writable(variables.get("TMPDIR", "/tmp"))
    return {name: value for name, value in variables.items() if usable or name != "TMPDIR"}


def search_path(environment: Mapping[str, str]) -> str:
    """Return PATH with Python's own folder first, which holds `python` and horovodrun."""
    return os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])


def find_mpirun() -> str | None:
    """Return the mpirun that horovodrun finds."""
    return shutil.which("mpirun", path=search_path(os.environ))


class Controller(NamedTuple):
    """A controller, `gloo` or `mpi`, and why `auto` selects it; empty if the user has."""

    name: str
    reason: str = ""


def find_controller(wanted: str, hosts: int = 1) -> Controller:
    """Return the controller of a job on so many hosts. Raises UsageError for `mpi` without an
    mpirun that horovodrun can use, on these hosts.

    `auto` selects what was measured to be faster (docs/performance.md): Open MPI within a host,
    also where workers outnumber cores; Gloo over TCP.
    """
    if wanted == "gloo":
        return Controller("gloo")
    if wanted == "auto" and hosts > 1:
        return Controller("gloo", "faster over TCP than Open MPI")
    mpirun = find_mpirun()
    if hosts > 1 and " " in (mpi_prefix() or ""):
        raise UsageError(
            f"--controller=mpi: Open MPI cannot start workers on other hosts from {sys.prefix}, "
            "which has a space in it; use --controller gloo, or another folder"
        )
    if "_" in socket.gethostname():  # not a name of the Internet (RFC 952): ORTE ends with it
        if wanted == "auto":
            return Controller("gloo", "Open MPI cannot start on a machine with _ in its name")
        raise UsageError(
            f"--controller=mpi: Open MPI cannot start on {socket.gethostname()}, a name with an "
            "underscore; use --controller gloo, or rename the machine (docker run --hostname)"
        )
    if mpirun and is_open_mpi(mpirun):
        return Controller("mpi", "faster on one host than Gloo" if wanted == "auto" else "")
    if wanted == "auto":
        return Controller("gloo", "Open MPI is not installed")
    reason = f"{mpirun} is not Open MPI's" if mpirun else "there is no mpirun on PATH"
    raise UsageError(f"--controller=mpi: {reason}; use --controller gloo")


@cache
def is_open_mpi(mpirun: str) -> bool:
    """Return whether it is Open MPI 4, the version that horovodrun's options fit."""
    return mpi_of(mpirun).startswith("Open MPI 4.")


def mpi_of(mpirun: str) -> str:
    """Return the MPI that an mpirun is of, with its version: "Open MPI 4.1.4"; of another kind, the
    first line of what it prints.
    """
    done = run_child([mpirun, "--version"], VERSION_LIMIT_S)
    if match := re.search(r"\(Open MPI\) ([\w.]+)", done.stdout):
        return f"Open MPI {match[1]}"
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[0][:80] if lines else f"{mpirun} (exit code {done.returncode})"


def mpi_prefix() -> str | None:
    """Return Python's own prefix if Open MPI is there: shells of ssh lack it on PATH; else None."""
    mpirun, folder = find_mpirun(), Path(sys.prefix)
    return str(folder) if mpirun and Path(mpirun).is_relative_to(folder) else None


FUSION, IDLE = "HOROVOD_FUSION_THRESHOLD", "OMPI_MCA_mpi_yield_when_idle"
STALL_CHECK, STALL_END = "HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
SETTING_REASONS = {
    FUSION: "tensors are not fused, so that a run repeats bit for bit",
    IDLE: "Open MPI gives up the core while it waits",
    STALL_CHECK: "Horovod warns when some ranks wait for others",
    STALL_END: "Horovod ends the job after so long a wait (--watchdog-timeout-s)",
}


def settings_for(
    controller: str, environment: Mapping[str, str], watchdog_timeout_s: float, command: str
) -> dict[str, str]:
    """Return the variables to set for a job, without those that the user has set."""
    values = {} if command == "verify" else {FUSION: "0"}  # verify covers fused tensors too
    if controller == "mpi":
        values[IDLE] = "1"
    if command != "train":  # `train` configures its stall check itself
        values[STALL_CHECK] = str(max(1, min(60, round(watchdog_timeout_s / 2))))
        values[STALL_END] = str(max(1, round(watchdog_timeout_s)))
    return {name: value for name, value in values.items() if name not in environment}


def login_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that belong to a login, of its environment."""
    return _with_usable_tmpdir(_selected(environment, LOGIN_NAMES))


def worker_environment(
    orders: Orders, environment: Mapping[str, str], login: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the user's, this host's and horovodrun's variables, plus RANK, MASTER_ADDR and so on.

    `environment`: the agent's; raises UsageError unless horovodrun or mpirun has set it. `login`:
    of this host (`login_of`); by default what `environment` has of it. The host's cores are divided
    among its workers, unless the user sets OMP_NUM_THREADS. Network interfaces are this host's own
    (`own_interfaces`), unless the user has set their variables. The user's selection of GPUs
    applies to the host where launch was called; other hosts have their own.
    """
    if login is not None:
        of_others = {name: value for name, value in environment.items() if name not in LOGIN_NAMES}
        environment = of_others | dict(login)
    topology = Topology.from_environment(environment)
    local_size = environment.get("HOROVOD_LOCAL_SIZE")
    local_size = local_size or environment.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    if not topology.launched or not local_size:
        raise UsageError("agents are started by `hvdtrain launch`, through horovodrun")
    of_host = _selected(environment, HOST_NAMES, (*HOST_PREFIXES, *HOROVODRUN_PREFIXES))
    of_other_hosts = GPU_SELECTION if orders.hostname != socket.gethostname() else frozenset()
    not_to_pass = _selected(orders.environment, HOST_NAMES | of_other_hosts, HOST_PREFIXES)
    of_user = {name: value for name, value in orders.environment.items() if name not in not_to_pass}
    of_job = {
        "RANK": str(topology.rank),
        "WORLD_SIZE": str(topology.size),
        "LOCAL_RANK": str(topology.local_rank),
        "LOCAL_WORLD_SIZE": local_size,
        "MASTER_ADDR": environment.get(MASTER_ADDR, "127.0.0.1"),
        "MASTER_PORT": environment.get(MASTER_PORT, "29500"),
        "TORCHELASTIC_RUN_ID": orders.environment.get(JOB, "hvdtrain"),  # Lightning looks for it
        RING_TOKEN: orders.ring_token,
        **({} if "OMP_NUM_THREADS" in of_user else {CORES_SHARED_OUT: "1"}),
    }
    defaults = _defaults(usable_cores(environment) // int(local_size))
    interfaces = own_interfaces(environment)
    chosen = interfaces | _selected(orders.environment, interfaces)
    # horovodrun sets PYTHONUNBUFFERED for the agent; for the worker the user's value counts.
    of_agent = {name: value for name, value in environment.items() if name not in defaults}
    return of_agent | defaults | of_user | of_host | chosen | of_job


def _defaults(cores: int) -> dict[str, str]:
    """Return the variables of a worker with so many cores of its host that a user may set."""
    defaults = {"OMP_NUM_THREADS": str(max(1, cores)), **OF_PYTHON}
    if not any(map(glob.glob, DEVICES)):  # Accelerate would connect no workers
        defaults["ACCELERATE_USE_CPU"] = "true"
    return defaults
