"""What `hvdtrain launch` makes of its flags."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import pytest

from hvdtrain.cli import make_parser
from hvdtrain.cli.flags import add_all, read_train_flags
from hvdtrain.cli.launch import FLAGS, SCRIPT_WATCHDOG_S, WATCHDOG_S, Launch, read_launch
from hvdtrain.interpreter import module_argv
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.metrics import Endpoint
from hvdtrain.launcher.ranks import Limits

TRAIN = [*module_argv("hvdtrain.cli"), "train"]
SLURM = {
    "SLURM_JOB_NODELIST": "gpu[1-2]",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NUM_TASKS": "1",
}


@pytest.fixture(autouse=True)
def plain_place(tmp_path: Path, monkeypatch) -> None:
    """An empty folder, no scheduler, no settings of the user's."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("SLURM_", "HOROVOD_", "OMPI_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr("hvdtrain.cli.flags.hosts_of_site", _hosts_of_site_without_files)


def _hosts_of_site_without_files(environment: dict[str, str]) -> tuple[Host, ...]:
    from hvdtrain.launcher.sites import hosts_of_site

    return hosts_of_site(environment, Path("absent"))


def read(*flags: str) -> Launch:
    """As `hvdtrain launch FLAGS` would."""
    arguments, unknown = make_parser().parse_known_args(["launch", *flags])
    return read_launch(vars(arguments), arguments.explain(unknown))


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["train"], "lenet-digits"),
        (["train", "--experiment", "my run"], "my-run"),
        (["python", "-u", "scripts/fit it.py", "--other", "b.py"], "fit-it"),
        (["verify", "--full"], "verify"),
        (["/bin/true"], "true"),
    ],
)
def test_names_of_jobs(command: list[str], name: str) -> None:
    """Fails when a job in the background has a name that is no file's, or not that of its run."""
    assert read("-np", "1", "--", *command).name == name


def test_defaults() -> None:
    """Fails when a default changes that users rely on."""
    launch = read("-np", "3", "--", "train")
    plan = launch.plan
    assert (plan.workers, plan.min_workers, plan.restarts) == (3, 3, 0)
    assert plan.hosts == (Host("localhost", 3, source="-np"),)
    assert (plan.interface, plan.verbose) == (None, False)
    assert (plan.ssh.port, plan.ssh.identity_file) == (None, None)
    assert (plan.limits.start_timeout_s, plan.limits.watchdog_timeout_s) == (600.0, WATCHDOG_S)
    assert launch.log_dir == Path("runs/lenet-digits/logs")
    assert launch.config is not None
    assert plan.settings["HOROVOD_FUSION_THRESHOLD"] == "0"
    assert list(Path().iterdir()) == []


def test_flags_are_heard(tmp_path: Path) -> None:
    """Fails when a flag is not passed on, or to another place."""
    (tmp_path / "key").write_text("")
    launch = read(
        *("-np", "3", "-H", "a:2,b:2", "--controller", "gloo", "--network-interface", "lo"),
        *("-p", "2222", "-i", "key", "--start-timeout-s", "7.5", "--watchdog-timeout-s", "9"),
        *("--log-dir", "here", "--restarts", "4", "--min-np", "2", "--verbose"),
        *("--stop-within-s", "25", "--", "train"),
    )
    plan = launch.plan
    assert (plan.workers, plan.min_workers, plan.restarts) == (3, 2, 4)
    assert [(host.name, host.slots) for host in plan.hosts] == [("a", 2), ("b", 2)]
    assert (plan.controller, plan.interface, plan.verbose) == ("gloo", "lo", True)
    assert (plan.ssh.port, plan.ssh.identity_file) == (2222, Path("key"))
    assert plan.limits == Limits(7.5, 9.0, 25.0)
    assert launch.log_dir == Path("here")
    assert launch.endpoint is None
    Path("token").write_text("a-token-of-24-characters\n")
    metrics = ("--metrics-port", "9400", "--metrics-host", "::", "--metrics-token-file", "token")
    launch = read("-np", "1", *metrics, "--", "train")
    assert launch.endpoint == Endpoint("::", 9400, "a-token-of-24-characters")
    assert "token" not in repr(launch.endpoint)


def test_the_time_to_stop_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a job script's variable is overlooked, or stronger than the flag."""
    flags = ["-np", "1", "--", "train"]
    assert read(*flags).plan.limits.stop_within_s == 60
    monkeypatch.setenv("HVDTRAIN_STOP_WITHIN_S", "110")
    assert read(*flags).plan.limits.stop_within_s == 110
    assert read("--stop-within-s=25", *flags).plan.limits.stop_within_s == 25


