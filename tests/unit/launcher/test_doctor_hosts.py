"""The doctor over hosts: a real sshd of the test's own, and the faults that SSH really makes."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.cli import main
from hvdtrain.launcher.doctor import Finding, ssh_failures
from hvdtrain.launcher.doctor.examination import Examination, examine, preflight
from hvdtrain.launcher.doctor.sessions import open_sessions
from hvdtrain.launcher.doctor.ssh_failures import NoAnswer, explain
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.protocol import read_ticket
from hvdtrain.launcher.ssh import SshOptions, SshSetup
from tests.unit.sshd import ADDRESS, Sshd, free_port, running_sshd

HERE, THERE = Host("localhost", 2), Host(ADDRESS, 2)
LIMIT_S = 20.0


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    with running_sshd(tmp_path) as running:
        yield running


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("", 0)) as server:
        yield int(server.getsockname()[1])


def check(
    hosts: list[Host], options: SshOptions, port: int = 0, ticket: dict[str, str] | None = None
) -> Examination:
    with SshSetup(hosts, options) as ssh, open_sessions(hosts, ssh) as sessions:
        return preflight(sessions, ssh, port, ticket, LIMIT_S)


def wrong(found: Examination) -> list[Finding]:
    """What is not ok, but for software that this machine may lack."""
    software = ("torch", "torchvision", "horovod")
    return [item for item in found.findings if item.status != "ok" and item.check not in software]


def the_one(found: Examination) -> Finding:
    (finding,) = wrong(found)
    return finding


def test_good_hosts(sshd: Sshd, listening: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a good host is complained of, the interface is not the one that SSH came through,
    or a host gets no ticket, or one that leads to another machine.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(sshd.folder / "cache"))
    ticket = {"job": "job-1", "ticket": '{"secret": "s"}'}
    found = check([HERE, THERE], sshd.options(), listening, ticket)
    assert wrong(found) == []
    assert found.interface == "lo"
    assert set(found.facts) == {"localhost", ADDRESS}
    assert found.facts[ADDRESS].get("executable") == sys.executable
    kept = read_ticket("job-1")
    assert kept is not None
    assert (kept["job"], kept["ticket"]) == ("job-1", ticket["ticket"])
    assert kept["channel"][1] == listening


def test_this_machine_alone_is_quick(listening: int) -> None:
    """Fails when the quick part, with which each launch begins, waits for a time limit."""
    began = time.monotonic()
    found = check([HERE], SshOptions(), listening)
    assert time.monotonic() - began < LIMIT_S
    assert wrong(found) == []
    assert found.interface is None


def test_more_workers_than_a_host_has_room_for() -> None:
    """Fails when `launch` starts workers that memory does not suffice for, or says nothing of
    workers that share cores.
    """
    many = 1_000_000
    with SshSetup([HERE], SshOptions()) as ssh, open_sessions([HERE], ssh) as sessions:
        found = preflight(sessions, ssh, 0, None, LIMIT_S, slots={HERE.address: many})
    cores, memory = (it for it in found.findings if it.check in ("cores", "memory"))
    assert (cores.status, memory.status) == ("warn", "fail")
    assert f"{many} slots, but" in cores.text
    assert f"of memory free for {many} workers, which take 307 MiB each, 300000.0" in memory.text


def test_a_launcher_that_listens_on_one_network_only() -> None:
    """Fails when a host of this machine, or another, calls back to an address that nobody listens
    on: agents would wait for ever.
    """
    with (
        socket.create_server(("127.0.0.2", 0)) as server,
        SshSetup([HERE], SshOptions()) as ssh,
        open_sessions([HERE], ssh) as sessions,
    ):
        port = int(server.getsockname()[1])
        found = preflight(sessions, ssh, port, None, LIMIT_S, "127.0.0.2")
    assert wrong(found) == []
    assert found.facts["localhost"].get("channel")["address"] == "127.0.0.2"


def test_a_launcher_that_hosts_cannot_reach(sshd: Sshd) -> None:
    """Fails when nobody can connect back, and the launch would wait without end."""
    finding = the_one(check([THERE], sshd.options(), free_port()))
    assert (finding.check, finding.status, finding.host) == ("way back", "fail", ADDRESS)
    assert "Connection refused" in finding.text


def test_an_unknown_host_key(sshd: Sshd) -> None:
    """Fails when an unknown host is trusted, or the message does not say what to do."""
    sshd.know_host_key(False)
    finding = the_one(check([HERE, THERE], sshd.options()))
    assert (finding.check, finding.status, finding.host) == ("ssh", "fail", ADDRESS)
    assert "host key is not known" in finding.text
    assert f"ssh -p {sshd.port} -i {sshd.folder}/key {ADDRESS}" in finding.fix


def test_a_changed_host_key(sshd: Sshd) -> None:
    """Fails when another machine in the host's place is taken for it, or for an unknown one."""
    sshd.know_host_key(key="other_key")
    finding = the_one(check([THERE], sshd.options()))
    assert "has changed" in finding.text
    assert f"[{ADDRESS}]:{sshd.port}" in finding.fix
    assert "ssh-keygen -f" in finding.fix


