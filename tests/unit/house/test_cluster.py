"""launch/cluster without an engine: commands, keys, and the scripts around it."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.errors import PreflightError, UsageError
from launch.containers import __main__ as cluster
from launch.containers import cluster_keys
from launch.containers import engine as cluster_engine
from tests.unit.programs import put

ROOT = Path(__file__).parents[3]


def run_cluster(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["cluster", "--root", str(ROOT), *arguments])
    return cluster.main()


# The command line


def test_all_mistakes_of_up_are_reported_at_once(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Fails when one is left out, or something is started before."""
    monkeypatch.setenv("PATH", "")  # an engine would be missed first
    flags = ["--hosts", "0", "--slots", "300", "--data", "/no/such"]
    assert run_cluster(monkeypatch, "up", *flags) == 2
    reported = capsys.readouterr().err
    for problem in ("--hosts=0: must be from 1 to 64", "--slots=300", "--data=/no/such: there is"):
        assert problem in reported


@pytest.mark.parametrize(
    ("argv", "name", "command", "rest"),
    [
        (["run", "--", "python", "s.py", "--log_dir", "x"], "hvdtrain", "run", 0),
        (["--name", "run", "run", "-np", "2", "--", "train"], "run", "run", 2),
        (["--name=two", "--root", "up", "down", "--discard"], "two", "down", 3),
    ],
)
def test_what_follows_the_command_is_left_as_it_is(
    argv: list[str], name: str, command: str, rest: int
) -> None:
    """Fails when the -- before a foreign script is lost, so that its flags are taken for ours."""
    found = cluster._parse(argv)
    assert (found.name, found.command, found.rest) == (name, command, argv[rest + 1 :])


def test_a_name_that_compose_refuses_is_refused(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Fails when it reaches Compose, which would change or refuse it."""
    assert run_cluster(monkeypatch, "--name", "My cluster", "down") == 2
    assert "--name=My cluster: must consist of" in capsys.readouterr().err


def test_a_missing_docker_is_named(path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Fails when the fix is not printed, or the exit code is not that of a preflight check."""
    assert run_cluster(monkeypatch, "up") == 3
    assert "install docker.io" in capsys.readouterr().err


def test_an_engine_that_does_not_answer_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Fails when docker's own reason or the fix is lost."""
    put(path, "docker", "echo 'permission denied at the socket' >&2; exit 1")
    assert run_cluster(monkeypatch, "run", "--", "train") == 3
    reported = capsys.readouterr().err
    assert "permission denied at the socket" in reported and "docker/start-engine" in reported


def test_run_without_a_cluster_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Fails when a container is started though no host is there."""
    put(path, "docker", "exit 0")
    assert run_cluster(monkeypatch, "run", "--", "train") == 3
    assert "start it with ./launch/cluster up" in capsys.readouterr().err


def test_either_compose_is_used_or_its_absence_reported(path: Path) -> None:
    """Fails when only one of the two kinds is found, or when neither is a silent success."""
    put(path, "docker", "exit 1")
    with pytest.raises(PreflightError, match="docker-compose-plugin"):
        cluster_engine._compose_command()
    put(path, "docker-compose", "exit 0")
    assert cluster_engine._compose_command() == ["docker-compose"]
    put(path, "docker", "exit 0")
    assert cluster_engine._compose_command() == ["docker", "compose"]


def test_hosts_are_in_the_order_of_their_numbers(path: Path) -> None:
    """Fails when host 10 comes before host 2, as text would."""
    put(path, "docker", "printf '10 c-worker-10\\n2 c-worker-2\\n1 c-worker-1\\n'")
    engine = cluster_engine.Engine("c", Path("compose.yaml"))
    assert engine.workers() == ["c-worker-1", "c-worker-2", "c-worker-10"]


def test_logs_show_the_output_of_sshd(path: Path) -> None:
    """Fails when standard error, where sshd writes, is left out."""
    put(path, "docker", "echo out; echo 'Server listening' >&2")
    engine = cluster_engine.Engine("c", Path("compose.yaml"))
    assert engine.logs("c-worker-1", "20") == "out\nServer listening"


def test_names_that_open_mpi_refuses_are_changed(path: Path, tmp_path: Path) -> None:
    """Fails when a host keeps an underscore, or one without is renamed."""
    put(path, "docker", f'echo "$@" >> {tmp_path}/asked')
    engine = cluster_engine.Engine("c", Path("compose.yaml"))
    assert cluster._plain_name(engine, "c_worker_1") == "c-worker-1"
    assert cluster._plain_name(engine, "c-worker-2") == "c-worker-2"
    assert (tmp_path / "asked").read_text() == "rename c_worker_1 c-worker-1\n"


def test_the_container_of_a_job_is_as_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The golden command. Fails when a limit, a right or a label changes unnoticed."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    argv = cluster_engine.launcher_argv("c", "c-worker-1", "image", ["hvdtrain", "a b"], False, 2)
    assert shlex.join(argv) == (
        "docker run --rm --label hvdtrain.launcher=c --network c_cluster "
        "--volumes-from c-worker-1 --shm-size 1g --no-healthcheck --cap-drop ALL "
        "--cap-add SYS_PTRACE --security-opt no-new-privileges "
        "--env OMPI_MCA_btl_vader_single_copy_mechanism=cma "
        "--env OMP_NUM_THREADS=2 image hvdtrain 'a b'"
    )


@pytest.mark.parametrize(
    ("slots", "cores", "threads"), [([1, 1, 1], 2, 1), ([2, 2], 16, 4), ([], 8, 8)]
)
def test_hosts_share_the_cores(slots: list[int], cores: int, threads: int) -> None:
    """Fails when each host's workers take all cores, or a worker has none."""
    hostfile = "".join(f"c-worker-{i} slots={count}\n" for i, count in enumerate(slots, 1))
    assert cluster.compute_threads(hostfile, cores) == threads


def test_a_hostfile_that_was_edited_is_read() -> None:
    """Fails when comments, blank lines or another dialect end in a traceback."""
    assert cluster.compute_threads("# mine\n\nc-worker-1 slots = 2 # fast\nc-worker-2:2\n", 16) == 4
    with pytest.raises(UsageError, match=r"/etc/mpi/hostfile:1: .*slots"):
        cluster.compute_threads("c-worker-1 slots=many\n", 16)


def test_runs_are_never_copied_over(path: Path, tmp_path: Path) -> None:
    """Fails when `down` writes into a run that is there."""
    put(path, "docker", 'for last; do :; done; /bin/mkdir "$last/mine"; echo new > "$last/mine/x"')
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "x").write_text("old")
    engine = cluster_engine.Engine("c", Path("compose.yaml"))
    cluster._copy_runs(engine, "c-worker-1", tmp_path / "runs")
    assert (tmp_path / "runs" / "mine" / "x").read_text() == "old"
    assert (tmp_path / "runs" / "mine-2" / "x").read_text() == "new\n"


