"""What an agent starts, with which environment, and how its orders are kept from others."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.errors import EXIT_FAILED
from hvdtrain.launcher import horovodrun
from hvdtrain.launcher.agent import CANNOT_START
from hvdtrain.launcher.horovodrun import GPU_SELECTION, worker_environment
from hvdtrain.launcher.protocol import Orders
from hvdtrain.pulse import RING_TOKEN
from tests.unit.agents import JOB, LIMIT_S, TOKEN, Job, hostname, parse_environment

pytestmark = pytest.mark.timeout(150)
ROOT = Path(__file__).resolve().parents[3]
SHOW = "import json, os; print(json.dumps(dict(os.environ)), flush=True)"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()


def environment_of(job: Job, rank: int = 0) -> dict[str, str]:
    job.wait_for("ended", rank)
    return dict(parse_environment(job.output(rank)))


def test_workers_have_their_place(tmp_path: Path) -> None:
    """Fails when a script finds no RANK, WORLD_SIZE, ... or another worker's, or workers have no
    secret in common for their ring, or the one of launcher and agents.
    """
    job = Job(tmp_path, workers=2)
    try:
        job.run_python(SHOW)
        secrets = {environment_of(job, rank)[RING_TOKEN] for rank in (1, 0)}
        assert len(secrets) == 1 and TOKEN not in secrets
        for rank in (1, 0):
            found = environment_of(job, rank)
            placed = {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "alpha",
                "MASTER_PORT": "23456",
                "TORCHELASTIC_RUN_ID": "hvdtrain",
                "HOROVOD_RANK": str(rank),
                "PYTHONUNBUFFERED": "1",
                "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2)),
                "HVDTRAIN_CORES_SHARED_OUT": "1",
            }
            assert {name: found.get(name) for name in placed} == placed
    finally:
        job.close()


def test_open_mpi_reports_the_place_too(job: Job) -> None:
    """Fails when agents of the mpi controller do not have their rank."""
    job.channel.workers = 4
    job.order([sys.executable, "-c", SHOW])
    names = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    job.start_bare({f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()})
    found = environment_of(job, 3)
    assert [found[f"{name}"] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["3", "4", "1"]
    assert found["LOCAL_WORLD_SIZE"] == "2"


def test_whose_variables_win(job: Job) -> None:
    """Fails when the user's variables where `launch` was called do not win over those of the host's
    login, or when what belongs to the host (its home, its Horovod) is replaced by the user's.
    """
    of_user = {
        "DATA": "user's",
        "SECRET_KEY": "of the user's cloud \udc80 ä",
        "OMP_NUM_THREADS": "7",
        "HOME": "/home/elsewhere",
        "SSH_AUTH_SOCK": "/tmp/elsewhere",
        "HOROVOD_RANK": "17",
        "RANK": "17",
        "PYTHONPATH": str(ROOT),
    }
    job.order([sys.executable, "-c", SHOW], **of_user)
    job.start(DATA="host's", ONLY_HERE="host's", HOME="/home/here", SSH_AUTH_SOCK="/tmp/here")
    found = environment_of(job)
    assert found["DATA"] == "user's" and found["ONLY_HERE"] == "host's"
    assert found["SECRET_KEY"] == of_user["SECRET_KEY"] and found["OMP_NUM_THREADS"] == "7"
    assert "HVDTRAIN_CORES_SHARED_OUT" not in found  # the number is the user's
    assert found["HOME"] == "/home/here" and found["SSH_AUTH_SOCK"] == "/tmp/here"
    assert found["HOROVOD_RANK"] == found["RANK"] == "0"


def test_a_login_is_that_of_the_host(job: Job) -> None:
    """Fails when a worker gets the home, the shell or the folder for temporary files of the machine
    where `launch` was called, which horovodrun passes on, or one that the host has not.
    """
    here = {"HOME": "/home/here", "SHELL": "/usr/bin/zsh", "USER": "here"}
    job.order([sys.executable, "-c", SHOW], login=here, PYTHONPATH=str(ROOT))
    there = {"HOME": "/home/there", "SHELL": "/bin/bash", "USER": "there", "TMPDIR": "/job/4"}
    job.start(**there)
    found = environment_of(job)
    assert {name: found.get(name) for name in there} == {**here, "TMPDIR": None}


@pytest.mark.parametrize(
    ("launched_here", "of_host", "expected"),
    [
        (True, {}, {"CUDA_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}),
        (False, {}, {}),
        (False, {"CUDA_VISIBLE_DEVICES": "5"}, {"CUDA_VISIBLE_DEVICES": "5"}),
    ],
)
def test_whose_selection_of_gpus_counts(
    job: Job,
    launched_here: bool,
    of_host: dict[str, str],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fails when GPUs selected where `launch` was called hide those of another host, replace its
    own selection, or are lost for the workers of the launching host itself.
    """
    for name in GPU_SELECTION:
        monkeypatch.delenv(name, raising=False)
    if not launched_here:
        job.hostname = f"not-{hostname()}"
    job.order([sys.executable, "-c", SHOW], CUDA_VISIBLE_DEVICES="2,3", HIP_VISIBLE_DEVICES="1")
    job.start(**of_host)
    found = environment_of(job)
    assert {name: it for name, it in found.items() if name in GPU_SELECTION} == expected