def test_a_key_that_the_host_refuses(sshd: Sshd) -> None:
    """Fails when a refused key is reported as anything else."""
    finding = the_one(check([THERE], sshd.options("other_key")))
    assert "accepts none of the keys" in finding.text
    assert f"ssh-copy-id -p {sshd.port} -i {sshd.folder}/other_key {ADDRESS}" in finding.fix


def test_a_key_that_others_can_read(sshd: Sshd) -> None:
    """Fails when the file's permissions, which ssh checks, are reported as the host's refusal."""
    (sshd.folder / "key").chmod(0o644)
    finding = the_one(check([THERE], sshd.options()))
    assert finding.fix == f"`chmod 600 {sshd.folder}/key`"


def test_a_port_where_nothing_listens(sshd: Sshd) -> None:
    """Fails when a wrong port is reported as anything else."""
    port = free_port()
    finding = the_one(check([THERE], replace(sshd.options(), port=port)))
    assert f"port {port}: connection refused" in finding.text
    assert "--ssh-port" in finding.fix


def test_an_unknown_name(sshd: Sshd) -> None:
    """Fails when a name that does not resolve is reported as anything else, or as this machine."""
    finding = the_one(check([Host("no-such-host.invalid")], sshd.options()))
    assert finding.host == "no-such-host.invalid"
    assert "does not resolve" in finding.text


def test_a_silent_server(sshd: Sshd) -> None:
    """Fails when a host that takes the connection and is silent holds the launch up for ever."""
    with socket.create_server((ADDRESS, 0)) as silent:
        port = silent.getsockname()[1]
        options = replace(sshd.options(), port=port, connect_timeout_s=1)
        began = time.monotonic()
        finding = the_one(check([THERE], options))
    assert time.monotonic() - began < 10
    assert "cannot be reached" in finding.text


def test_a_server_that_hangs_up(sshd: Sshd) -> None:
    """Fails when a host that turns everybody away is reported as anything else."""
    with socket.create_server((ADDRESS, 0)) as server:
        server.settimeout(LIMIT_S)
        hosts, options = [THERE], replace(sshd.options(), port=server.getsockname()[1])
        with SshSetup(hosts, options) as ssh, open_sessions(hosts, ssh) as sessions:
            server.accept()[0].close()
            session = sessions[ADDRESS]
            with pytest.raises(NoAnswer) as silence:
                session.ask({"do": "ping"}, time.monotonic() + LIMIT_S)
    assert silence.value.exit_code == 255
    assert "hung up" in explain(THERE, "ssh x", silence.value).text


def test_a_host_that_never_answers(sshd: Sshd) -> None:
    """Fails when a host whose login hangs holds the others up beyond the time limit."""
    with (
        sshd.again("ForceCommand cat > /dev/null") as options,
        SshSetup([HERE, THERE], options) as ssh,
        open_sessions([HERE, THERE], ssh) as sessions,
    ):
        began = time.monotonic()
        found = preflight(sessions, ssh, 0, None, 8.0)
    assert time.monotonic() - began < 40
    assert "no answer in time" in the_one(found).text
    assert set(found.facts) == {"localhost"}


