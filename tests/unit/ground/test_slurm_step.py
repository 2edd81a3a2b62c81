"""Tasks of a step of srun: who they are, and how they find one another. A task is a thread here."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from threading import Thread

import pytest

from hvdtrain.errors import HvdtrainError, PreflightError, UsageError
from hvdtrain.slurm import SlurmStep, SlurmTask, Variables, first_host, meet, placement
from hvdtrain.topology import Topology

# What srun gives the third of four tasks, on the second of three hosts (1, 2 and 1 tasks).
TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_LAUNCHER_PORT": "43905",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[008-010]",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "gpu009",
}
PLACES = [
    SlurmTask(0, "a", 0, 0),
    SlurmTask(1, "b", 1, 0),
    SlurmTask(2, "b", 1, 1),
    SlurmTask(3, "c", 2, 0),
]
# By rank: local rank, local size, cross rank, cross size; as horovodrun numbers them.
NUMBERS = [(0, 1, 0, 3), (0, 2, 1, 3), (1, 2, 0, 1), (0, 1, 2, 3)]
LIMIT_S = 60.0  # for what takes a moment


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Topology(2, 4, 1, launched=True)),
        ({"SLURM_STEP_NUM_TASKS": "1"}, Topology()),
        ({"SLURM_STEP_NUM_TASKS": None, "SLURM_STEP_ID": None}, Topology()),  # a batch script
        ({"SLURM_STEP_ID": "batch"}, Topology()),
        (
            {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "0"},
            Topology(0, 2, 0, launched=True),
        ),
    ],
)
def test_who_a_task_is(changes: dict[str, str | None], expected: Topology) -> None:
    """Fails if several tasks of srun take themselves for single processes, or one for several, or
    if a worker that horovodrun has started within a step goes by the step.
    """
    environment = {name: value for name, value in (TASK | changes).items() if value is not None}
    assert replace(Topology.from_environment(environment), start=None) == expected


def test_step() -> None:
    """Fails if a step is read wrongly, or two steps have the same identity or ports."""
    step = SlurmStep.from_environment(TASK)
    assert (step.task, step.size) == (SlurmTask(2, "gpu009", 1, 1), 4)
    assert step.first_host == "gpu008"
    others = [SlurmStep.from_environment(TASK | {name: "8"}) for name in list(TASK)[:3]]
    assert len({it.identity for it in [step, *others]}) == 4
    assert len({tuple(it.ports) for it in [step, *others]}) == 4


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("SLURM_PROCID", "x", "SLURM_PROCID='x': expected a whole number"),
        ("SLURM_NODEID", "", "SLURM_NODEID=''"),
        ("SLURM_STEP_NUM_TASKS", "-1", "SLURM_STEP_NUM_TASKS='-1'"),
        ("SLURM_STEP_NODELIST", "", "SLURM_STEP_NODELIST='': not a list of hosts"),
        ("SLURM_STEP_NODELIST", "[]", "not a list of hosts"),
        ("SLURM_HET_SIZE", "2", "heterogeneous job"),
    ],
)
def test_bad_step(variable: str, value: str, expected: str) -> None:
    """Fails if such an environment starts something, or is not named."""
    with pytest.raises(UsageError) as caught:
        SlurmStep.from_environment(TASK | {variable: value})
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("alpha", "alpha"),
        ("alpha,beta", "alpha"),
        ("gpu[008-010,12],login1", "gpu008"),
        ("r[3,1]n[01-02],x", "r3n01"),
        ("a[1,3]-ib,b[7]", "a1-ib"),
        ("c[1-2].example.org", "c1.example.org"),
    ],
)
def test_first_host(nodes: str, expected: str) -> None:
    """Fails if it is another than the first of `scontrol show hostnames`."""
    assert first_host(nodes) == expected


def test_placement() -> None:
    """Fails if ranks are numbered otherwise than by horovodrun, or when hosts alternate."""
    names = ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    found = placement(PLACES)
    assert [tuple(int(it[f"HOROVOD_{name}"]) for name in names) for it in found] == NUMBERS
    assert [it["HOROVOD_HOSTNAME"] for it in found] == list("abbc")
    assert {it["HOROVOD_SIZE"] for it in found} == {"4"}
    with pytest.raises(UsageError, match="--distribution=block"):
        placement([SlurmTask(0, "a", 0, 0), SlurmTask(1, "b", 1, 0), SlurmTask(2, "a", 0, 1)])


def steps(places: list[SlurmTask]) -> list[SlurmStep]:
    """A step on this machine; its identity, and so its ports, are its own."""
    identity = f"hvdtrain {uuid.uuid4()}"
    return [SlurmStep(place, len(places), "localhost", identity) for place in places]


@contextmanager
def meeting(
    tasks: list[SlurmStep], start: Callable[[list[Variables]], int], limit_s: float = LIMIT_S
) -> Iterator[list[Future[tuple[Variables, str]]]]:
    """Each task in a thread, the first one last."""
    with ThreadPoolExecutor(len(tasks)) as pool:
        yield [pool.submit(meet, task, start, limit_s) for task in reversed(tasks)][::-1]


def garble(listener: socket.socket) -> None:
    """Another program's server: it answers in its own way."""
    while True:
        try:
            connection = listener.accept()[0]
        except OSError:
            return
        with connection:
            connection.sendall(b"SSH-2.0-something\r\n")