@pytest.mark.parametrize(
    ("flags", "workers", "hosts"),
    [
        (["-H", "a:2,ann@b"], 3, [("a", 2, "-H"), ("ann@b", 1, "-H")]),
        (["--hosts", "a:2", "-np", "1"], 1, [("a", 2, "-H")]),
        (["--hostfile", "hosts"], 6, [("a", 2, "hosts:2"), ("b", 4, "hosts:3")]),
        (["-hostfile", "hosts", "-np", "5"], 5, [("a", 2, "hosts:2"), ("b", 4, "hosts:3")]),
        (["-np", "4"], 4, [("localhost", 4, "-np")]),
    ],
)
def test_hosts_of_flags(flags: list[str], workers: int, hosts: list) -> None:
    """Fails when hosts, slots or their order are others than the user wrote, or `-np` is not the
    number of all slots where it is left out.
    """
    Path("hosts").write_text("# mine\na slots=2\nb:4\n")
    plan = read(*flags, "--", "train").plan
    assert plan.workers == plan.min_workers == workers
    assert [(host.address, host.slots, host.source) for host in plan.hosts] == hosts


def test_hosts_of_slurm(monkeypatch) -> None:
    """Fails when a Slurm job does not use its hosts, or uses them against -H or --hostfile."""
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    plan = read("--", "train").plan
    assert plan.workers == 4
    assert [(host.name, host.slots) for host in plan.hosts] == [("gpu1", 2), ("gpu2", 2)]
    assert read("-np", "3", "--", "train").plan.workers == 3
    assert [host.name for host in read("-H", "mine", "--", "train").plan.hosts] == ["mine"]
    Path("hosts").write_text("other\n")
    assert [host.name for host in read("--hostfile", "hosts", "--", "train").plan.hosts] == [
        "other"
    ]


@pytest.mark.parametrize("word", [[], ["hvdtrain"]])
@pytest.mark.parametrize("name", ["verify", "bench", "evaluate", "predict"])
def test_commands_that_run_on_workers(name: str, word: list[str]) -> None:
    """Fails when they are looked up on PATH, restarted with a flag of `train`, or get a run."""
    launch = read("-np", "2", "--restarts=1", "--", *word, name, "--json=x")
    expected = [*module_argv("hvdtrain.cli"), name, "--json=x"]
    assert launch.plan.command == launch.plan.restarted == expected
    assert launch.config is None


@pytest.mark.parametrize(
    ("flags", "folder"),
    [
        (["--", "train", "--output", "o", "--experiment=e"], "o/e/logs"),
        (["--", "train", "--model=mlp"], "runs/mlp-digits/logs"),
        (["--log-dir", "l", "--", "train"], "l"),
        (["--", "python", "x.py", "--output", "o"], "logs"),
        (["--log-dir=l/m", "--", "python", "x.py"], "l/m"),
    ],
)
def test_where_logs_go(flags: list[str], folder: str) -> None:
    """Fails when logs of a run are not in its folder, or a flag of a script is taken for ours."""
    assert read("-np", "1", *flags).log_dir == Path(folder)


@pytest.mark.parametrize(
    ("flags", "restarted"),
    [
        ("--model=mlp", "--model=mlp --resume auto"),
        ("--batch-size 8 --lr 0.1", "--lr 0.1 --global-batch-size 24 --resume auto"),
        ("--batch-size=8 --lr=0.1", "--lr=0.1 --global-batch-size 24 --resume auto"),
        ("--batch_size 8", "--global-batch-size 24 --resume auto"),
        ("--batch_size=8 --seed 8", "--seed 8 --global-batch-size 24 --resume auto"),
        ("--global-batch-size 32", "--global-batch-size 32 --resume auto"),
        ("--config c.yaml", "--config c.yaml --global-batch-size 15 --resume auto"),
        ("--config=c.yaml --batch-size 2", "--config=c.yaml --global-batch-size 6 --resume auto"),
        (
            "--config c.yaml --global-batch-size=9",
            "--config c.yaml --global-batch-size=9 --resume auto",
        ),
        ("--config=g.yaml", "--config=g.yaml --resume auto"),
        ("--resume auto", "--resume auto --resume auto"),
        ("--output s3://b/runs", "--output s3://b/runs"),  # where another run may have the name
        ("--output s3://b/r --batch-size 8", "--output s3://b/r --global-batch-size 24"),
        (
            "--output s3://b/r --batch-size 8 --resume auto",
            "--output s3://b/r --batch-size 8 --resume auto",
        ),
    ],
)
def test_a_restart_is_the_same_experiment(flags: str, restarted: str) -> None:
    """Fails when a restart, which may have fewer workers, has another global batch than the first
    start, does not go on from the last checkpoint, or loses another flag.
    """
    Path("c.yaml").write_text("batch_size: 5\nlr: 0.1\n")
    Path("g.yaml").write_text("global_batch_size: 64\n")
    work = read("-np", "3", "--restarts", "1", "--", "train", *flags.split()).plan
    assert work.command == [*TRAIN, *flags.split()]
    assert work.restarted == [*TRAIN, *restarted.split()]