@pytest.mark.parametrize("end", ["\\n", ""])
def test_noise_does_no_harm(sshd: Sshd, listening: int, end: str) -> None:
    """Fails when what a login script prints breaks the probe's answer, or goes unnoticed."""
    command = (
        f"ForceCommand printf 'Welcome to {ADDRESS}!{end}'; exec sh -c \"$SSH_ORIGINAL_COMMAND\""
    )
    with sshd.again(command) as options:
        found = check([THERE], options, listening)
    finding = the_one(found)
    assert (finding.check, finding.status) == ("ssh", "warn")
    assert f"'Welcome to {ADDRESS}!'" in finding.text
    assert found.interface == "lo"


@pytest.mark.parametrize(
    ("command", "check_name", "text"),
    [
        ("exec /nowhere/python -m x", "python", "there is no"),
        (
            f"exec {sys.executable} -m hvdtrain.no_such_module",
            "hvdtrain",
            "has no hvdtrain.no",
        ),
        ("echo no more; exit 9", "ssh", "exit code 9 instead of an answer: no more"),
    ],
)
def test_hosts_without_the_environment(
    sshd: Sshd, command: str, check_name: str, text: str
) -> None:
    """Fails when a host that lacks Python or hvdtrain is reported as a fault of SSH, or as none."""
    with sshd.again(f"ForceCommand {command}") as options:
        finding = the_one(check([THERE], options))
    assert (finding.check, finding.status, finding.host) == (check_name, "fail", ADDRESS)
    assert text in finding.text
    assert finding.fix


@pytest.mark.parametrize(
    ("stderr", "text"),
    [  # as OpenSSH prints them; a test cannot bring these about on an ordinary machine
        ("ssh: connect to host beta port 22: No route to host", "cannot be reached"),
        ("ssh: connect to host beta port 22: Network is unreachable", "cannot be reached"),
        (
            "Received disconnect from beta port 22:2: Too many authentication failures",
            "too many",
        ),
        ("Bad owner or permissions on /home/carol/.ssh/config", "its own configuration"),
        ("client_loop: send disconnect: Broken pipe", "ssh failed: client_loop"),
    ],
)
def test_other_messages_of_ssh(stderr: str, text: str) -> None:
    """Fails when the cause is lost."""
    finding = explain(Host("beta", user="carol"), "ssh carol@beta", NoAnswer(255, stderr))
    assert (finding.status, finding.host) == ("fail", "carol@beta")
    assert text in finding.text
    assert finding.fix


def test_a_name_of_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when it is not said that a host which fails has several addresses, and which."""
    monkeypatch.setattr(ssh_failures, "addresses_of", lambda name: ["10.0.0.2", "10.0.0.3"])
    finding = explain(Host("worker"), "ssh worker", NoAnswer(255, "Host key verification failed."))
    assert finding.text.endswith("; worker stands for 2 addresses, 10.0.0.2, 10.0.0.3")
    assert "a name or address of its own" in finding.fix


def test_without_ssh(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a machine that has no ssh command is reported as a fault of the host."""
    monkeypatch.setenv("PATH", "/nowhere")
    finding = the_one(check([THERE], sshd.options()))
    assert "no ssh command on this machine" in finding.text


def test_another_checkout_shows(sshd: Sshd, tmp_path: Path) -> None:
    """Fails when a host with other code, or without the working directory, passes."""
    import hvdtrain

    package = Path(hvdtrain.__file__).parent
    other = tmp_path / "other"
    (other / "hvdtrain").mkdir(parents=True)
    for path in package.iterdir():
        if path.name != "__init__.py" and path.name != "__pycache__":
            (other / "hvdtrain" / path.name).symlink_to(path)
    text = (package / "__init__.py").read_text().replace('__version__ = "', '__version__ = "9.')
    (other / "hvdtrain" / "__init__.py").write_text(text)
    command = (
        f"ForceCommand PYTHONPATH={other} exec {sys.executable} -m hvdtrain.launcher.doctor.probe"
    )
    with sshd.again(command) as options:
        finding = the_one(check([HERE, THERE], options))
    assert (finding.check, finding.status, finding.host) == ("hvdtrain", "fail", ADDRESS)
    assert "hvdtrain 9." in finding.text


