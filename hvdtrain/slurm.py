"""Rendezvous of workers that Slurm's srun has started, without SSH.

Slurm gives each task of a step its number and its host. Horovod's Gloo also needs a rendezvous
server (a small HTTP server) and the name of the network interface on each host. So task 0 listens
on a port that every task computes from the step's identity. The others report to it; once all have
reported, each receives the variables that horovodrun would have set.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from hvdtrain.errors import PreflightError, UsageError
from hvdtrain.log import few

# Set by horovodrun, mpirun or torchrun, within a task.
STARTED_WITHIN = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "TORCHELASTIC_RUN_ID")
FIRST_PORT, PORTS = 20_000, 10_000  # below the range that Linux uses for outgoing connections
MEETING_S = 300.0  # for all tasks to report: the first imports from a network disk take long
GREETING_S = 5.0
RETRY_S = 0.2
LONGEST_LINE = 10_000
Variables = dict[str, str]


def in_job(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process belongs to a Slurm job.

    In a job, a repeated SIGTERM is not a request to end at once: Slurm sends it to every process,
    the batch script and the launcher forward it later, and Slurm's own SIGKILL follows.
    """
    return "SLURM_JOB_ID" in environment


def is_step(environment: Mapping[str, str]) -> bool:
    """Return whether srun started this process as one of several tasks, not yet connected."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    numbered = "SLURM_PROCID" in environment and environment.get("SLURM_STEP_ID", "").isdigit()
    return numbered and tasks != "1" and not any(name in environment for name in STARTED_WITHIN)


class SlurmTask(NamedTuple):
    """The position of one worker: its rank, its host, and its rank on that host."""

    rank: int
    host: str
    node: int  # the number of the host
    local_rank: int


class SlurmStep(NamedTuple):
    """The step of a Slurm job that this task belongs to."""

    task: SlurmTask
    size: int
    first_host: str
    identity: str  # the same in all tasks, and in no other step

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> SlurmStep:
        """Read Slurm's variables. Raises UsageError if one is invalid or the job heterogeneous."""
        if environment.get("SLURM_HET_SIZE", "1") != "1":
            raise UsageError(
                "SLURM_HET_SIZE: this is a heterogeneous job, whose tasks have no information "
                "about those of its other components; submit a job of one component"
            )
        rank, size, local_rank, node = (
            whole_number(environment, f"SLURM_{name}")
            for name in ("PROCID", "STEP_NUM_TASKS", "LOCALID", "NODEID")
        )
        host = environment.get("SLURMD_NODENAME") or f"node{node}"
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_LAUNCHER_PORT")
        identity = "hvdtrain " + " ".join(environment.get(name, "-") for name in names)
        first = first_host(environment.get("SLURM_STEP_NODELIST", ""))
        return cls(SlurmTask(rank, host, node, local_rank), size, first, identity)

    @property
    def ports(self) -> list[int]:
        """Return eight ports on which task 0 may listen, in order; some may be in use."""
        digest = hashlib.sha256(self.identity.encode()).digest()
        return [FIRST_PORT + number % PORTS for number in struct.unpack(">8H", digest[:16])]