@pytest.mark.parametrize("flags", ["", "--batch-size 8", "--config c.yaml"])
def test_a_resumed_run_keeps_its_own_batch(flags: str) -> None:
    """Fails when a restart of a run that is itself resumed names a global batch: the run has one
    already, and refuses another.
    """
    Path("c.yaml").write_text("batch_size: 5\n")
    folder = Path("runs/lenet-digits")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("global_batch_size: 512\n")
    given = ["--resume", "auto", *flags.split()]
    work = read("-np", "3", "--restarts", "1", "--", "train", *given).plan
    assert work.restarted == [*TRAIN, *given, "--resume", "auto"]


def test_hvdtrain_train_is_train() -> None:
    """Fails when `-- hvdtrain train ...` is launched as a script that can neither resume nor say
    where it is.
    """
    launch = read("-np", "2", "--", "hvdtrain", "train", "--model=mlp")
    assert launch.plan.command == [*TRAIN, "--model=mlp"]


@pytest.mark.parametrize(
    "command",
    [
        ["python", "script.py"],
        ["python", "script.py", "--batch-size", "8", "--resume", "auto", "-np", "9"],
        ["python", "-c", "print(1)", "--", "--np", "3", "--", "x"],
        ["python", "script.py", "--restarts=7", "--dry-run", "--log-dir", "x", "--help"],
        ["hvdtrain", "plan", "--full"],
        [sys.executable, "-m", "train"],
        ["python", "train"],
        ["sh", "-c", 'exec python x.py "$@"', "", "a b"],
    ],
)
@pytest.mark.parametrize("separator", [["--"], []])
def test_other_commands_are_left_alone(command: list[str], separator: list[str]) -> None:
    """Fails when a word of a command that is not ours is read, changed or left out, or when it is
    restarted with flags that it may not have.
    """
    launch = read("-np", "2", "--restarts", "1", *separator, *command)
    assert launch.plan.command == launch.plan.restarted == command
    assert launch.config is None
    assert launch.plan.restarts == 1 and launch.plan.workers == 2
    assert launch.plan.limits.watchdog_timeout_s == SCRIPT_WATCHDOG_S
    assert "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS" in launch.plan.settings


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("mpirun (Open MPI) 4.1.8", "mpi"),
        ("mpirun (Open MPI) 5.0.3", "gloo"),
        ("HYDRA build details: 4.1.2", "gloo"),
        (None, "gloo"),
    ],
)
def test_the_controller_that_is_there(
    answer: str | None, expected: str, tmp_path: Path, monkeypatch
) -> None:
    """Fails when `auto` chooses a controller that cannot be started, or the slower one."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\necho '{answer}'\n")
    mpirun.chmod(0o755)
    monkeypatch.setattr("hvdtrain.launcher.horovodrun.find_mpirun", lambda: answer and str(mpirun))
    assert read("-np", "1", "--", "train").plan.controller == expected
    assert read("-np", "1", "--controller", "gloo", "--", "train").plan.controller == "gloo"


def test_the_users_settings_stay(monkeypatch) -> None:
    """Fails when a setting that the user has made is reported as set by us."""
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1048576")
    launch = read("-np", "1", "--", "train")
    assert "HOROVOD_FUSION_THRESHOLD" not in launch.plan.settings


def test_the_command_is_found_where_workers_find_it(tmp_path: Path, monkeypatch) -> None:
    """Fails when a command is refused that workers would find: beside Python, by a path from the
    working folder, or as a script of the user's.
    """
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    script = tmp_path / "run.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o700)
    for command in (["python", "x"], ["./run.sh"], [str(script)], ["sh", "run.sh"]):
        assert read("-np", "1", "--", *command).plan.command == command


def test_every_flag_is_explained(capsys) -> None:
    """Fails when a flag has no help, or the help cannot be printed."""
    parser = argparse.ArgumentParser()
    add_all(parser, FLAGS)
    text = parser.format_help()
    assert all(action.help for action in parser._actions if action.dest != "command")
    assert "--watchdog-timeout-s" in text and "%" not in text


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--experiment", "e"], "e-2"),
        (["--experiment=e", "--restarts=1"], "e-2"),
        (["--experiment", "e", "--resume", "auto"], "e"),
        (["--experiment", "f"], "f"),
    ],
)
def test_all_starts_of_a_job_have_one_name(flags: list[str], name: str) -> None:
    """Fails if a new run gets the name of an earlier one, a resumed one another, or a restart would
    take the next number instead of resuming the first start.
    """
    Path("runs/e").mkdir(parents=True)
    Path("runs/e/config.yaml").write_text("")
    own = [flag for flag in flags if "restarts" in flag]
    launch = read("-np", "2", *own, "--", "train", *(flag for flag in flags if flag not in own))
    assert launch.config is not None and launch.config.experiment == name
    assert launch.log_dir == Path("runs", name, "logs")
    assert ("runs/e-2" in launch.note) is (name == "e-2") is bool(launch.note)
    for command in (launch.plan.command, launch.plan.restarted):
        given = read_train_flags("train", command[len(TRAIN) :])
        assert given.experiment == name
    assert launch.plan.restarted[-2:] == ["--resume", "auto"]