def test_examining_two_hosts(sshd: Sshd, tmp_path: Path) -> None:
    """Fails when a fact is not asked for, pairs are not tried, or something is left behind."""
    output = tmp_path / "runs"
    hosts = [HERE, THERE]
    with SshSetup(hosts, sshd.options()) as ssh:
        found = examine(hosts, ssh, output=str(output), ring=False)
    checks = {item.check for item in found.findings}
    assert checks >= {
        *("ssh", "python", "hvdtrain", "user", "path", "way back", "horovod loads", "latency"),
        *("clock", "ports", "network", "interface", "gpus", "cores", "memory", "container"),
        *("shm", "limits", "output", "shared"),
    }
    assert found.shared == {ADDRESS: True}
    assert not output.exists()
    assert list(tmp_path.glob(".hvdtrain*")) == []
    assert abs(found.pings[ADDRESS][1]) < 1
    assert {attempt["host"] for attempt in found.reached["localhost"]} <= {ADDRESS}


def test_a_host_that_fails_keeps_the_ring_from_starting(sshd: Sshd, tmp_path: Path) -> None:
    """Fails when workers are started although a host cannot take part."""
    hosts = [HERE, Host("no-such-host.invalid")]
    with SshSetup(hosts, sshd.options()) as ssh:
        found = examine(hosts, ssh, output=str(tmp_path))
    (ring,) = [item for item in found.findings if item.check == "ring"]
    assert (ring.status, found.ring) == ("warn", None)
    assert "not tried" in ring.text


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["hvdtrain", "doctor", *arguments])
    return main()


def test_the_command_fails_with_3(
    sshd: Sshd, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails when a failed check does not show in exit code, output and JSON."""
    sshd.know_host_key(False)
    hostfile, file = sshd.folder / "hosts", sshd.folder / "doctor.json"
    hostfile.write_text(f"localhost slots=1\n{ADDRESS} slots=1\n")
    flags = ["--hostfile", str(hostfile), "-p", str(sshd.port), "-i", str(sshd.folder / "key")]
    code = command(monkeypatch, *flags, "--no-ring", "--json", str(file))
    output = capsys.readouterr().out
    assert code == 3
    assert f"fail  ssh             {ADDRESS}: the host key is not known here" in output
    assert "fix: connect once by hand" in output
    assert "doctor: problems found" in output
    written = json.loads(file.read_text())
    assert not written["ok"]
    assert list(written["hosts"]) == ["localhost"]
    assert ["ssh", "fail"] in [[item["check"], item["status"]] for item in written["findings"]]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--hostfile=nowhere"], ["nowhere"]),
        (["--hostfile=nowhere", "-H", "a:1"], ["-H/--hosts: not allowed with argument --hostfile"]),
        (["-H", "a:0", "-p", "0"], ["a:0", "--ssh-port=0"]),
        (["-i", "no/key", "--json=no/folder/x.json"], ["no/key", "--json=no/folder/x.json"]),
        (["--network-interface", "a/b"], ["--network-interface=a/b"]),
        (["--bogus"], ["--bogus"]),
        (["--controller", "nccl"], ["--controller"]),
    ],
)
def test_bad_input(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    expected: list[str],
) -> None:
    """Fails when bad input is taken, a problem is not named, or the exit code is not 2."""
    try:
        code: object = command(monkeypatch, *arguments)
    except SystemExit as error:  # from argparse
        code = error.code
    assert code == 2
    errors = capsys.readouterr().err
    assert [part for part in expected if part not in errors] == []
    assert "Traceback" not in errors