def whole_number(
    environment: Mapping[str, str],
    name: str,
    default: int | None = None,
    problem: str = "expected a whole number",
) -> int:
    """Return the whole number in a variable; for other text `default`. Raises UsageError without
    one, with the text `problem`.
    """
    text = environment.get(name, "")
    if text.isdigit():
        return int(text)
    if default is not None:
        return default
    raise UsageError(f"environment variable {name}={text[:60]!a}: {problem}")


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: gpu008 of `gpu[008-010,12],login1`."""
    first = re.match(r"(?:[^,\[\]]|\[[0-9][^\[\]]*\])+", nodes)
    if first is None:
        raise UsageError(f"SLURM_STEP_NODELIST={nodes[:60]!a}: not a list of hosts")
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first[0])


def meet(
    step: SlurmStep, start_rendezvous: Callable[[list[Variables]], int], limit_s: float = MEETING_S
) -> tuple[Variables, str]:
    """Collective: wait for all tasks of the step and exchange their positions.

    Returns Horovod's variables for this task, and the address at which the others reach this host.
    `start_rendezvous` is called once, in task 0, with the variables of all ranks; it returns its
    port. Raises PreflightError if not all tasks report in time, and UsageError if Horovod cannot
    number the tasks as Slurm has placed them.
    """
    deadline = time.monotonic() + limit_s
    if step.task.rank == 0:
        return _gather(step, start_rendezvous, deadline)
    return _report(step, deadline)


def placement(tasks: list[SlurmTask]) -> list[Variables]:
    """Return Horovod's variables for each rank.

    Raises UsageError unless the ranks of each host are consecutive.
    """
    order = sorted(tasks, key=lambda task: (task.node, task.local_rank))
    for task, wanted in zip(tasks, order, strict=True):
        if task != wanted:
            raise UsageError(
                f"Slurm has placed rank {task.rank} on {task.host}, and ranks of one host must "
                "follow one another: start with srun --distribution=block"
            )
    by_rank = []
    for task in tasks:
        beside = [other.rank for other in tasks if other.node == task.node]
        across = [other.rank for other in tasks if other.local_rank == task.local_rank]
        variables = {
            "RANK": task.rank,
            "SIZE": len(tasks),
            "LOCAL_RANK": task.local_rank,
            "LOCAL_SIZE": len(beside),
            "CROSS_RANK": across.index(task.rank),
            "CROSS_SIZE": len(across),
            "HOSTNAME": task.host,
        }
        by_rank.append({f"HOROVOD_{name}": str(value) for name, value in variables.items()})
    return by_rank


def _gather(
    step: SlurmStep, start_rendezvous: Callable[[list[Variables]], int], deadline: float
) -> tuple[Variables, str]:
    """Collect the reports of all other tasks, in task 0, then answer them."""
    tasks, lines, address = {0: step.task}, {}, "127.0.0.1"
    with ExitStack() as stack:
        listener = stack.enter_context(_listen(step))
        while len(tasks) < step.size:
            try:
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                connection = stack.enter_context(listener.accept()[0])
            except TimeoutError:
                absent = sorted(set(range(step.size)) - set(tasks))
                raise PreflightError(
                    f"of the {step.size} tasks of this step, {len(absent)} did not report to "
                    f"{step.first_host}:{listener.getsockname()[1]} in time: tasks "
                    f"{few(absent, 10)}"
                ) from None
            task = _greet(connection, step)
            if task is None:
                connection.close()
                continue
            tasks[task.rank], lines[task.rank] = task, connection
            if task.node != step.task.node:
                address = connection.getsockname()[0]
        try:
            ranks = placement([tasks[rank] for rank in range(step.size)])
        except UsageError as error:
            for connection in lines.values():
                _send(connection, {"error": str(error)})
            raise
        shared = {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(start_rendezvous(ranks)),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }
        for rank, connection in lines.items():
            _send(connection, {"variables": ranks[rank] | shared, "address": address})
    return ranks[0] | shared, address


def _greet(connection: socket.socket, step: SlurmStep) -> SlurmTask | None:
    """Return the place that a task reports; None if the peer is not a task of this step."""
    connection.settimeout(GREETING_S)
    _send(connection, {"step": step.identity})
    report = _receive(connection)
    with suppress(TypeError):  # not the fields of a task
        if report.pop("step", None) == step.identity:
            task = SlurmTask(**report)
            return task if task.rank in range(1, step.size) else None
    return None


def _report(step: SlurmStep, deadline: float) -> tuple[Variables, str]:
    """Report to task 0, in any other task, and wait for the answer."""
    with _reach(step, deadline) as connection:
        _send(connection, {"step": step.identity, **step.task._asdict()})
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        answer = _receive(connection)
        if "error" in answer:
            raise UsageError(answer["error"])
        if "variables" not in answer:
            raise PreflightError(
                f"task 0 on {step.first_host} has ended, or not all {step.size} tasks of this "
                "step reported in time"
            )
        elsewhere = answer["address"] != "127.0.0.1" and step.task.node != 0
        address = connection.getsockname()[0] if elsewhere else answer["address"]
        return answer["variables"], address


def _listen(step: SlurmStep) -> socket.socket:
    for port in step.ports:
        with suppress(OSError):
            return socket.create_server(("", port), backlog=step.size)
    raise PreflightError(f"task 0 found none of the ports {step.ports} of this step free")


def _reach(step: SlurmStep, deadline: float) -> socket.socket:
    """Connect to task 0, on the first port of the step on which it answers."""
    problem: object = "no answer"
    while time.monotonic() < deadline:
        for port in step.ports:
            try:
                connection = socket.create_connection((step.first_host, port), GREETING_S)
            except OSError as error:
                problem = error
                continue
            if _receive(connection).get("step") == step.identity:
                return connection
            connection.close()
        time.sleep(RETRY_S)
    raise PreflightError(
        f"task 0 was not reached on {step.first_host}, ports {step.ports}: {problem}. Hosts of a "
        "job must reach one another over the network by their Slurm names"
    )


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):  # the peer has disconnected
        connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, Any]:
    """Return one message; {} if none arrives, or it is not a JSON object."""
    try:
        with connection.makefile("rb") as file:
            message = json.loads(file.readline(LONGEST_LINE))
    except (OSError, ValueError):
        return {}
    return message if isinstance(message, dict) else {}
