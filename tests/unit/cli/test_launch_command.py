"""What `hvdtrain launch` passes to horovodrun, in arguments and in the environment."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.cli import main
from hvdtrain.errors import UsageError
from hvdtrain.interpreter import module_argv
from hvdtrain.launcher.horovodrun import (
    SETTING_REASONS,
    agent_argv,
    find_controller,
    find_mpirun,
    horovodrun_argv,
    horovodrun_environment,
    mpi_prefix,
    settings_for,
)

BIN = str(Path(sys.executable).parent)
START = [f"{BIN}/horovodrun", "-np"]
END = [*module_argv("hvdtrain.launcher.agent"), "4711-abc"]


def options(*parts: Any, **named: Any) -> Callable[..., list[str]]:
    """horovodrun_argv with these arguments after the first, the worker."""
    return lambda worker: horovodrun_argv(worker, *parts, **named)


@pytest.mark.parametrize(
    ("argv_of", "expected"),
    [
        (
            options(4, "gloo", start_timeout_s=600),
            "4 --gloo -H localhost:4 --disable-cache --start-timeout 600",
        ),
        (
            options(4, "mpi", [("alpha", 1), ("10.0.0.2", 2), ("c", 1)], start_timeout_s=30),
            "4 --mpi -H alpha:1,10.0.0.2:2,c:1 --disable-cache --start-timeout 30",
        ),
        (
            options(2, "gloo", [("a", 1), ("hvdtrain-b", 1)], interface="eth1", verbose=True),
            "2 --gloo -H a:1,hvdtrain-b:1 --disable-cache --start-timeout 60 "
            "--network-interface eth1 --verbose",
        ),
        (
            options(1, "mpi", [("a", 1)], interface="ib0", prefix="/opt/env"),
            "1 --mpi -H a:1 --disable-cache --start-timeout 60 --network-interface ib0 "
            "'--mpi-args=--prefix /opt/env'",
        ),
        (
            options(1, "mpi", [("a", 1)], prefix="/my env/x"),
            "1 --mpi -H a:1 --disable-cache --start-timeout 60 \"--mpi-args=--prefix '/my env/x'\"",
        ),
        (
            options(1, "gloo", [("a", 1)], prefix="/opt/env"),
            "1 --gloo -H a:1 --disable-cache --start-timeout 60",
        ),
    ],
    ids=["local", "hosts", "interface", "prefix", "quoted", "no-prefix"],
)
def test_horovodruns_command(argv_of: Callable[..., list[str]], expected: str) -> None:
    """Fails when a word of the command changes: hosts out of order, a cache that goes stale, an
    interface that is not passed on, an Open MPI that other hosts do not find.
    """
    assert argv_of(agent_argv("4711-abc")) == [*START, *shlex.split(expected), *END]


def test_horovodrun_is_the_environments_own(monkeypatch) -> None:
    """Fails when another horovodrun, or another Python, that comes first on PATH is started."""
    monkeypatch.setenv("PATH", "/somewhere/else")
    argv = horovodrun_argv(agent_argv("x"), 1, "gloo", [("a", 1)])
    assert argv[0] == f"{BIN}/horovodrun" and argv[-5] == sys.executable


USER = {
    "PATH": "/usr/local/bin:/usr/bin",
    "HOME": "/home/ann",
    "PYTHONPATH": "/home/ann/lib",
    "LD_LIBRARY_PATH": "/opt/lib",
    "XDG_CACHE_HOME": "/home/ann/.cache",
    "HOROVOD_CYCLE_TIME": "3",
    "OMPI_MCA_btl": "tcp,self",
    "NCCL_DEBUG": "INFO",
}
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "a",
    "AWS_ACCESS_KEY_ID": "b",
    "WANDB_API_KEY": "c",
    "HF_TOKEN": "d",
    "PGPASSWORD": "e",
    "DATABASE_URL": "postgres://ann:f@db",
    "HOROVOD_SECRET_KEY": "g",
    "OMPI_MY_TOKEN": "h",
    "SSH_AUTH_SOCK": "/tmp/i",
    "KRB5CCNAME": "j",
    "HOROVOD_LOGIN_CREDENTIALS": "k",
    "HOROVOD_MY_PASSWD": "l",
    "NCCL_PASSPHRASE": "m",
    "OMPI_PROXY_AUTH": "n",
}


def test_no_secret_reaches_horovodrun() -> None:
    """Fails when horovodrun gets a variable of the user's that it does not need: it would stand on
    each worker's command line, for all users of a host to read.
    """
    found = horovodrun_environment(USER | SECRETS | {"ANYTHING": "else"}, {}, None)
    assert not set(found.values()) & set(SECRETS.values())
    assert set(found) == {*USER, "PYTHONUNBUFFERED"}


def test_the_users_settings_win() -> None:
    """Fails when what the user has set for Horovod or MPI is replaced by ours, or ours is left out
    where the user has set nothing.
    """
    settings = {"HOROVOD_CYCLE_TIME": "1", "HOROVOD_FUSION_THRESHOLD": "0"}
    found = horovodrun_environment(USER, settings, None)
    assert found["HOROVOD_CYCLE_TIME"] == "3" and found["HOROVOD_FUSION_THRESHOLD"] == "0"
    assert {name: found[name] for name in USER if name != "PATH"} == {
        name: value for name, value in USER.items() if name != "PATH"
    }


def test_the_order_of_path() -> None:
    """Fails when horovodrun finds another ssh than the one that keeps host keys checked, or another
    mpirun than the environment's own.
    """
    found = horovodrun_environment(USER, {}, Path("/tmp/ssh-of-this-launch"))
    assert found["PATH"] == f"/tmp/ssh-of-this-launch:{BIN}:/usr/local/bin:/usr/bin"
    assert horovodrun_environment(USER, {}, None)["PATH"] == f"{BIN}:/usr/local/bin:/usr/bin"
    assert horovodrun_environment({}, {}, None)["PATH"] == f"{BIN}:{os.defpath}"


def test_where_other_hosts_find_open_mpi(tmp_path: Path, monkeypatch) -> None:
    """Fails when a system's Open MPI is reported to lie in the environment, or the environment's
    own is not named: a shell that ssh starts does not have it on PATH.
    """
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.parent.mkdir()
    mpirun.write_text("#!/bin/sh\n")
    mpirun.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "bin" / "python"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    monkeypatch.setenv("PATH", str(mpirun.parent))
    assert find_mpirun() == str(mpirun) and mpi_prefix() is None
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert mpi_prefix() == str(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert find_mpirun() is None and mpi_prefix() is None


@pytest.mark.parametrize(
    ("controller", "command", "expected"),
    [
        ("gloo", "train", {"HOROVOD_FUSION_THRESHOLD": "0"}),
        (
            "mpi",
            "train",
            {"HOROVOD_FUSION_THRESHOLD": "0", "OMPI_MCA_mpi_yield_when_idle": "1"},
        ),
        (
            "gloo",
            "python",
            {
                "HOROVOD_FUSION_THRESHOLD": "0",
                "HOROVOD_STALL_CHECK_TIME_SECONDS": "60",
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "300",
            },
        ),
    ],
)
def test_what_is_set_and_why(controller: str, command: str, expected: dict[str, str]) -> None:
    """Fails when a setting is another one, has no reason to show, or replaces the user's."""
    found = settings_for(controller, {}, 300.0, command)
    assert found == expected
    assert all(len(SETTING_REASONS[name]) > 20 for name in found)
    for name in expected:
        left = settings_for(controller, {name: "the user's"}, 300.0, command)
        assert set(left) == set(expected) - {name}


