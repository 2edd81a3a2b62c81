"""Hosts allocated by a site's scheduler: from Slurm's environment or the MPI Operator's hostfile.

Slurm lists a job's hosts in environment variables. Its commands (`scontrol show hostnames`) are not
used: many containers lack them. The list `gpu[008-010,12],login1` means the hosts gpu008 gpu009
gpu010 gpu12 login1, and `2(x3),1` two slots on each of the first three hosts and one on the fourth.
"""

from __future__ import annotations

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

MPI_HOSTFILE = Path("/etc/mpi/hostfile")  # where the Kubeflow MPI Operator mounts it
NODE_LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")  # the second is set by old versions
INSTEAD = "name the hosts by -H or --hostfile instead"

RANGE = re.compile("([0-9]{1,18})(?:-([0-9]{1,18}))?")
REPEATED = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def hosts_of_site(
    environment: Mapping[str, str], mpi_hostfile: Path = MPI_HOSTFILE
) -> tuple[Host, ...]:
    """Return the hosts that Slurm or the MPI Operator allocated; () without either."""
    if any(environment.get(name) for name in NODE_LISTS):
        return _hosts_of_slurm(environment)
    try:
        present = mpi_hostfile.exists()
    except OSError:  # a folder without read permission
        present = False
    return read_hostfile(mpi_hostfile) if present else ()


def _hosts_of_slurm(environment: Mapping[str, str]) -> tuple[Host, ...]:
    variable = next(name for name in NODE_LISTS if environment.get(name))
    _check_whole_job(environment)
    names = _expand_names(environment[variable], variable)
    slots = _slots_of_slurm(environment, len(names), variable)
    collector = HostCollector()
    for name, count in zip(names, slots, strict=True):
        if problem := name_problem(name):
            collector.problems.append(f"{variable}: {problem}")
        else:
            collector.add(Host(name, count, None, variable))
        if collector.full:
            break
    return collector.finish(f"{variable}: no hosts in it; {INSTEAD}")


def _check_whole_job(environment: Mapping[str, str]) -> None:
    """Raise UsageError in a heterogeneous job, and in one of several copies of the launcher."""
    copies = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if copies != "1":
        raise UsageError(
            f"SLURM_STEP_NUM_TASKS={shown(copies)}: srun has started that many copies of the "
            "launcher; start one, in the batch script and without srun, or let srun start the "
            "workers themselves: srun hvdtrain train ..."
        )
    if environment.get("SLURM_HET_SIZE", "1") != "1":
        raise UsageError(
            "SLURM_HET_SIZE: this is a heterogeneous job, whose variables name the hosts of its "
            f"first part only; {INSTEAD}"
        )


def _slots_of_slurm(environment: Mapping[str, str], hosts: int, node_list: str) -> list[int]:
    """Return the slots of each host: its tasks, else its cores divided by the cores per task."""
    tasks = environment.get("SLURM_TASKS_PER_NODE")
    if tasks:
        return _expand_counts(tasks, hosts, "SLURM_TASKS_PER_NODE", node_list)
    if same := environment.get("SLURM_NTASKS_PER_NODE"):
        (count,) = _expand_counts(same, 1, "SLURM_NTASKS_PER_NODE", node_list)
        return [count] * hosts
    cores = environment.get("SLURM_JOB_CPUS_PER_NODE")
    if not cores:
        return [1] * hosts
    per_task = environment.get("SLURM_CPUS_PER_TASK") or "1"
    (cores_per_task,) = _expand_counts(per_task, 1, "SLURM_CPUS_PER_TASK", node_list)
    counts = _expand_counts(cores, hosts, "SLURM_JOB_CPUS_PER_NODE", node_list)
    return [max(1, count // cores_per_task) for count in counts]


def _expand_counts(text: str, hosts: int, variable: str, node_list: str) -> list[int]:
    """Expand `2(x3),1` to [2, 2, 2, 1]; raise UsageError unless it has one count for each host."""
    counts: list[int] = []
    for part in text[:MOST_BYTES].split(","):
        match = REPEATED.fullmatch(part.strip())
        if match is None:
            raise UsageError(
                f"{variable}={shown(text)}: not a list of counts such as 2(x3),1; {INSTEAD}"
            )
        count, times = int(match[1]), int(match[2] or 1)
        if not 1 <= count <= MOST_SLOTS or times < 1:
            raise UsageError(
                f"{variable}={shown(text)}: a host has 1 to {MOST_SLOTS:,} slots; {INSTEAD}"
            )
        counts += [count] * min(times, hosts + 1 - len(counts))
        if len(counts) > hosts:
            break
    if len(counts) != hosts:
        more = "more" if len(counts) > hosts else str(len(counts))
        raise UsageError(
            f"{variable}={shown(text)}: covers {more} hosts, but {node_list} has {hosts}; {INSTEAD}"
        )
    return counts


def _expand_names(text: str, variable: str) -> list[str]:
    """Expand `gpu[008-010,12],login1` to its five names; raise UsageError above MOST_HOSTS."""
    names: list[str] = []
    for pattern in _split_outside_brackets(text, variable):
        room = MOST_HOSTS - len(names)
        pieces: list[list[str]] = []
        for piece in re.split(r"(\[[^\[\]]*\])", pattern):
            pieces.append(_expand_piece(piece, room, variable))
            room //= len(pieces[-1])
            if not room:
                raise UsageError(f"{variable}={shown(text)}: more than {MOST_HOSTS:,} hosts")
        if sum(len(piece[0]) for piece in pieces) > LONGEST_NAME:
            raise UsageError(
                f"{variable}={shown(text)}: a host's name has at most {LONGEST_NAME} characters"
            )
        names += ("".join(parts) for parts in itertools.product(*pieces))
    return names


def _split_outside_brackets(text: str, variable: str) -> list[str]:
    patterns = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if ",".join(patterns) != text.strip(",") or len(text) > MOST_BYTES:
        raise UsageError(
            f"{variable}={shown(text)}: not a list of hosts as Slurm writes it, such as "
            f"gpu[01-04,7],login1; {INSTEAD}"
        )
    return patterns


def _expand_piece(piece: str, most: int, variable: str) -> list[str]:
    """Expand `[08-10,12]` to 08 09 10 12, at most `most`; return other text unchanged."""
    if not piece.startswith("["):
        return [piece]
    numbers: list[str] = []
    for part in piece[1:-1].split(","):
        match = RANGE.fullmatch(part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        count = int(last) - int(first) + 1
        if count < 1:
            raise UsageError(
                f"{variable}: {shown(piece)}: {shown(part)} is not a range such as 08-10; {INSTEAD}"
            )
        if len(numbers) + count > most:
            raise UsageError(f"{variable}: {shown(piece)}: more than {MOST_HOSTS:,} hosts")
        numbers += (f"{number:0{len(first)}d}" for number in range(int(first), int(first) + count))
    return numbers
