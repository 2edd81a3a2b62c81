"""Hosts from Slurm's environment and from the MPI Operator's file."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.errors import UsageError
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.sites import hosts_of_site

NOWHERE = Path("/nonexistent/hostfile")
QUICK_S = 20.0  # generous on a loaded machine; what is unbounded takes minutes or never ends


def slurm(nodes: str, **more: str) -> list[tuple[str, int]]:
    """(name, slots) of the hosts of a Slurm job; names of variables without SLURM_."""
    variables = {f"SLURM_{name}": value for name, value in more.items()}
    hosts = hosts_of_site({"SLURM_JOB_NODELIST": nodes, **variables}, NOWHERE)
    assert {host.source for host in hosts} == {"SLURM_JOB_NODELIST"}
    return [(host.name, host.slots) for host in hosts]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("alpha", "alpha"),
        ("alpha,beta", "alpha beta"),
        ("gpu[1-3]", "gpu1 gpu2 gpu3"),
        ("gpu[008-010,12],login1", "gpu008 gpu009 gpu010 gpu12 login1"),
        ("gpu[98-101]", "gpu98 gpu99 gpu100 gpu101"),
        ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
        ("a[1,3]-ib,b[7]", "a1-ib a3-ib b7"),
        ("c[1-2].example.org", "c1.example.org c2.example.org"),
    ],
)
def test_names_of_slurm(nodes: str, expected: str) -> None:
    """Fails when a list of hosts is expanded otherwise than `scontrol show hostnames` does."""
    assert slurm(nodes) == [(name, 1) for name in expected.split()]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TASKS_PER_NODE": "2(x3),1"}, [2, 2, 2, 1]),
        ({"TASKS_PER_NODE": "2(x2),1,4"}, [2, 2, 1, 4]),
        ({"TASKS_PER_NODE": "4(x4)", "JOB_CPUS_PER_NODE": "64(x4)"}, [4, 4, 4, 4]),
        ({"TASKS_PER_NODE": "1(x4)", "NTASKS_PER_NODE": "2"}, [1, 1, 1, 1]),
        ({"NTASKS_PER_NODE": "2", "JOB_CPUS_PER_NODE": "64(x4)"}, [2, 2, 2, 2]),
        ({"JOB_CPUS_PER_NODE": "8(x3),2"}, [8, 8, 8, 2]),
        ({"JOB_CPUS_PER_NODE": "8(x3),2", "CPUS_PER_TASK": "3"}, [2, 2, 2, 1]),
        ({}, [1, 1, 1, 1]),
        ({"STEP_NUM_TASKS": "1", "HET_SIZE": "1"}, [1, 1, 1, 1]),
    ],
)
def test_slots_of_slurm(variables: dict[str, str], expected: list[int]) -> None:
    """Fails when slots are read from the wrong variable, or go to the wrong hosts."""
    assert [slots for _, slots in slurm("n[1-4]", **variables)] == expected


@pytest.mark.parametrize(
    ("nodes", "variables", "expected"),
    [
        ("a[1-3", {}, "not a list of hosts as Slurm writes it"),
        ("a]", {}, "not a list of hosts"),
        ("a[[1]]", {}, "not a list of hosts"),
        ("a,,b", {}, "not a list of hosts"),
        (",", {}, "no hosts in it"),
        ("a[]", {}, "'' is not a range"),
        ("a[3-1]", {}, "'3-1' is not a range"),
        ("a[1-x]", {}, "'1-x' is not a range"),
        ("a[1x2]", {}, "'1x2' is not a range"),
        ("a[\u0661-\u0663]", {}, "is not a range"),
        ("a[1-3],a2", {}, "a2 is already listed"),
        ("[1-2]", {}, "'1': a number is not a host's name"),
        ("$(id)", {}, "not allowed in a host's name"),
        ("-l", {}, "does not begin with '-'"),
        ("a[1-3]", {"TASKS_PER_NODE": "2"}, "covers 1 host, but SLURM_JOB_NODELIST has 3"),
        ("a[1-3]", {"TASKS_PER_NODE": "2(x4)"}, "covers more hosts"),
        ("a", {"TASKS_PER_NODE": "2(x1000000000)"}, "not a list of counts"),
        ("a", {"TASKS_PER_NODE": "2(x999999999)"}, "covers more hosts"),
        ("a", {"TASKS_PER_NODE": "two"}, "SLURM_TASKS_PER_NODE='two': not a list of counts"),
        ("a", {"TASKS_PER_NODE": "0"}, "a host has 1 to 65,536 slots"),
        ("a", {"TASKS_PER_NODE": "65537"}, "a host has 1 to 65,536 slots"),
        ("a", {"NTASKS_PER_NODE": "x"}, "SLURM_NTASKS_PER_NODE='x'"),
        ("a", {"JOB_CPUS_PER_NODE": "8", "CPUS_PER_TASK": "0"}, "SLURM_CPUS_PER_TASK='0'"),
        ("a", {"STEP_NUM_TASKS": "4"}, "srun --ntasks-per-node=1"),
        ("a", {"HET_SIZE": "2"}, "heterogeneous job"),
    ],
)
def test_bad_slurm(nodes: str, variables: dict[str, str], expected: str) -> None:
    """Fails when such an environment gives hosts, or a message that does not name its fault."""
    with pytest.raises(UsageError) as caught:
        slurm(nodes, **variables)
    assert expected in str(caught.value)
    assert "SLURM_" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "nodes",
    [
        "a[0-999999999999]",
        "a[1-16385]",
        "a[1-16384],b",
        "a[1-16384][1-16384]",
        "a" + "[1-2]" * 10_000,
        "p" * 100_000 + "[1-16384]",
        "[1-1]" * 20_000,
        "a[" * 50_000,
        "[" * 100_000,
        "," * 100_000,
        "a[" + "1-9," * 25_000,
    ],
    ids=lambda nodes: nodes[:20],
)
def test_slurm_lists_without_end_are_refused_early(nodes: str) -> None:
    """Fails when such a list is expanded before it is counted: it would fill the memory."""
    start = time.monotonic()
    with pytest.raises(UsageError) as caught:
        slurm(nodes)
    assert time.monotonic() - start < QUICK_S
    assert len(str(caught.value)) < 500


@settings(deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(0, 20), st.integers(1, 7), st.integers(1, 9)),
        min_size=1,
        max_size=5,
    )
)
def test_slurm_reads_back(groups: list[tuple[int, int, int, int]]) -> None:
    """Fails when hosts and slots packed as Slurm packs them do not come back as they were."""
    packed, tasks, expected = [], [], []
    for letter, (first, more, width, slots) in zip("abcde", groups, strict=False):
        names = [f"{letter}{first + step:0{width}d}" for step in range(more + 1)]
        packed.append(f"{letter}[{first:0{width}d}-{first + more:0{width}d}]")
        tasks.append(f"{slots}(x{len(names)})" if more else str(slots))
        expected += [(name, slots) for name in names]
    assert slurm(",".join(packed), TASKS_PER_NODE=",".join(tasks)) == expected


@settings(deadline=None, max_examples=60)
@given(
    nodes=st.text(max_size=60) | st.text("ab[]-,019x(", min_size=1, max_size=30),
    tasks=st.text("0129x(),", max_size=12) | st.text(max_size=12),
)
def test_any_slurm_environment(nodes: str, tasks: str) -> None:
    """Fails when any values raise something else than UsageError."""
    environment = {"SLURM_JOB_NODELIST": nodes, "SLURM_TASKS_PER_NODE": tasks}
    try:
        hosts = hosts_of_site(environment, NOWHERE)
    except UsageError as error:
        assert str(error).isascii()
    else:
        assert bool(hosts) == bool(nodes)


def test_which_site(tmp_path: Path) -> None:
    """Fails when hosts are found where there is no site, or one site hides another wrongly."""
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("worker slots=2\n")
    assert hosts_of_site({}, NOWHERE) == ()
    assert hosts_of_site({"SLURM_JOB_NODELIST": ""}, NOWHERE) == ()
    assert hosts_of_site({}, hostfile) == (Host("worker", 2, None, f"{hostfile}:1"),)
    assert hosts_of_site({"SLURM_JOB_NODELIST": "new"}, hostfile)[0].name == "new"
    hostfile.write_text("# none yet\n")
    with pytest.raises(UsageError, match="no hosts in it"):
        hosts_of_site({}, hostfile)