def test_verify_covers_fused_tensors() -> None:
    """Fails when `launch -- verify` tests less than plain horovodrun does."""
    assert "HOROVOD_FUSION_THRESHOLD" not in settings_for("gloo", {}, 300.0, "verify")


def test_a_short_watchdog_is_still_one() -> None:
    """Fails when a limit below a second is rounded to 0, which means never to Horovod."""
    found = settings_for("gloo", {}, 0.2, "python")
    assert found["HOROVOD_STALL_CHECK_TIME_SECONDS"] == "1"
    assert found["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == "1"


@pytest.mark.parametrize(
    ("wanted", "hosts", "has_mpi", "expected"),
    [
        ("auto", 1, True, ("mpi", "faster on one host than Gloo")),
        ("auto", 1, False, ("gloo", "Open MPI is not installed")),
        ("auto", 2, True, ("gloo", "faster over TCP than Open MPI")),
        ("mpi", 2, True, ("mpi", "")),
        ("gloo", 1, True, ("gloo", "")),
    ],
)
def test_the_controller_is_the_faster_one(
    wanted: str, hosts: int, has_mpi: bool, expected: tuple[str, str], monkeypatch
) -> None:
    """Fails if the slower one is taken, the user's choice is not, or a reason is not its own."""
    path = "/usr/bin/mpirun" if has_mpi else None
    monkeypatch.setattr("hvdtrain.launcher.horovodrun.find_mpirun", lambda: path)
    monkeypatch.setattr("hvdtrain.launcher.horovodrun.is_open_mpi", lambda mpirun: True)
    assert find_controller(wanted, hosts) == expected


def test_a_space_in_the_folder_of_open_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if Open MPI, which splits such a folder in two, is started on other hosts from it, or
    refused where no other host is needed.
    """
    monkeypatch.setattr("hvdtrain.launcher.horovodrun.mpi_prefix", lambda: "/opt/my venv")
    monkeypatch.setattr(
        "hvdtrain.launcher.horovodrun.find_mpirun", lambda: "/opt/my venv/bin/mpirun"
    )
    monkeypatch.setattr("hvdtrain.launcher.horovodrun.is_open_mpi", lambda mpirun: True)
    assert find_controller("mpi", 1).name == "mpi"
    with pytest.raises(UsageError, match="has a space in it; use --controller gloo"):
        find_controller("mpi", 2)


def test_an_underscore_in_the_name_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if Open MPI, which ends with an internal error there, is started all the same."""
    monkeypatch.setattr("hvdtrain.launcher.horovodrun.find_mpirun", lambda: "/usr/bin/mpirun")
    monkeypatch.setattr("socket.gethostname", lambda: "my_host")
    assert find_controller("auto").name == "gloo"
    with pytest.raises(UsageError, match="my_host, a name with an underscore; use --controller gl"):
        find_controller("mpi")


def dry_run(monkeypatch, capsys, *flags: str) -> tuple[list[str], str]:
    """The words on standard output, and the text on standard error."""
    monkeypatch.setattr(sys, "argv", ["hvdtrain", "launch", "--dry-run", *flags])
    code = main()
    reported = capsys.readouterr()
    assert code == 0, reported.err
    assert reported.out.count("\n") == 1
    return shlex.split(reported.out), reported.err


def test_a_dry_run_prints_the_command(tmp_path: Path, monkeypatch, capsys) -> None:
    """Fails when anything but the command is on standard output, the settings and the worker's own
    command are not said, or anything is started or written.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOROVOD_FUSION_THRESHOLD", raising=False)
    argv, reported = dry_run(
        *(monkeypatch, capsys, "-np", "2", "--controller", "gloo", "--", "train", "--model=mlp")
    )
    assert argv == horovodrun_argv(agent_argv("JOB"), 2, "gloo", start_timeout_s=600)
    assert "HOROVOD_FUSION_THRESHOLD=0: tensors are not fused" in reported
    train = shlex.join([*module_argv("hvdtrain.cli"), "train", "--model=mlp"])
    assert f"each worker runs: {train}\n" in reported
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_contacts_no_host(tmp_path: Path, monkeypatch, capsys) -> None:
    """Fails when hosts are looked up or connected to: these exist nowhere; or when what horovodrun
    cannot take (a user, an IPv6 address) is handed to it, or slots are not cut to -np.
    """

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a host was looked up")

    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(f"socket.{name}", refuse)
    monkeypatch.setattr("subprocess.Popen", refuse)
    monkeypatch.setattr("hvdtrain.launcher.horovodrun.is_open_mpi", lambda mpirun: True)
    looked_up: list[str] = []

    def look_up(name: str) -> str:
        looked_up.append(name)
        raise OSError

    monkeypatch.setattr("socket.gethostbyname", look_up)
    monkeypatch.chdir(tmp_path)
    hosts = ["192.0.2.7 slots=2", "ann@nowhere.invalid", "2001:db8::1 slots=4"]
    Path("hosts").write_text("# far away\n" + "\n".join(hosts))
    flags = ("--hostfile", "hosts", "--network-interface", "lo", "--controller", "mpi", "--verbose")
    before_s = time.monotonic()
    argv, _ = dry_run(*(monkeypatch, capsys, "-np", "5", *flags, "--", sys.executable, "x.py"))
    assert time.monotonic() - before_s < 20
    assert looked_up == ["nowhere.invalid"]  # ann there may be another user of this machine
    assert argv[argv.index("-H") + 1] == "192.0.2.7:2,nowhere.invalid:1,hvdtrain-host-3:2"
    assert argv[1:4] == ["-np", "5", "--mpi"] and "--verbose" in argv
    assert argv[argv.index("--network-interface") + 1] == "lo"
    argv, _ = dry_run(*(monkeypatch, capsys, *flags, "--", sys.executable, "x.py"))
    assert argv[1:3] == ["-np", "7"]
