"""The configuration of SSH that a launch makes, tried against a real sshd of the test's own."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launcher.hosts import Host, take_slots
from hvdtrain.launcher.ssh import PREFIX, SshOptions, SshSetup, is_local
from tests.unit.sshd import ADDRESS, Sshd, running_sshd

HOSTS = (Host("alpha", 2), Host("beta", user="carol"), Host("fe80::1%eth0"), Host("::1", user="d"))
PLAIN = SshOptions()


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    with running_sshd(tmp_path) as running:
        yield running


def settings_of(name: str, setup: SshSetup, *flags: str) -> dict[str, str]:
    """What the wrapper's ssh makes of a name, as ssh itself prints it."""
    command = [str(setup.path / "ssh"), *flags, "-G", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


def test_horovodrun_is_given_names_that_it_takes() -> None:
    """Fails when a name with a user or an IPv6 address reaches horovodrun, or aliases are mixed."""
    with SshSetup(HOSTS, PLAIN) as setup:
        names = [setup.name_of(host) for host in HOSTS]
        assert names == ["alpha", "beta", "hvdtrain-host-3", "hvdtrain-host-4"]
        settings = [settings_of(name, setup) for name in names]
    assert [found["hostname"] for found in settings] == ["alpha", "beta", "fe80::1%eth0", "::1"]
    assert settings[1]["user"] == "carol"
    assert settings[3]["user"] == "d"


def test_one_name_with_two_users_is_two_hosts() -> None:
    """Fails when the second user is reached as the first."""
    hosts = (Host("alpha", user="a"), Host("alpha", user="b"))
    with SshSetup(hosts, PLAIN) as setup:
        users = [settings_of(setup.name_of(host), setup)["user"] for host in hosts]
    assert users == ["a", "b"]


def test_a_name_that_open_mpi_refuses_gets_another() -> None:
    """Fails when a name with _, as older Compose makes them, reaches mpirun."""
    host = Host("project_worker_1")
    with SshSetup([host], PLAIN) as setup:
        assert setup.name_of(host) == "hvdtrain-host-1"
        assert settings_of(setup.name_of(host), setup)["hostname"] == "project_worker_1"


def test_another_user_of_this_machine_is_reached_by_ssh() -> None:
    """Fails when horovodrun would take user@localhost for localhost, and so for the user here."""
    host = Host("localhost", user="somebody-else")
    with SshSetup([host], PLAIN) as setup:
        assert setup.name_of(host) == "hvdtrain-host-1"
        assert settings_of(setup.name_of(host), setup)["hostname"] == "localhost"
    assert not is_local(host)


@pytest.mark.parametrize(
    ("name", "local"), [("localhost", True), ("127.0.0.1", True), ("192.0.2.77", False)]
)
def test_local_hosts(name: str, local: bool) -> None:
    """Fails when the judgement differs from horovodrun's: by IPv4 address of an interface."""
    assert is_local(Host(name)) is local
    assert not is_local(Host("no-such-host.invalid"))
    assert not is_local(Host("::1"))  # which horovodrun does not support


def test_hosts_with_fewer_slots_keep_their_names() -> None:
    """Fails when a host is not found again once its slots are cut."""
    with SshSetup(HOSTS, PLAIN) as setup:
        (taken,) = take_slots(HOSTS, 1)
        assert setup.name_of(taken) == "alpha"


def test_the_folder_is_private_and_goes_away() -> None:
    """Fails when others can read the configuration, or it stays behind."""
    with SshSetup(HOSTS, PLAIN) as setup:
        path = setup.path
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert not path.exists()


def test_folders_of_killed_launchers_go_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when the folder of a launcher that was killed stays for ever, or that of a running one,
    or of one that has only begun, is removed.
    """
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with SshSetup(HOSTS, PLAIN) as running:
        killed, begun = (tmp_path / f"{PREFIX}{name}" for name in ("killed", "begun"))
        for folder in (killed, begun):
            folder.mkdir()
            (folder / "config").write_text("")
        for folder in (killed, running.path):
            os.utime(folder, (0, 0))
        with SshSetup(HOSTS, PLAIN):
            assert not killed.exists()
            assert begun.exists() and running.path.exists()


def test_options_reach_ssh(tmp_path: Path) -> None:
    """Fails when port, key or time limit get lost, or ssh could ask a question."""
    key = tmp_path / "my key"
    key.write_text("")
    with SshSetup(HOSTS, SshOptions(2222, key, 7)) as setup:
        found = settings_of("alpha", setup, "-o", "BatchMode=no", "-p", "1")
    assert found["port"] == "2222"
    assert found["identityfile"] == str(key)
    assert found["connecttimeout"] == "7"
    assert found["batchmode"] == "yes"
    assert found["serveraliveinterval"] == "15"


@pytest.mark.parametrize("port", [0, 65536])
def test_all_wrong_options_are_reported(port: int) -> None:
    """Fails when a wrong port or key is taken, or only the first problem is reported."""
    with pytest.raises(UsageError) as caught:
        SshOptions(port, Path("no/such/key"))
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        f"--ssh-port={port}",
        "--ssh-identity-file=no/such/key",
    ]


@pytest.mark.parametrize(("known", "code"), [(True, 0), (False, 255)])
def test_host_keys_stay_checked(sshd: Sshd, known: bool, code: int) -> None:
    """Fails when horovodrun's own option, which comes with its command, lets any host key pass."""
    sshd.know_host_key(known)
    with SshSetup([Host(ADDRESS)], sshd.options()) as setup:
        path = f"{setup.path}{os.pathsep}{os.environ['PATH']}"
        command = f"ssh -o PasswordAuthentication=no -o StrictHostKeyChecking=no {ADDRESS} 'exit 0'"
        done = subprocess.run(command, shell=True, env=os.environ | {"PATH": path}, timeout=20)
    assert done.returncode == code


def test_commands_arrive_as_they_are(sshd: Sshd) -> None:
    """Fails when the remote shell takes an argument apart."""
    words = ["a b", "$HOME", "'", '"', "*", "", "-x", ";", "StrictHostKeyChecking=no"]
    program = "import sys, json; print(json.dumps(sys.argv[1:]))"
    host = Host(ADDRESS)
    with SshSetup([host], sshd.options()) as setup:
        command = setup.argv(host, ["python3", "-c", program, *words])
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.stderr == ""
    assert done.stdout.strip() == json.dumps(words)


def test_without_an_ssh_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when the wrapper calls itself for ever, or prints nothing."""
    monkeypatch.setenv("PATH", "/nowhere")
    host = Host("alpha")
    with SshSetup([host], PLAIN) as setup:
        done = subprocess.run(setup.argv(host, ["true"]), capture_output=True, timeout=20)
    assert (done.returncode, b"no ssh command" in done.stderr) == (127, True)
