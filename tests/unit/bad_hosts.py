"""Bad hostfiles, hosts and flags of `hvdtrain doctor`, and what must be reported for each.

Tried by tests/unit/cli/test_launch_bad_input.py.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.bad_launches import Setup, case, folder, launch, write
from tests.unit.sshd import ADDRESS

PORT_OF_NOBODY = "1"


def hostfile(name: str, lines: str | bytes, expected: str) -> Any:
    """A file `hosts`, whose second line is the bad one if there are two."""
    return case(
        f"hostfile-{name}", "launch --hostfile hosts -- train", expected, 2, write("hosts", lines)
    )


def hosts(name: str, text: str, expected: str) -> Any:
    return case(f"hosts-{name}", f"launch -H {shlex.quote(text)} -- train", expected)


def slurm(name: str, expected: str, **variables: str) -> Any:
    """A job of two hosts with two tasks each, but for these variables."""

    def setup(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        good = {"JOB_NODELIST": "gpu[1-2]", "TASKS_PER_NODE": "2(x2)"}
        for key, value in (good | variables).items():
            monkeypatch.setenv(f"SLURM_{key}", value)

    return case(f"slurm-{name}", "launch -- train", expected, 2, setup)


def in_job_of_torchrun(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "2")


def doctor(name: str, flags: str, expected: str, code: int = 2, setup: Setup | None = None) -> Any:
    return case(f"doctor-{name}", f"doctor --no-ring {flags}", expected, code, setup)


def without_ssh(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(here))


CASES = [
    # hosts of a file
    launch(
        "hostfile-missing",
        "--hostfile no/hosts -- train",
        "no/hosts: there is no such hostfile; check the path",
    ),
    launch(
        "hostfile-folder",
        "--hostfile hosts -- train",
        "hosts: is a folder; a hostfile is a text",
        2,
        folder("hosts"),
    ),
    launch(
        "hostfile-and-H",
        "--hostfile hosts -H a -- train",
        "-H/--hosts: not allowed with argument --hostfile",
        2,
        write("hosts", "a\n"),
    ),
    hostfile(
        "empty", "", "hosts: no hosts in it; write one line for each host, such as `alpha slots=2`"
    ),
    hostfile("comments", "# alpha slots=2\n\n// beta\n", "hosts: no hosts in it"),
    hostfile(
        "bytes", b"alpha\n\x00\x01\x02", "hosts:2: holds a zero byte, so this is not a text file"
    ),
    hostfile("large", "# x\n" * 300_000, "hosts: larger than 1 MiB; is this really a hostfile?"),
    hostfile("long-line", "alpha\n" + "b " * 4000, "hosts:2: longer than 4,096 characters"),
    hostfile(
        "slots-0",
        "alpha\nbeta slots=0",
        "hosts:2: 'slots=0': the number of slots must be a whole number from 1 to 65,536",
    ),
    hostfile("slots-word", "alpha\nbeta slots=two", "hosts:2: 'slots=two': the number of slots"),
    hostfile("slots-many", "alpha\nbeta slots=65537", "hosts:2: 'slots=65537': |65,536"),
    hostfile("slots-missing", "alpha\nbeta slots=", "hosts:2: 'slots=': the number of slots"),
    hostfile(
        "slots-twice",
        "alpha\nbeta:2 slots=2",
        "hosts:2: 'slots=2': the number of slots is given twice",
    ),
    hostfile(
        "max-slots",
        "alpha\nbeta slots=4 max_slots=2",
        "hosts:2: slots=4 is above max_slots=2; lower one or raise",
    ),
    hostfile(
        "unknown-word",
        "alpha\nbeta slots=2 cores=4 fast",
        "hosts:2: 'cores=4', 'fast': not understood; |slots=N, max_slots=N or username=NAME",
    ),
    hostfile(
        "no-name", "alpha\nslots=2", "hosts:2: 'slots=2': the name of a host must come before it"
    ),
    hostfile(
        "rankfile", "alpha\nrank 0=beta slot=1", "hosts:2: '0=beta', 'slot=1': not understood"
    ),
    hostfile("excluded", "alpha\n^beta", "hosts:2: '^beta': '^' not allowed in a host's name"),
    hostfile("option", "alpha\n-oProxyCommand=x", "hosts:2: |'-oProxyCommand=x'"),
    hostfile(
        "letters", "alpha\nb\u00fccher", "hosts:2: 'b\\xfccher': a host's name is ASCII; |xn--"
    ),
    hostfile("number", "alpha\n4", "hosts:2: '4': a number is not a host's name"),
    hostfile("ipv4", "alpha\n10.0.0.400", "hosts:2: '10.0.0.400': not an IPv4 address"),
    hostfile("ipv6", "alpha\nfe80::1::2", "hosts:2: 'fe80::1::2': not an IPv6 address|[fe80::1]:2"),
    hostfile("brackets", "alpha\n[beta]:2", "hosts:2: '[beta]:2': brackets hold an IPv6 address"),
    hostfile("user", "alpha\n@beta", "hosts:2: the user's name before @ is missing"),
    hostfile(
        "user-letters",
        "alpha\na;b@beta",
        "hosts:2: 'a;b': a user's name consists of |~/.ssh/config",
    ),
    hostfile(
        "two-users",
        "alpha\nann@beta username=bob",
        "hosts:2: 'username=bob': the user is 'ann' already",
    ),
    hostfile(
        "duplicate",
        "alpha\nAlpha slots=2",
        "hosts:2: Alpha is already listed at hosts:1|keep one of the two",
    ),
    hostfile(
        "duplicate-ipv6", "fe80::1\nfe80:0::1", "hosts:2: fe80:0::1 is already listed at hosts:1"
    ),
    hostfile(
        "all-lines",
        "a:0\nb\n4\nb slots=2\n",
        "hosts:1: 'a:0'|hosts:3: '4'|hosts:4: b is already listed at hosts:2",
    ),
    # hosts of -H
    hosts("empty", "", "-H: entry 1: is empty; hosts are separated by one comma"),
    hosts("commas", "a,,b", "-H: entry 2: is empty; hosts are separated by one comma"),
    hosts("slots", "a:2,b:x", "-H: entry 2: 'b:x': the number of slots must be a whole number"),
    hosts("spaces", "a:2 b:2", "-H: entry 1: "),
    hosts("twice", "a:2,b,a", "-H: a is already listed; keep one of the two"),
    hostfile(
        "port",
        "alpha port=2222",
        "hosts:1: 'port=2222': the port of one host|`Port` below `Host NAME`",
    ),
    hosts("all", "a:0,4,-x", "-H: entry 1: 'a:0'|-H: entry 2: '4'|-H: entry 3: '-x'"),
    # hosts of Slurm
    slurm(
        "list",
        "SLURM_JOB_NODELIST='gpu[1-': not a list of hosts|-H or --hostfile",
        JOB_NODELIST="gpu[1-",
    ),
    slurm("range", "SLURM_JOB_NODELIST: '[3-1]': '3-1' is not a range", JOB_NODELIST="gpu[3-1]"),
    slurm(
        "counts",
        "SLURM_TASKS_PER_NODE='2(x3)': covers more hosts, but SLURM_JOB_NODELIST has 2",
        TASKS_PER_NODE="2(x3)",
    ),
    slurm("words", "SLURM_TASKS_PER_NODE='two': not a list of counts", TASKS_PER_NODE="two"),
    slurm(
        "srun",
        "SLURM_STEP_NUM_TASKS='4': srun has started that many copies|one on each host",
        STEP_NUM_TASKS="4",
    ),
    slurm("het", "SLURM_HET_SIZE: this is a heterogeneous job|-H or --hostfile", HET_SIZE="2"),
    launch(
        "one-machine",
        "-H localhost:1,127.0.0.1:2 -- train",
        "127.0.0.1: machine: is the same machine as localhost|`-H localhost:3`, or",
        3,
    ),
    case(
        "one-host-of-several",
        "launch -np 4 -- train",
        "PET_NNODES=2: this is one of several hosts or processes|-H or --hostfile|-H localhost:4",
        2,
        in_job_of_torchrun,
    ),
    # hosts that cannot be reached
    launch(
        "unreachable",
        f"-H {ADDRESS} -p {PORT_OF_NOBODY} -- train",
        f"{ADDRESS}: ssh: |refused|sshd",
        3,
    ),
    launch("unresolved", "-H nowhere.invalid -- train", "nowhere.invalid: ssh: |resolve", 3),
    launch(
        "no-ssh",
        f"-H {ADDRESS} -- train",
        f"{ADDRESS}: ssh: |there is no ssh command on this machine|openssh-client",
        3,
        without_ssh,
    ),
    launch(
        "both-unreachable",
        f"-H {ADDRESS},nowhere.invalid -p {PORT_OF_NOBODY} -- {sys.executable} x",
        f"{ADDRESS}: ssh: |nowhere.invalid: ssh: ",
        3,
    ),
    # doctor
    doctor("flag", "--wild", "--wild|hvdtrain doctor --help"),
    *(
        doctor(f"burn-in-{value}", f"--burn-in={value}", f"--burn-in={value}: must be a number of")
        for value in ("0", "-1", "nan", "inf")
    ),
    doctor("word", "hosts", "not understood: hosts (see hvdtrain doctor --help)"),
    doctor(
        "hostfile", "--hostfile no/hosts", "no/hosts: there is no such hostfile; check the path"
    ),
    doctor(
        "hostfile-line",
        "--hostfile hosts",
        "hosts:2: 'b:0': |hosts:3: '7': ",
        2,
        write("hosts", "a\nb:0\n7\n"),
    ),
    doctor("H", "-H a:x,,b", "-H: entry 1: 'a:x': |-H: entry 2: is empty"),
    doctor(
        "both",
        "-H a --hostfile hosts",
        "--hostfile/-hostfile: not allowed with argument -H/--hosts",
        2,
        write("hosts", "a\n"),
    ),
    doctor("port", "-p 70000", "--ssh-port=70000: must be from 1 to 65535"),
    doctor("identity", "-i no/key", "--ssh-identity-file=no/key: there is no such file"),
    doctor(
        "interface",
        "--network-interface 'a b'",
        "--network-interface=a b: not a valid name of a network interface",
    ),
    doctor("controller", "--controller ucx", "--controller: invalid choice: 'ucx'"),
    doctor("json-folder", "--json .", "--json=.: cannot be written"),
    doctor("json-nowhere", "--json no/such/file", "--json=no/such/file: cannot be written"),
    doctor(
        "all-at-once",
        "-p 0 -H a:0 --json . --wild",
        "--wild|--ssh-port=0: |-H: entry 1: |--json=.: ",
    ),
    doctor("unreachable", f"-H {ADDRESS} -p {PORT_OF_NOBODY}", f"{ADDRESS}|refused", 3),
    doctor("unresolved", "-H nowhere.invalid", "nowhere.invalid|resolve", 3),
]
