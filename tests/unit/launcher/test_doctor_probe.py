"""What the doctor's probe finds on a host: on made-up machines, and on this one."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvdtrain.launcher import addresses
from hvdtrain.launcher import protocol as tickets
from hvdtrain.launcher.doctor import facts, probe
from hvdtrain.launcher.doctor.ring import ring_environment, run_ring
from hvdtrain.launcher.ssh import SshOptions, SshSetup
from tests.unit.folders import write
from tests.unit.programs import put


def test_memory_and_speeds(tmp_path: Path) -> None:
    """Fails when the kernel's kilobytes, or an interface that is down (-1), are misread."""
    files = {
        "proc/meminfo": "MemTotal:  100 kB\nMemFree:   10 kB\nMemAvailable:  60 kB\n",
        "sys/class/net/eth0/speed": "1000\n",
        "sys/class/net/eth1/speed": "-1\n",
    }
    root = write(tmp_path, files)
    assert facts.memory(root) == {"total": 102_400, "available": 61_440}
    assert facts.link_speeds(root) == {"eth0": 1000}


def test_limits_of_this_process() -> None:
    """Fails when the hard limit is taken, or unlimited for a number."""
    program = (
        "import resource as r, json\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (99, r.getrlimit(r.RLIMIT_NOFILE)[1]))\n"
        "from hvdtrain.launcher.doctor.facts import limits\n"
        "print(json.dumps(limits()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    found = json.loads(done.stdout)
    assert found["open_files"] == 99
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    assert found["processes"] == (None if hard == resource.RLIM_INFINITY else hard)


def test_output_folders(tmp_path: Path) -> None:
    """Fails when a folder that cannot be written passes, or the check leaves something there."""
    asked = tmp_path / "a" / "runs"
    found = facts.output_folder(asked)
    assert (found["asked"], found["path"], found["problem"]) == (str(asked), str(tmp_path), None)
    assert list(tmp_path.iterdir()) == []
    read_only = facts.output_folder(Path("/proc/runs"))
    assert read_only["path"] == "/proc"
    assert read_only["problem"]


def test_every_fact_of_this_machine_is_available(tmp_path: Path) -> None:
    """Fails when a fact breaks here, on an ordinary machine."""
    found = facts.gather(
        facts.quick_sources(["/gone", str(tmp_path)]) | facts.slow_sources(str(tmp_path))
    )
    assert found["errors"] == {}
    values = found["values"]
    assert values["working_directory"] == {"path": str(tmp_path), "usable": True}
    assert ["lo", "127.0.0.1"] in [list(pair) for pair in values["interfaces"]]
    assert values["executable"] == sys.executable


def test_a_machine_is_known_by_its_boot_name_and_namespaces(tmp_path: Path) -> None:
    """Fails if one machine is two, or two containers of one kernel are one: by network, or name."""

    def found(boot: str, net: str, uts: str) -> str | None:
        root = write(tmp_path / f"{boot}{net}{uts}", {"proc/sys/kernel/random/boot_id": boot})
        (root / "proc/self/ns").mkdir(parents=True)
        for name, target in (("net", net), ("uts", uts)):
            (root / "proc/self/ns" / name).symlink_to(target)
        return facts.machine(root)

    each = [found(*values) for values in ("abc", "xbc", "axc", "abx")]
    assert len({*each, None}) == 5 and all(socket.gethostname() in str(it) for it in each)
    assert facts.machine(tmp_path) is None  # not readable: not compared


def test_one_broken_fact_leaves_the_others() -> None:
    """Fails when what cannot be found out takes the other facts with it."""

    def broken() -> None:
        raise ZeroDivisionError("no")

    found = facts.gather({"a": broken, "b": lambda: 1})
    assert found == {"values": {"b": 1}, "errors": {"a": "ZeroDivisionError: no"}}


def test_changed_code_shows(tmp_path: Path) -> None:
    """Fails when two checkouts of one version cannot be distinguished."""
    root = write(tmp_path, {"a.py": "x = 1\n", "b/c.py": "", "notes.txt": "1"})
    before = facts.source_hash(root)
    write(root, {"notes.txt": "2"})
    assert facts.source_hash(root) == before
    write(root, {"b/c.py": "y = 2\n"})
    assert facts.source_hash(root) != before


def test_interfaces_are_those_of_psutil() -> None:
    """Fails when hosts are judged local by other addresses than horovodrun's, which asks psutil."""
    expected = {
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }
    assert set(addresses.interfaces()) == expected


def test_programs_that_report_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when the answers of mpirun are misread."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(facts.shutil, "which", which_in(tmp_path))
    assert facts.mpi_version() is None
    put(tmp_path, "mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    assert facts.mpi_version() == "Open MPI 4.1.4"
    put(tmp_path, "mpirun", "echo 'HYDRA build details:'")
    assert facts.mpi_version() == "HYDRA build details:"


def test_the_build_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when the build (+cu130) or its CUDA is lost, or torch is imported for it."""
    loaded = str(metadata.version("torch"))
    found = facts.torch_build()
    assert found is not None and str(found["version"]).partition("+")[0] == loaded.partition("+")[0]
    version = "__version__ = '2.14.1+cu130'\ncuda = '13.0'\n"
    broken = {"torch/__init__.py": "raise ImportError", "torch/version.py": version}
    write(tmp_path, broken)
    program = "from hvdtrain.launcher.doctor.facts import torch_build; print(torch_build())"
    path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | path, capture_output=True, check=True
    )
    assert done.stdout == b"{'version': '2.14.1+cu130', 'cuda': '13.0'}\n"


def which_in(folder: Path) -> Callable[[str], str | None]:
    return lambda name: str(folder / name) if (folder / name).exists() else None


def test_a_horovod_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a Horovod whose library does not fit passes, or the reason is lost."""
    write(tmp_path, {"horovod/__init__.py": "", "horovod/torch/__init__.py": "import nothing_here"})
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    found = facts.horovod_loads()
    assert "No module named 'nothing_here'" in found["problem"]


def test_a_torchvision_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when one that raises on import passes, the reason is lost, or a good one is refused."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    write(tmp_path, {"torchvision/__init__.py": "raise RuntimeError('operator x does not exist')"})
    assert facts.torchvision_problem() == "RuntimeError: operator x does not exist"
    write(tmp_path, {"torchvision/__init__.py": ""})
    assert facts.torchvision_problem() is None


def ask(*requests: dict[str, Any]) -> list[dict[str, Any]]:
    """Put requests to a probe of its own process; the answers."""
    text = "".join(json.dumps(request) + "\n" for request in requests)
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain.launcher.doctor.probe"],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    return [json.loads(lines[n + 1]) for n, line in enumerate(lines) if line == probe.MARKER]


def test_the_probe_answers_and_ends_with_its_input() -> None:
    """Fails when an answer is lost, an unknown request ends the probe, or it stays behind."""
    ping, unknown = ask({"do": "ping"}, {"do": "dance"})
    assert ping["values"]["began"] <= ping["values"]["ended"]
    assert unknown["errors"] == {"request": "unknown: 'dance'"}


def test_the_ticket_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when others can read the ticket, the agents cannot find it, or it is left behind."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tickets.write_ticket({"job": "j", "channel": ["a", 1], "ticket": "{}"}, os.environ)
    assert path == tmp_path / "hvdtrain" / "launch" / f"j.{socket.gethostname()}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert tickets.read_ticket("j") == {"job": "j", "channel": ["a", 1], "ticket": "{}"}
    path.chmod(0o644)
    assert tickets.read_ticket("j") is None  # it may be anybody's
    tickets.remove_ticket("j")
    assert list(path.parent.iterdir()) == []
    assert tickets.read_ticket("j") is None


def test_the_ticket_goes_where_it_can(tmp_path: Path) -> None:
    """Fails when a cache folder that cannot be written ends it, though the home directory can."""
    environment = {"XDG_CACHE_HOME": "/proc/none", "HOME": str(tmp_path)}
    path = tickets.write_ticket({"job": "j"}, environment)
    assert path.is_relative_to(tmp_path / ".cache")
    assert tickets.read_ticket("j", environment) == {"job": "j"}


def test_launcher_addresses() -> None:
    """Fails when a host would try loopback or IPv6, the way SSH came last, or any address but the
    one that alone is listened on.
    """
    request = {"addresses": ["127.0.0.1", "10.0.0.9", "10.1.0.9"]}
    environment = {"SSH_CONNECTION": "::ffff:10.1.0.9 50000 10.1.0.2 22"}
    assert probe.launcher_addresses(request, environment) == ["10.1.0.9", "10.0.0.9"]
    environment = {"SSH_CONNECTION": "fe80::1 50000 fe80::2 22"}
    assert probe.launcher_addresses(request, environment) == ["10.0.0.9", "10.1.0.9"]
    assert probe.launcher_addresses(request | {"local": True}, environment) == ["127.0.0.1"]
    for local in (True, False):
        only = {"channel_address": "10.1.0.9", "local": local}
        assert probe.launcher_addresses(request | only, environment) == ["10.1.0.9"]


def test_reaching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when another host that answers is taken for the one that was meant."""
    monkeypatch.setattr(probe, "CONNECT_S", 20.0)
    listener = probe.listen()
    target = {"host": "beta", "port": listener["port"], "addresses": [["lo", "127.0.0.1"]]}
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = {**target, "port": closed.getsockname()[1], "token": ""}
        right, wrong, none = probe.reach_all(
            [target | {"token": listener["token"]}, target | {"token": "other"}, nobody]
        )
    assert (right["problem"], right["through"], right["interface"]) == (None, "lo", "lo")
    assert wrong["problem"] == "another machine answers"
    assert none["problem"] == "Connection refused"


def test_files_that_are_looked_for(tmp_path: Path) -> None:
    """Fails when a file of the doctor's is seen where it is not, or left behind."""
    here, elsewhere = {"file": str(tmp_path / "x")}, {"file": str(tmp_path / "none" / "x")}
    probe.leave(here)
    assert probe.look(here)
    assert not probe.look(elsewhere)
    probe.take_file(here)
    assert not probe.look(here)
    made = probe.make_file({})
    Path(made).write_text("{}")
    assert probe.take_file({"file": made}) == "{}"
    assert not Path(made).exists()


def test_what_is_left_of_a_job_is_swept() -> None:
    """Fails when a worker of the doctor's outlives it, or another process is ended."""
    sleep = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    processes = [
        subprocess.Popen(sleep, env=os.environ | {probe.MARK: mark}, stdout=subprocess.PIPE)
        for mark in ("of-this-test", "of-another")
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # it has become Python, with its environment
        assert probe.sweep("of-this-test") == 1
        assert processes[0].wait(10) == -signal.SIGKILL
        assert processes[1].poll() is None
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_ring_without_end_is_ended(tmp_path: Path) -> None:
    """Fails when the time limit does not hold, or workers in groups of their own stay behind."""
    file = tmp_path / "pid"
    program = f"set -m; sleep 98 & echo $! > {file}; echo started; trap '' TERM; wait; sleep 97"
    began = time.monotonic()
    environment = os.environ | {probe.MARK: "without-end"}
    code, output = run_ring(["bash", "-c", program], environment, limit_s=5)
    assert (code, output) == (None, "started\n")
    assert time.monotonic() - began < 60
    pid = int(file.read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)  # until its new parent has taken notice
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or " Z " in state.read_text()


def test_secrets_stay_here() -> None:
    """Fails when the ring's workers get variables that show in `ps`, or lack what they need."""
    user = {"PYTHONPATH": ":/x:.", "HOROVOD_CYCLE_TIME": "2", "WANDB_API_KEY": "k", "HOMER": "h"}
    with SshSetup([], SshOptions()) as ssh:
        given = ring_environment(user, ssh, "mark")
    assert (given["PYTHONPATH"], given["HOROVOD_CYCLE_TIME"]) == ("/x", "2")
    assert not {"WANDB_API_KEY", "HOMER"} & set(given)


def test_an_alarm_ends_a_probe_that_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a probe whose connection hangs could live for ever, or a long
    burn-in, which asks again and again, is ended.
    """
    seconds: list[int] = []
    monkeypatch.setattr(probe.signal, "alarm", seconds.append)
    monkeypatch.setattr(probe.sys, "stdin", io.StringIO('{"do": "ping"}\n'))
    assert probe.main() == 0
    assert seconds == [probe.LONGEST_LIFE_S] * 2  # at the start, and with the request