def test_tasks_meet_among_strangers() -> None:
    """Fails if a task gets another's numbers or another rendezvous than the rest, if the rendezvous
    is started more than once, or if a port that is in use or a stranger's visit disturbs them.
    """
    tasks, started = steps(PLACES), []

    def start(ranks: list[Variables]) -> int:
        started.append(ranks)
        return 4321

    taken = socket.create_server(("", tasks[0].ports[0]))
    Thread(target=garble, args=[taken], daemon=True).start()
    with meeting(tasks[:1], start) as first:
        for text in (b"GET / HTTP/1.1\r\n\r\n", b'{"step": "x"}\n', b"[]\n", b""):
            visit(tasks[0].ports[1], text)
        forged = {"step": tasks[0].identity, "rank": 0, "host": "x", "node": 0, "local_rank": 0}
        visit(tasks[0].ports[1], json.dumps(forged).encode() + b"\n")
        with meeting(tasks[1:], start) as others:
            answers = [it.result() for it in [*first, *others]]
    taken.close()
    (ranks,) = started
    assert ranks == placement(PLACES)
    for (variables, address), numbers in zip(answers, ranks, strict=True):
        assert numbers.items() <= variables.items()
        assert variables["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "4321"
        assert variables["HOROVOD_CONTROLLER"] == variables["HOROVOD_CPU_OPERATIONS"] == "gloo"
        assert address == variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1"


def visit(port: int, text: bytes) -> None:
    """Say something to task 0, once it listens."""
    while True:
        try:
            with socket.create_connection(("localhost", port)) as connection:
                connection.sendall(text)
            return
        except ConnectionRefusedError:
            continue


def test_hosts_that_alternate_are_refused_everywhere() -> None:
    """Fails if any task waits, or starts, when Slurm has dealt ranks out in turns."""
    places = [SlurmTask(0, "a", 0, 0), SlurmTask(1, "b", 1, 0), SlurmTask(2, "a", 0, 1)]
    with meeting(steps(places), pytest.fail) as tasks:
        errors = [it.exception() for it in tasks]
    assert all(isinstance(error, UsageError) for error in errors)
    assert all("--distribution=block" in str(error) for error in errors)


def test_tasks_that_never_come_are_named() -> None:
    """Fails if the others wait for ever, or do not receive what is missing."""
    tasks = steps(PLACES)
    with meeting([tasks[0], tasks[2]], pytest.fail, limit_s=6) as present:
        errors = [it.exception() for it in present]
    assert all(isinstance(error, PreflightError) for error in errors)
    assert "of the 4 tasks of this step, 2 did not report" in str(errors[0])
    assert str(errors[0]).endswith("tasks 1, 3")
    assert "task 0 on localhost has ended, or not all 4 tasks" in str(errors[1])


def test_a_first_task_that_is_not_there() -> None:
    """Fails if the others wait for ever, or do not say where they looked for it."""
    task = steps(PLACES)[1]
    with pytest.raises(HvdtrainError, match="task 0 was not reached on localhost, ports") as caught:
        meet(task, pytest.fail, limit_s=0.5)
    assert caught.value.exit_code == 3