@pytest.mark.parametrize(
    ("device", "of_user", "expected"),
    [
        ("", {}, "true"),
        ("kfd", {}, None),
        ("", {"ACCELERATE_USE_CPU": "false"}, "false"),
    ],
)
def test_workers_of_accelerate_are_connected_on_cpus(
    device: str,
    of_user: dict[str, str],
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fails if Accelerate takes each worker for the only one where there are just CPUs, is kept
    from a GPU, or does not obey the user.
    """
    (tmp_path / device).touch()
    monkeypatch.setattr(horovodrun, "DEVICES", (str(tmp_path / "kfd"), str(tmp_path / "nvidia*")))
    orders = Orders(TOKEN, [], [], "", of_user)
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    found = worker_environment(orders, {f"HOROVOD_{name}": "1" for name in names})
    assert found.get("ACCELERATE_USE_CPU") == expected


def test_secrets_are_in_the_file_alone(job: Job) -> None:
    """Fails when the job's token or the user's secrets show on a command line or in the agent's own
    environment, which its user's other programs may print; or when others may read the file.
    """
    secret = "hunter2-and-more"
    path = job.order(["sleep", "300"], CLOUD_SECRET=secret, PATH=os.environ["PATH"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    guard = job.start()
    job.wait_for("alive")
    agent, worker = job.agent(), job.worker()
    for pid in (guard.pid, agent, worker):
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert secret.encode() not in line and TOKEN.encode() not in line
    shown = Path(f"/proc/{agent}/environ").read_bytes()
    assert secret.encode() not in shown and TOKEN.encode() not in shown
    own = Path(f"/proc/{worker}/environ").read_bytes()
    assert secret.encode() in own and TOKEN.encode() not in own
    ring = Orders(TOKEN, [], [""], "", {}).ring_token.encode()
    assert b"%s=%s\0" % (RING_TOKEN.encode(), ring) in own and ring not in shown
    assert not any(ring in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (agent, worker))


def test_a_file_that_others_may_read_is_not_trusted(job: Job) -> None:
    """Fails when an agent runs orders that others could have read, or that are no orders."""
    path = job.order([sys.executable, "-c", SHOW])
    path.chmod(0o644)
    agent = job.start()
    output = agent.communicate(timeout=LIMIT_S)[0].decode()
    assert agent.returncode == EXIT_FAILED and not job.heard
    assert f"cannot join job {JOB}: " in output and "has left no orders on" in output
    assert "Traceback" not in output


def test_a_lost_launcher_is_reported(job: Job) -> None:
    """Fails when an agent that comes too late waits, starts its worker, keeps its orders, or does
    not say what it has tried.
    """
    job.order([sys.executable, "-c", "open('started', 'w')"])
    port = job.channel.port
    job.channel.close()
    agent = job.start()
    output = agent.communicate(timeout=LIMIT_S)[0].decode()
    assert agent.returncode == EXIT_FAILED and not (job.folder / "started").exists()
    assert f"cannot join job {JOB}: 127.0.0.1 port {port}: " in output
    assert "Traceback" not in output and not job.tickets()


def test_agents_are_not_for_users(job: Job) -> None:
    """Fails when an agent without horovodrun ends in a traceback."""
    job.order(["true"])
    job.start_bare({})
    output = job.agents[0].communicate(timeout=LIMIT_S)[0].decode()
    assert job.agents[0].returncode == EXIT_FAILED
    assert "agents are started by `hvdtrain launch`" in output and "Traceback" not in output


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["no-such-command", "--flag"], "no-such-command: No such file or directory on PATH\n"),
        (["/no/such/command"], "/no/such/command: No such file or directory\n"),
        (["./text"], "./text: Permission denied"),
        (["./noise"], "./noise: Exec format error"),
    ],
)
def test_commands_that_cannot_be_started(job: Job, command: list[str], text: str) -> None:
    """Fails when a command that cannot be started ends the agent, is reported as another end than
    shells report it, or without its name, its host and the reason.
    """
    (job.folder / "text").write_text("#!/bin/sh\n")
    (job.folder / "noise").write_bytes(b"\0\1\2")
    (job.folder / "noise").chmod(0o700)
    job.order(command, PATH="/usr/bin:/bin")
    job.start()
    assert job.wait_for("ended") == CANNOT_START
    output = job.output().decode()
    assert output.startswith(f"hvdtrain: error on {hostname()}: ") and text in output
    assert output.count("\n") == 1
    assert job.leave() == CANNOT_START


def test_a_working_folder_that_is_not_there(job: Job) -> None:
    """Fails when the folder that is missing on one host is reported as a missing command."""
    job.folder = Path("/no/such/folder")
    job.order([sys.executable, "-c", SHOW])
    job.start()
    assert job.wait_for("ended") == CANNOT_START
    text = f"hvdtrain: error on {hostname()}: /no/such/folder, the working directory of launch: "
    assert job.output().decode().startswith(text)
    assert job.leave() == CANNOT_START
