"""Each check of the doctor: good facts pass it, and one change makes it warn or fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from hvdtrain.cgroups import KEYS
from hvdtrain.launcher.doctor import (
    ALL_HOSTS,
    Facts,
    Finding,
    checks,
    examination,
    failed,
    format_findings,
    format_verdict,
    gpu_checks,
    machine_checks,
)
from hvdtrain.launcher.doctor.ring import RingTrial, check_ring, last_words
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.ssh import SshOptions, SshSetup

GIB = 1 << 30
HOSTS = ("alpha", "beta", "gamma")
SLOTS = dict.fromkeys(HOSTS, 2)
LAUNCHER = [("lo", "127.0.0.1"), ("eth0", "10.0.0.9")]


def good(host: str) -> dict[str, Any]:
    """What a probe reports of a host on which everything is well."""
    return {
        "machine": f"boot-1 {host} net:[1] uts:[1]",
        "python": "3.11.7",
        "executable": "/env/bin/python",
        "packages": {"torch": "2.13.0", "torchvision": "0.28.0", "horovod": "0.28.1"},
        "torch_build": {"version": "2.13.0+cpu", "cuda": None},
        "horovod_built_for": "2.13.0+cpu",
        "hvdtrain": {"version": "0.1.0", "folder": "/src/hvdtrain", "sha256": "ab"},
        "user": {"name": "carol", "uid": 1000, "home": "/home/carol"},
        "working_directory": {"path": "/work", "usable": True},
        "interfaces": [("lo", "127.0.0.1"), ("eth0", f"10.0.0.{HOSTS.index(host) + 1}")],
        "channel": {"address": "10.0.0.9", "interface": "eth0", "tried": []},
        "mpi": "Open MPI 4.1.8",
        "gpus": {"list": [], "problem": None, "health": False, "selected": None},
        "horovod_loads": {
            "problem": None, "torch": "2.13.0", "cuda": None,
            "gloo": True, "mpi": True, "nccl": False, "gpu_tensors": False,
        },
        "torchvision_problem": None,
        "cores": {"all": 8, "usable": 8},
        "memory": {"total": 32 * GIB, "available": 30 * GIB},
        "cgroup": {
            "version": 2, **dict.fromkeys(KEYS),
        },
        "single_copy": True,
        "shm": {"path": "/dev/shm", "total": GIB, "free": GIB, "files_free": None},
        "limits": {"open_files": 65536, "locked_memory": 65536, "processes": None},
        "infiniband": False,
        "output": {
            "asked": "/work/runs", "path": "/work", "problem": None,
            "total": 100 * GIB, "free": 50 * GIB, "files_free": 10_000,
        },
        "speeds": {},
    }  # fmt: skip


def facts_of(change: Callable[[dict[str, Any]], object] = lambda beta: None) -> dict[str, Facts]:
    """Facts of three hosts, beta's changed."""
    all_facts = {host: good(host) for host in HOSTS}
    change(all_facts["beta"])
    return {host: Facts(values) for host, values in all_facts.items()}


def put(*path_and_value: Any) -> Callable[[dict[str, Any]], None]:
    """A change: facts[a][b] = value."""
    *path, last, value = path_and_value

    def change(facts: dict[str, Any]) -> None:
        for name in path:
            facts = facts[name]
        facts[last] = value

    return change


HERE = Facts(good("alpha"))
CHECKS: dict[str, Callable[[dict[str, Facts]], list[Finding]]] = {
    "python": lambda facts: checks.check_python(facts, HERE),
    "packages": lambda facts: checks.check_packages(facts, HERE),
    "built_for": machine_checks.check_built_for,
    "hvdtrain": lambda facts: checks.check_hvdtrain(facts, HERE),
    "user": lambda facts: checks.check_user(facts, HERE),
    "machine": lambda facts: checks.check_machines(facts, SLOTS),
    "path": machine_checks.check_working_directory,
    "channel": lambda facts: checks.check_channel(facts, HOSTS),
    "interface": lambda facts: checks.check_interface(facts, LAUNCHER)[1],
    "loads": machine_checks.check_horovod_loads,
    "torchvision": machine_checks.check_torchvision_loads,
    "mpi": lambda facts: machine_checks.check_mpi(facts, needed=False),
    "mpi needed": lambda facts: machine_checks.check_mpi(facts, needed=True),
    "gpus": lambda facts: gpu_checks.check_gpus(facts, SLOTS),
    "cores": lambda facts: machine_checks.check_cores(facts, SLOTS),
    "memory": lambda facts: machine_checks.check_memory(facts, SLOTS),
    "container": lambda facts: machine_checks.check_container(facts, SLOTS),
    "shm": machine_checks.check_shm,
    "limits": lambda facts: machine_checks.check_limits(facts, SLOTS),
    "output": lambda facts: machine_checks.check_output(facts, "alpha"),
    "output first": lambda facts: machine_checks.check_output(facts, "beta"),
    "ports": machine_checks.check_ports,
}


