"""Hosts allocated by a site's scheduler: from Slurm's environment or the MPI Operator's hostfile.

Slurm lists a job's hosts in environment variables. Its commands (`scontrol show hostnames`) are not
used: many containers lack them. The list `gpu[008-010,12],login1` means the hosts gpu008 gpu009
gpu010 gpu12 login1, and `2(x3),1` two slots on each of the first three hosts and one on the fourth.
"""

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.launcher.addresses import LONGEST_NAME, name_problem, shown
from hvdtrain.launcher.hosts import (
    MOST_BYTES,
    MOST_HOSTS,
    MOST_SLOTS,
    Host,
    HostCollector,
    read_hostfile,
)
from hvdtrain.log import counted

MPI_HOSTFILE = Path("/etc/mpi/hostfile")  # where the Kubeflow MPI Operator mounts it
NODE_LIST = "SLURM_JOB_NODELIST"
INSTEAD = "name the hosts by -H or --hostfile instead"

RANGE = re.compile("([0-9]{1,18})(?:-([0-9]{1,18}))?")
REPEATED = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def hosts_of_site(
    environment: Mapping[str, str], mpi_hostfile: Path = MPI_HOSTFILE
) -> tuple[Host, ...]:
    """Return the hosts that Slurm or the MPI Operator allocated; () without either."""
    if environment.get(NODE_LIST):
        return _hosts_of_slurm(environment)
    try:
        present = mpi_hostfile.exists()
    except OSError:  # a folder without read permission
        present = False
    return read_hostfile(mpi_hostfile) if present else ()


def _hosts_of_slurm(environment: Mapping[str, str]) -> tuple[Host, ...]:
    """Raise UsageError in a heterogeneous job, and in one of several copies of the launcher."""
    copies = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if copies != "1":
        raise UsageError(
            f"SLURM_STEP_NUM_TASKS={shown(copies)}: srun has started that many copies of the "
            "launcher; start one, in the batch script and without srun, or one on each host, "
            "without -H: srun --ntasks-per-node=1"
        )
    if environment.get("SLURM_HET_SIZE", "1") != "1":
        raise UsageError(
            "SLURM_HET_SIZE: this is a heterogeneous job, whose variables name the hosts of its "
            f"first part only; {INSTEAD}"
        )
    names = _expand_names(environment[NODE_LIST])
    slots = _slots_of_slurm(environment, len(names))
    collector = HostCollector()
    for name, count in collector.until_full(zip(names, slots, strict=True)):
        if problem := name_problem(name):
            collector.problems.append(f"{NODE_LIST}: {problem}")
        else:
            collector.add(Host(name, count, None, NODE_LIST))
    return collector.finish(f"{NODE_LIST}: no hosts in it; {INSTEAD}")


def _slots_of_slurm(environment: Mapping[str, str], hosts: int) -> list[int]:
    """Return the slots of each host: its tasks, else its cores divided by the cores per task."""

    def counts_of(name: str, hosts: int) -> list[int]:
        text = environment.get(name)
        return _expand_counts(text, hosts, name) if text else []

    if tasks := counts_of("SLURM_TASKS_PER_NODE", hosts):
        return tasks
    if same := counts_of("SLURM_NTASKS_PER_NODE", 1):
        return same * hosts
    if cores := counts_of("SLURM_JOB_CPUS_PER_NODE", hosts):
        (per_task,) = counts_of("SLURM_CPUS_PER_TASK", 1) or [1]
        return [max(1, count // per_task) for count in cores]
    return [1] * hosts


def _expand_counts(text: str, hosts: int, variable: str) -> list[int]:
    """Expand `2(x3),1` to [2, 2, 2, 1]; raise UsageError unless it has one count for each host."""
    where = f"{variable}={shown(text)}"
    counts: list[int] = []
    for part in text[:MOST_BYTES].split(","):
        match = REPEATED.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"{where}: not a list of counts such as 2(x3),1; {INSTEAD}")
        count, times = int(match[1]), int(match[2] or 1)
        if not 1 <= count <= MOST_SLOTS or times < 1:
            raise UsageError(f"{where}: a host has 1 to {MOST_SLOTS:,} slots; {INSTEAD}")
        counts += [count] * min(times, hosts + 1 - len(counts))
        if len(counts) > hosts:
            break
    if len(counts) != hosts:
        covered = "more hosts" if len(counts) > hosts else counted(len(counts), "host")
        raise UsageError(f"{where}: covers {covered}, but {NODE_LIST} has {hosts}; {INSTEAD}")
    return counts


def _expand_names(text: str) -> list[str]:
    """Expand `gpu[008-010,12],login1` to its five names; raise UsageError above MOST_HOSTS."""
    where = f"{NODE_LIST}={shown(text)}"
    patterns = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if ",".join(patterns) != text.strip(",") or len(text) > MOST_BYTES:
        raise UsageError(
            f"{where}: not a list of hosts as Slurm writes it, such as gpu[01-04,7],login1; "
            f"{INSTEAD}"
        )
    names: list[str] = []
    for pattern in patterns:
        room = MOST_HOSTS - len(names)
        pieces: list[list[str]] = []
        for piece in re.split(r"(\[[^\[\]]*\])", pattern):
            pieces.append(_expand_piece(piece, room))
            room //= len(pieces[-1])
            if not room:
                raise UsageError(f"{where}: more than {MOST_HOSTS:,} hosts")
        if sum(len(piece[0]) for piece in pieces) > LONGEST_NAME:
            raise UsageError(f"{where}: a host's name has at most {LONGEST_NAME} characters")
        names += ("".join(parts) for parts in itertools.product(*pieces))
    return names


def _expand_piece(piece: str, most: int) -> list[str]:
    """Expand `[08-10,12]` to 08 09 10 12, at most `most`; return other text unchanged."""
    if not piece.startswith("["):
        return [piece]
    where = f"{NODE_LIST}: {shown(piece)}"
    numbers: list[str] = []
    for part in piece[1:-1].split(","):
        match = RANGE.fullmatch(part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        count = int(last) - int(first) + 1
        if count < 1:
            raise UsageError(f"{where}: {shown(part)} is not a range such as 08-10; {INSTEAD}")
        if len(numbers) + count > most:
            raise UsageError(f"{where}: more than {MOST_HOSTS:,} hosts")
        numbers += (f"{number:0{len(first)}d}" for number in range(int(first), int(first) + count))
    return numbers