def test_the_runs_of_each_volume_are_copied_once(path: Path) -> None:
    """Fails when a host's own runs are left behind, or those of a shared volume come twice."""
    engine = cluster_engine.Engine("c", Path("compose.yaml"))
    listed = "ps) printf '1 c-worker-1\\n2 c-worker-2\\n';;"
    put(path, "docker", f"case $1 in {listed} *) for last; do :; done; echo $last;; esac")
    assert cluster._with_own_runs(engine) == ["c-worker-1", "c-worker-2"]
    put(path, "docker", f"case $1 in {listed} *) echo /one;; esac")
    assert cluster._with_own_runs(engine) == ["c-worker-1"]


@pytest.mark.parametrize("still_there", [False, True])
def test_a_job_that_ends_by_itself_does_not_hinder_down(path: Path, still_there: bool) -> None:
    """Fails when `down` breaks off as a job is gone already, or goes on though one runs."""
    left = "echo a" if still_there else ":"
    gone = "stop*) echo 'No such container: b' >&2; exit 1;;"
    put(path, "docker", f'case "$1 $2" in "ps --all") echo a b;; ps*) {left};; {gone} esac')
    engine = cluster_engine.Engine("c", Path("compose.yaml"))
    if still_there:
        with pytest.raises(PreflightError, match="No such container"):
            cluster._stop_jobs(engine)
    else:
        cluster._stop_jobs(engine)