@pytest.mark.parametrize("name", CHECKS)
def test_good_facts_pass(name: str) -> None:
    """Fails when a check complains of hosts on which everything is well."""
    findings = CHECKS[name](facts_of())
    assert {finding.status for finding in findings} <= {"ok"}
    assert name in ("built_for", "torchvision") or findings  # else the version is stated


# check, change of beta's facts, status, part of the text, part of the fix
BAD = [
    ("python", put("python", "3.11.2"), "warn", "Python 3.11.2, but 3.11.7 on this", "/env/bin"),
    ("python", put("python", "3.12.7"), "fail", "Python 3.12.7, but 3.11.7", "same environment"),
    ("packages", put("packages", "torch", "2.12.0"), "fail", "2.12.0, but 2.13.0", "torch 2.13.0"),
    ("packages", put("packages", "torchvision", None), "fail", "not installed, but", "0.28.0"),
    ("packages", put("packages", "horovod", "0.27.0"), "fail", "0.27.0, but 0.28.1", "0.28.1"),
    (
        "torchvision",
        put("torchvision_problem", "RuntimeError: operator torchvision::nms does not exist"),
        *("warn", "beside torch: RuntimeError: operator", "the same package index"),
    ),
    ("built_for", put("horovod_built_for", "2.12.0"), "warn", "torch 2.12.0, but", "install-"),
    (
        "built_for",
        put("horovod_built_for", "2.13.0+cu130"),
        "warn",
        "+cu130, but torch 2",
        "install-",
    ),
    ("hvdtrain", put("hvdtrain", "version", "0.2.0"), "fail", "0.2.0, but 0.1.0", "same code"),
    ("hvdtrain", put("hvdtrain", "sha256", "cd"), "fail", "not the same code", "same code"),
    ("machine", put("machine", good("alpha")["machine"]), "fail", "machine as alpha", "alpha:4`"),
    ("user", put("user", "name", "dave"), "warn", "logs in as dave", "dave@beta"),
    (
        "path",
        put("working_directory", "usable", False),
        "fail",
        "no folder /work",
        "mkdir -p /work",
    ),
    (
        "channel",
        put("channel", {"address": None, "interface": None, "tried": [["10.0.0.9", "timed out"]]}),
        *("fail", "cannot connect back to this machine (10.0.0.9: timed out)", "firewall"),
    ),
    (
        "loads",
        put("horovod_loads", {"problem": "undefined symbol x"}),
        "fail",
        "symbol",
        "install-hor",
    ),
    ("loads", put("horovod_loads", "gloo", False), "warn", "without Gloo", "install-horovod"),
    ("mpi", put("mpi", None), "warn", "no mpirun", "gloo"),
    ("mpi needed", put("mpi", None), "fail", "no mpirun", "gloo"),
    ("gpus", put("gpus", "problem", "NVML: mismatch"), "fail", "NVML: mismatch", "driver"),
    ("cores", put("cores", "usable", 1), "warn", "2 slots, but 1 usable cores (of 8)", "container"),
    ("memory", put("memory", "available", GIB), "warn", "1.0 GiB of memory free for 2", "slots"),
    ("memory", put("memory", "available", GIB // 2), "fail", "512 MiB of memory free", "slots"),
    (
        "memory",
        lambda beta: beta["cgroup"].update(memory=2 * GIB, memory_used=GIB),
        *("warn", "1.0 GiB of memory free", "container's limit"),
    ),
    ("container", put("cgroup", "processes", 100), "warn", "allows 100 processes", "--pids-limit"),
    ("container", put("cgroup", "processes", 30), "fail", "allows 30 processes", "--pids-limit"),
    ("container", put("single_copy", False), "warn", "read each other's memory", "SYS_PTRACE"),
    ("shm", put("shm", "free", 64 << 20), "warn", "/dev/shm has 64 MiB free", "--shm-size"),
    ("shm", lambda beta: beta.pop("shm"), "fail", "no /dev/shm", "--ipc none"),
    ("limits", put("limits", "open_files", 256), "warn", "256 open files", "ulimit -n 1024"),
    ("limits", put("limits", "processes", 200), "warn", "200 processes", "ulimit -u 384"),
    ("limits", put("infiniband", True), "warn", "0 MiB locked memory", "ulimit -l unlimited"),
    ("output", put("output", "problem", "Permission denied"), "warn", "Permission denied", "--out"),
    ("output first", put("output", "problem", "Read-only"), "fail", "runs cannot be", "--output"),
    ("output", put("output", "free", GIB), "warn", "room for 1.0 GiB", "free some"),
    ("output first", put("output", "free", 5 << 20), "fail", "room for 5 MiB", "free some"),
    ("output first", put("output", "files_free", 3), "fail", "few more files", "free some"),
]


@pytest.mark.parametrize(("name", "change", "status", "text", "fix"), BAD)
def test_each_check_notices(name: str, change: Any, status: str, text: str, fix: str) -> None:
    """Fails when a check lets this pass, blames another host, or names no fix."""
    bad = [found for found in CHECKS[name](facts_of(change)) if found.status != "ok"]
    assert [(found.host, found.status) for found in bad] == [("beta", status)]
    assert text in bad[0].text
    assert fix in bad[0].fix


@pytest.mark.parametrize(
    ("name", "change", "status", "text"),
    [
        ("user", put("user", "uid", 1001), "warn", "different uids (alpha 1000, beta 1001"),
        ("mpi", put("mpi", "Open MPI 4.0.1"), "warn", "different versions: alpha Open MPI 4.1.8"),
        ("mpi needed", put("mpi", "Open MPI 4.0.1"), "fail", "beta Open MPI 4.0.1"),
        ("interface", put("channel", "address", "1.2.3.4"), "warn", "1.2.3.4, which is none of"),
    ],
)
def test_hosts_that_differ_from_one_another(name: str, change: Any, status: str, text: str) -> None:
    """Fails when what is wrong between hosts goes unnoticed."""
    (bad,) = CHECKS[name](facts_of(change))
    assert (bad.host, bad.status) == (ALL_HOSTS, status)
    assert text in bad.text
    assert bad.fix


def test_what_is_installed_nowhere() -> None:
    """Fails when hosts are taken for well because they all lack the same."""
    here = Facts(good("alpha") | {"packages": dict.fromkeys(("torch", "torchvision", "horovod"))})
    facts = dict.fromkeys(HOSTS, here)
    found = checks.check_packages(facts, here)
    assert [(item.check, item.status) for item in found] == [
        ("torch", "fail"),
        ("torchvision", "warn"),
        ("horovod", "fail"),
    ]
    none = facts_of()
    for host in none.values():
        dict.__setitem__(host.values, "mpi", None)  # type: ignore[arg-type]
    assert [item.text for item in machine_checks.check_mpi(none, False)] == [
        "no mpirun on PATH: --controller gloo only"
    ]


def test_open_mpi_5_is_refused() -> None:
    """Fails when an Open MPI passes that horovodrun's options do not fit."""
    facts = {"alpha": Facts({"mpi": "Open MPI 5.0.3"})}
    found = machine_checks.check_mpi(facts, needed=True)
    assert [(item.status, "fit Open MPI 4" in item.text) for item in found] == [("fail", True)]


def test_a_version_without_its_build_is_no_other_one() -> None:
    """Fails when the version of torch's package, which lacks the build, is compared with it."""
    built = {"horovod_built_for": "2.14.1+cu130", "packages": {"torch": "2.14.1"}}
    build = {"torch_build": {"version": "2.14.1+cu130", "cuda": "13.0"}}
    assert machine_checks.check_built_for({"alpha": Facts(built | build)}) == []
    other = {"torch_build": {"version": "2.14.1+cu128", "cuda": "12.8"}}
    (found,) = machine_checks.check_built_for({"alpha": Facts(built | other)})
    assert "for torch 2.14.1+cu130, but torch 2.14.1+cu128" in found.text


def test_the_host_with_least_is_shown() -> None:
    """Fails when room on one host hides that another has less."""
    facts = facts_of(put("memory", "available", 5 * GIB))
    (found,) = machine_checks.check_memory(facts, SLOTS)
    assert (found.status, found.text) == ("ok", "5.0 GiB or more free")


def test_a_user_that_the_hostfile_names_is_meant() -> None:
    """Fails when user@host in the hostfile is complained of."""
    facts = facts_of(put("user", "name", "dave"))
    assert [item.status for item in checks.check_user(facts, HERE, {"beta"})] == ["ok"]


def test_missing_facts_are_reported() -> None:
    """Fails when a check passes because its fact is missing, and no finding reports it."""
    facts = {"alpha": Facts({}, {"memory": "KeyError: 'MemTotal'", "ticket": "no"})}
    (found,) = checks.check_gathered(facts)
    assert (found.status, found.host) == ("warn", "alpha")
    assert "memory could not be determined: KeyError" in found.text


def test_a_ticket_that_could_not_be_written() -> None:
    """Fails when agents would find no ticket, and no finding reports it."""
    channel = good("alpha")["channel"]
    facts = {"alpha": Facts({"channel": channel}, {"ticket": "OSError: /x: Read-only"})}
    (found,) = checks.check_channel(facts, HOSTS)
    assert (found.status, "Read-only" in found.text) == ("fail", True)


def test_noise_on_standard_output() -> None:
    """Fails when what a login script prints goes unnoticed."""
    (found,) = checks.check_login_is_quiet({"alpha": (), "beta": ("Welcome!", "You have mail")})
    assert (found.status, found.host) == ("warn", "beta")
    assert "'Welcome!'" in found.text
    assert [item.status for item in checks.check_login_is_quiet({"alpha": ()})] == ["ok"]
    assert (
        checks.check_login_is_quiet({"alpha": ()}, silent=1)[0].text == "every other host answers"
    )
    assert checks.check_login_is_quiet({}) == []  # no host that is reached by ssh


@pytest.mark.parametrize(
    ("ahead", "uncertain", "status"),
    [(0.5, 0.001, "ok"), (-3.0, 0.1, "warn"), (3.0, 2.5, "ok"), (90.0, 0.1, "fail")],
)
def test_clocks(ahead: float, uncertain: float, status: str) -> None:
    """Fails when a wrong clock passes, or a slow connection is taken for one."""
    (found,) = machine_checks.check_clocks({"beta": (ahead, uncertain)})
    assert found.status == status
    assert status == "ok" or ("ahead" if ahead > 0 else "behind") in found.text


def test_latency() -> None:
    """Fails when a slow connection passes."""
    assert [item.status for item in checks.check_latency({"a": 0.002, "b": 0.003})] == ["ok"]
    (found,) = checks.check_latency({"a": 0.002, "b": 0.9})
    assert (found.status, found.host, "900 ms" in found.text) == ("warn", "b", True)


def test_file_systems() -> None:
    """Fails when a folder that one host alone has is taken for shared."""
    assert machine_checks.check_shared({}, "alpha", "/work/runs") == []
    (found,) = machine_checks.check_shared({"beta": True, "gamma": True}, "alpha", "/runs")
    assert found.status == "ok"
    (found,) = machine_checks.check_shared({"beta": True, "gamma": False}, "alpha", "/runs")
    assert (found.status, "not shared with gamma" in found.text) == ("warn", True)


def tries(**problems: str) -> dict[str, list[dict[str, Any]]]:
    """Every pair's tries over eth0 and docker0; `problems`: FROM_TO_INTERFACE=what goes wrong.

    docker0 has the same address on all hosts, so that whoever connects to it finds himself.
    """
    return {
        source: [
            {
                "host": target,
                "interface": interface,
                "address": f"{interface} of {target}",
                "seconds": 0.001,
                "problem": problems.get(f"{source}_{target}_{interface}", usual),
            }
            for target in HOSTS
            if target != source
            for interface, usual in (("eth0", None), ("docker0", "another machine answers"))
        ]
        for source in HOSTS
    }


def judge(facts: dict[str, Facts], reached: Any, wanted: str | None = None) -> list[Finding]:
    usable = checks.find_usable(facts, reached)
    pairs = checks.check_pairs(facts, reached, usable)
    return pairs if failed(pairs) else [*pairs, *checks.check_route(facts, usable, wanted)]


def test_every_pair_is_joined() -> None:
    """Fails when the interface that joins all hosts is not the one proposed."""
    found = judge(facts_of(), tries())
    assert [(item.check, item.status) for item in found] == [("network", "ok"), ("interface", "ok")]
    assert found[1].text == "Horovod should use eth0"


def test_one_pair_is_cut_one_way() -> None:
    """Fails when a pair that cannot connect in one direction goes unnoticed."""
    (found,) = judge(facts_of(), tries(beta_gamma_eth0="timed out"))
    assert (found.check, found.status, found.host) == ("network", "fail", "beta")
    assert "gamma (eth0 of gamma: timed out; docker0 of gamma: another machine" in found.text


def test_names_that_differ() -> None:
    """Fails when hosts that reach one another by interfaces of several names are refused."""
    reached = tries()
    for source in ("alpha", "gamma"):
        for attempt in reached[source]:
            if attempt["host"] == "beta" and attempt["interface"] == "eth0":
                attempt["interface"] = "ens3"
    found = judge(facts_of(put("interfaces", [("lo", "127.0.0.1"), ("ens3", "10.0.0.2")])), reached)
    assert [(item.check, item.status) for item in found] == [
        ("network", "ok"),
        ("interface", "ok"),
    ]
    assert "alpha: eth0; beta: ens3; gamma: eth0" in found[1].text
    own, (finding,) = checks.check_interface(
        facts_of(put("channel", "interface", "ens3")), LAUNCHER
    )
    assert (own, finding.status) == ("eth0", "ok")
    assert "beta: ens3 to this machine's eth0" in finding.text


def test_the_interface_asked_for() -> None:
    """Fails when an interface passes that does not join the hosts."""
    (_, found) = judge(facts_of(), tries(), wanted="docker0")
    assert (found.status, found.fix) == ("fail", "--network-interface eth0")
    (_, found) = judge(facts_of(), tries(), wanted="eth0")
    assert found.status == "ok"


def test_the_faster_interface_is_best() -> None:
    """Fails when the slow network or a container's bridge is proposed first."""
    reached = tries()
    for source, attempts in tries().items():
        reached[source] += [a | {"interface": "ib0", "seconds": 0.1} for a in attempts if a]
        reached[source] += [a | {"interface": "br-1", "seconds": 0.0} for a in attempts if a]
        for attempt in reached[source]:
            attempt["problem"] = None
    facts = {host: Facts({"speeds": {"eth0": 1000, "ib0": 100_000}}) for host in HOSTS}
    assert list(checks.find_usable(facts, reached)) == ["ib0", "eth0", "br-1", "docker0"]


def test_no_port_to_listen_on() -> None:
    """Fails when a host that cannot listen passes."""
    (found,) = machine_checks.check_ports({"alpha": Facts({}, {"listener": "OSError: in use"})})
    assert (found.status, found.host) == ("fail", "alpha")


class GoodSession:
    """Stands for the probe of a host on which everything is well."""

    local, noise = False, ()

    def __init__(self, host: Host) -> None:
        self.host = host
        self._answers = {"reach": tries()[host.name], "leave": True, "look": True}

    def ask(self, request: dict[str, Any], deadline: float) -> Facts:
        now = {"began": time.time(), "ended": time.time(), "listener": {}}
        return Facts(good(self.host.name) | now | self._answers)

    def ask_again(self, request: dict[str, Any]) -> Facts:
        return self.ask(request, 0.0)

    def ask_or_explain(self, request: dict[str, Any], limit_s: float, small: bool) -> Facts:
        return self.ask(request, limit_s)


@pytest.mark.parametrize(
    ("addresses", "text"),
    [
        (["10.0.0.2", "10.0.0.3"], "also of 10.0.0.3"),
        (["10.0.0.2", "127.0.0.1"], ""),  # two of its own
        (["192.0.2.1", "192.0.2.2"], ""),  # of a machine that others know by translated addresses
        (["10.0.0.3"], ""),
    ],
)
def test_a_name_of_several_machines(addresses: list[str], text: str) -> None:
    """Fails when a name passes by which each connection may reach another machine, or one does not
    that is a single machine's.
    """
    facts = facts_of(put("interfaces", [("lo", "127.0.0.1"), ("eth0", "10.0.0.2")]))
    found = checks.check_names(facts, {"beta": addresses})
    assert [(it.host, it.status) for it in found] == [("beta", "fail")] * bool(text)
    assert text in "".join(it.text for it in found)


def test_every_check_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a check of the three modules is never called, or one complains of good hosts."""

    @contextmanager
    def sessions_of(hosts: list[Host], ssh: SshSetup) -> Iterator[dict[str, GoodSession]]:
        yield {host.address: GoodSession(host) for host in hosts}

    defined, called = set[str](), set[str]()
    for module in (checks, gpu_checks, machine_checks):
        for name in [name for name in vars(module) if name.startswith("check_")]:

            def noting(*given: Any, name: str, check: Any, **named: Any) -> Any:
                called.add(name)
                return check(*given, **named)

            defined.add(name)
            check = partial(noting, name=name, check=getattr(module, name))
            monkeypatch.setattr(module, name, check)
    monkeypatch.setattr(examination, "open_sessions", sessions_of)
    monkeypatch.setattr(examination, "gather", lambda sources: {"values": good("alpha")})
    monkeypatch.setattr(examination, "interfaces", lambda: LAUNCHER)
    hosts = [Host(name, 2) for name in HOSTS]
    with SshSetup(hosts, SshOptions()) as ssh:
        with sessions_of(hosts, ssh) as sessions:
            quick = examination.preflight(sessions, ssh, 1, None, 1.0)
        found = examination.examine(hosts, ssh, "runs", ring=False)
    assert called == defined
    assert [item for item in (*quick.findings, *found.findings) if item.status != "ok"] == []


def case_of(count: int, submission: str, seconds: float, speed: float) -> dict[str, Any]:
    """A case of `hvdtrain verify`."""
    fields = {"bytes": count, "submission": submission, "seconds": seconds, "device": "cpu"}
    return fields | {"bus_bandwidth_bytes_per_s": speed}


CASES = [
    case_of(4, "together", 9.0, 1.0),
    case_of(4, "alone", 0.002, 3e3),
    case_of(4 << 20, "alone", 1.0, 5e8),
]
ON_GPUS = [it | {"device": "cuda"} for it in CASES[1:]]


@pytest.mark.parametrize(
    ("code", "output", "measured", "status", "text"),
    [
        (0, "", {"wrong": 0, "cases": CASES}, "ok", "4 bytes in 2.0 ms, bus bandwidth 500 MB/s"),
        (
            *(0, "", {"wrong": 0, "nccl": True, "cases": [*CASES, *ON_GPUS]}, "ok"),
            "500 MB/s; on GPUs by NCCL 4 bytes in 2.0 ms, bus bandwidth 500 MB/s",
        ),
        (0, "", {"wrong": 0, "cases": [*CASES, ON_GPUS[0]]}, "fail", "exit code 0: no output"),
        (0, "", None, "fail", "exit code 0: no output"),
        (None, "[0]<stderr>:waiting\n", None, "fail", "timed out: waiting"),
        (1, "[1]<stderr>:bash: x: command not found\nend", None, "fail", "x: command not found"),
        (17, "hvdtrain: error: sum is off\nend", None, "fail", "sums are wrong: hvdtrain: error"),
        (1, "Process 0 exit with status code 17.", None, "fail", "sums are wrong"),
        (1, "Exit code:    17\n", None, "fail", "sums are wrong"),
        (1, "", {"wrong": 2, "cases": CASES}, "fail", "sums are wrong"),
        (1, "Exit code: 1\n", {"wrong": 0, "cases": []}, "fail", "ended with exit code 1"),
    ],
)
def test_the_ring(code: Any, output: str, measured: Any, status: str, text: str) -> None:
    """Fails when a ring that went wrong passes, or wrong sums are reported as anything else."""
    (found,) = check_ring(RingTrial(3, "gloo", code, output, measured))
    assert found.status == status
    assert text in found.text
    assert status == "ok" or found.fix


def test_last_words_name_the_cause() -> None:
    """Fails when the launcher's farewell is shown instead of the worker's error."""
    output = "[1,0]<stderr>:a\n[1,1]<stderr>:hvdtrain: error: no\nPrimary job terminated\n"
    assert last_words(output) == "hvdtrain: error: no"


def test_reporting() -> None:
    """Fails when hosts with the same finding are listed separately, or a fix is lost."""
    same = [Finding("shm", "warn", host, "small", "enlarge") for host in ("alpha", "beta")]
    findings = [Finding("python", "ok", ALL_HOSTS, "Python 3.11.7"), *same]
    assert format_findings(findings).splitlines() == [
        "ok    python          Python 3.11.7",
        "warn  shm             alpha, beta: small",
        "                      fix: enlarge",
    ]
    assert format_verdict(findings, 1.0) == "doctor: ready to train (2 warn, 1 ok; 1.0 s)"
    findings.append(Finding("ssh", "fail", "gamma", "refused"))
    assert "problems found (1 fail, 2 warn, 1 ok" in format_verdict(findings, 1.0)