@pytest.mark.parametrize("command", ["up", "down"])
def test_containers_of_another_project_are_left_alone(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, command: str
) -> None:
    """Fails when a project that happens to have the cluster's name is changed or removed."""
    asked = tmp_path / "asked"
    put(path, "docker", f'echo "$1" >> {asked}; case $1 in ps) echo /srv/shop;; esac')
    assert run_cluster(monkeypatch, "--name", "shop", command) == 3
    assert "was started from /srv/shop, not from" in capsys.readouterr().err
    assert set(asked.read_text().split()) == {"version", "ps"}
    put(path, "docker", f"case $1 in ps) echo {ROOT}/docker;; esac")
    cluster_engine.Engine("c", ROOT / "docker" / "compose.yaml").check_ours()


OLD_COMPOSE = """
words="$*"
echo "${{words#*compose.yaml }}" >> {asked}
case "$*" in *" rm "*) : > {asked}.removed;; esac
[ -e {asked}.removed ] && exit 0
case "$*" in *" up "*) echo "KeyError: 'ContainerConfig'" >&2; exit 1;; esac
"""


@pytest.mark.parametrize("may_remove", [True, False])
def test_an_old_compose_with_a_new_engine(path: Path, tmp_path: Path, may_remove: bool) -> None:
    """Fails when `up` with other options ends with a KeyError of docker-compose 1, or removes
    containers that have the only copy of their runs.
    """
    asked = tmp_path / "asked"
    put(path, "docker", "exit 1")
    put(path, "docker-compose", OLD_COMPOSE.format(asked=asked))
    engine = cluster_engine.Engine("c", Path("compose.yaml"))
    start = "up --detach --remove-orphans --scale worker=3"
    if may_remove:
        engine.up(3, {}, may_remove)
        assert asked.read_text().splitlines() == [start, "rm --force --stop", start]
    else:
        with pytest.raises(PreflightError, match="cluster down DIR"):
            engine.up(3, {}, may_remove)
        assert asked.read_text().splitlines() == [start]


# Keys


def test_keys_are_private_and_work_for_ssh(tmp_path: Path) -> None:
    """Fails when others may read them, sshd would not take them, or a second start changes them."""
    folder = tmp_path / "ssh"
    assert cluster_keys.make_keys(folder) is True
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = {path.name: path for path in folder.iterdir()}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files.values()} == {0o600}
    public = subprocess.run(
        ["ssh-keygen", "-y", "-f", files["id_ed25519"]], capture_output=True, text=True, check=True
    )
    assert public.stdout.split()[1] in files["authorized_keys"].read_text()
    find = ["ssh-keygen", "-F", "[any-host]:2222", "-f", files["known_hosts"]]
    known = subprocess.run(find, capture_output=True, text=True, check=False)
    assert files["host_ed25519.pub"].read_text().split()[1] in known.stdout
    before = {name: path.read_bytes() for name, path in files.items()}
    assert cluster_keys.make_keys(folder) is False
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_keys_of_somebody_else_are_left_alone(tmp_path: Path) -> None:
    """Fails when a user's own ~/.ssh is written into."""
    (tmp_path / "id_ed25519").write_text("mine")
    with pytest.raises(UsageError, match="holds id_ed25519"):
        cluster_keys.make_keys(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["id_ed25519"]


# Scripts


@pytest.mark.parametrize("user", [0, 1000])
def test_an_engine_that_cannot_be_started_is_reported(tmp_path: Path, user: int) -> None:
    """Fails when another user than root gets apt's errors, a dead dockerd is waited for, or dockerd
    keeps a lock of who called.
    """
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("docker-compose", "debootstrap"):
        put(programs, name, "exit 0")
    put(programs, "docker", "exit 1")
    put(programs, "dockerd", "ls -l /proc/$$/fd | grep mylock; echo no rights; exit 1")
    put(programs, "id", f"echo {user}")
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "DOCKERD_LOG": str(tmp_path / "log")}
    done = subprocess.run(
        ["sh", "-c", f"exec 3>{tmp_path}/mylock; exec {ROOT}/docker/start-engine"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    reported = "no rights" if user == 0 else "run it as root"
    assert done.returncode == 3 and reported in done.stderr
    assert "mylock" not in done.stderr


def test_a_script_reports_an_old_python(tmp_path: Path) -> None:
    """Fails when launch/cluster ends in a traceback on an old Python."""
    put(tmp_path, "old", "exit 1")
    done = subprocess.run(
        [ROOT / "launch" / "cluster", "down"],
        env=os.environ | {"PYTHON": str(tmp_path / "old")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3 and "Python 3.10 or newer is needed" in done.stderr
