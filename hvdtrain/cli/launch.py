"""`hvdtrain launch`: preflight checks, workers, supervision, restarts and verdict."""

from __future__ import annotations

import argparse
import difflib
import io
import json
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.cli.flags import (
    add_host_flags,
    attempt,
    find_hosts,
    read_train_flags,
    ssh_options,
)
from hvdtrain.config import TrainConfig
from hvdtrain.errors import EXIT_OK, HvdtrainError, PeerFailure, UsageError
from hvdtrain.launcher.command import (
    EngineSetting,
    agent_argv,
    find_controller,
    horovodrun_argv,
    settings_for,
)
from hvdtrain.launcher.hosts import MOST_SLOTS, Host, take_slots
from hvdtrain.launcher.job import JobPlan, LaunchJob, Placed, WorkerCommands, engine_of
from hvdtrain.launcher.logs import Logs
from hvdtrain.launcher.ranks import STOPPED, JobOutcome, Limits
from hvdtrain.launcher.ssh import SshSetup
from hvdtrain.launcher.stopping import StopRequests
from hvdtrain.launcher.view import make_view
from hvdtrain.log import complain, say
from hvdtrain.run.directory import CONFIG, RunDirectory, occupants
from hvdtrain.topology import Topology

HELP = "run train, or a script, on several workers and hosts, checked, watched and restarted"
DESCRIPTION = """\
Train on several workers, on one or more machines: preflight checks, horovodrun, a log per rank,
progress, a verdict, and restarts from the newest checkpoint.

    hvdtrain launch -np 4 -- train --model lenet
    hvdtrain launch --hostfile hosts --restarts 3 -- train --config run.yaml --resume auto
    hvdtrain launch -np 4 -H alpha:2,beta:2 -- python my_horovod_script.py

Hosts are those of -H or --hostfile, else those of Slurm or the MPI Operator, else this machine.
"""
WATCHDOG_S, SCRIPT_WATCHDOG_S = 600.0, 3600.0
BATCH_FLAGS = ("--batch-size", "--batch_size", "--global-batch-size", "--global_batch_size")


@dataclass(frozen=True)
class Launch:
    """The parsed arguments of `hvdtrain launch`."""

    plan: JobPlan
    work: WorkerCommands
    settings: Sequence[EngineSetting]
    log_dir: Path
    config: TrainConfig | None  # None for other commands than `train`


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags, named as in horovodrun where it has them."""
    parser.add_argument("-np", type=int, metavar="N", help="start N workers (default: all slots)")
    add_host_flags(parser)
    parser.add_argument(
        "--controller",
        choices=("auto", "gloo", "mpi"),
        default="auto",
        help="negotiate and reduce over this controller (default: mpi if available)",
    )
    parser.add_argument(
        "--start-timeout-s",
        type=float,
        default=600.0,
        metavar="S",
        help="wait S seconds for all workers to run, and for each first step (default: 600)",
    )
    parser.add_argument(
        "--watchdog-timeout-s",
        type=float,
        metavar="S",
        help="end the job after S seconds without progress, or a script without output "
        f"(default: {WATCHDOG_S:g}; {SCRIPT_WATCHDOG_S:g})",
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="write one log per rank to DIR (default: the run's logs/, or logs/ for other scripts)",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="R",
        help="restart up to R times after failures, from the newest good checkpoint (default: 0)",
    )
    parser.add_argument(
        "--min-np", type=int, metavar="N", help="restart with N or more workers (default: -np)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print horovodrun's command; contact no host"
    )
    parser.add_argument("--verbose", action="store_true", help="log details to horovodrun.log")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- train ... | -- python SCRIPT ..."
    )


def read_launch(arguments: dict[str, Any], unknown: list[str]) -> Launch:
    """Return the parsed arguments.

    Raises UsageError with every problem of the flags, the hosts and the command.
    """
    if unknown:  # the rest of the line was then misparsed too
        raise UsageError(*(_explain_unknown(text, arguments) for text in unknown))
    problems: list[str] = []
    command = [*arguments["command"]]
    arguments = dict(arguments)
    if command[:1] == ["--"]:
        del command[0]
    if command[:2] == ["hvdtrain", "train"]:  # as typed without `launch`
        del command[0]
    problems += _check_command(command)
    if arguments["watchdog_timeout_s"] is None:
        ours = command[:1] == ["train"]
        arguments["watchdog_timeout_s"] = WATCHDOG_S if ours else SCRIPT_WATCHDOG_S
    problems += _check_numbers(arguments)
    hosts = attempt(problems, lambda: _find_hosts(arguments))
    workers = arguments["np"] or sum(host.slots for host in hosts or ())
    if hosts and arguments["np"] is not None and arguments["np"] > 0:
        attempt(problems, lambda: take_slots(hosts, workers))
    if hosts and 0 < workers < (arguments["min_np"] or 0):
        problems.append(f"--min-np={arguments['min_np']}: is above the {workers} workers of -np")
    ssh = attempt(problems, lambda: ssh_options(arguments))
    controller = attempt(problems, lambda: find_controller(arguments["controller"]))
    config = None
    if command[:1] == ["train"]:
        config = attempt(problems, lambda: _read_train(command[1:]))
        if config is not None:
            attempt(problems, lambda: _check_weights(config, workers, arguments))
            attempt(problems, lambda: _check_resume(config, arguments["restarts"]))
    if problems or hosts is None or ssh is None or controller is None:
        raise UsageError(*problems)
    limits = Limits(arguments["start_timeout_s"], arguments["watchdog_timeout_s"])
    settings = settings_for(
        controller, os.environ, limits.watchdog_timeout_s, ours=config is not None
    )
    plan = JobPlan(
        workers=workers,
        min_workers=arguments["min_np"] or workers,
        hosts=hosts,
        controller=controller,
        interface=arguments["network_interface"],
        ssh=ssh,
        limits=limits,
        restarts=arguments["restarts"],
        settings={setting.name: setting.value for setting in settings},
        verbose=arguments["verbose"],
    )
    log_dir = arguments["log_dir"] or (config.folder / "logs" if config else Path("logs"))
    return Launch(plan, _make_work(command, config, workers), settings, log_dir, config)


def _make_work(command: list[str], config: TrainConfig | None, workers: int) -> WorkerCommands:
    """Return the first command and that of restarts.

    A restarted `train` resumes, and keeps its global batch size on any number of workers.
    """
    if config is None:
        return WorkerCommands(command, command)
    train = [sys.executable, "-m", "hvdtrain.cli", "train"]
    flags = command[1:]
    if config.batch.batch_size is not None and not _holds_run(config):  # a run has its own size
        batch = str(config.batch.resolve(workers))
        flags = [*_without(flags, BATCH_FLAGS), "--global-batch-size", batch]
    return WorkerCommands([*train, *command[1:]], [*train, *flags, "--resume", "auto"])


def _check_command(command: list[str]) -> list[str]:
    """Return the problems of the command that can be found before it is started."""
    if not command:
        return ["nothing to launch: give `-- train ...` or `-- python SCRIPT ...`"]
    name = command[0]
    beside_python = str(Path(sys.executable).parent)
    search_path = os.pathsep.join([beside_python, os.environ.get("PATH", os.defpath)])
    if name == "train" or shutil.which(name, path=search_path):
        return []
    if Path(name).suffix == ".py":
        return [f"{name}: is not a command; launch a Python script with `-- python {name} ...`"]
    reason = "is not executable" if Path(name).is_file() else "no such command"
    return [
        f"{name or repr(name)}: {reason}; give `-- train ...`, `-- python SCRIPT ...`, or a "
        "command that is on PATH"
    ]


def _explain_unknown(text: str, arguments: dict[str, Any]) -> str:
    flag = text.partition("=")[0]
    known = [f"--{name.replace('_', '-')}" for name in arguments if name not in ("command", "run")]
    close = difflib.get_close_matches(flag.replace("_", "-"), known, n=1)
    hint = close[0].replace("--np", "-np") if close else "hvdtrain launch --help"
    return f"{flag}: no such flag; {'did you mean' if close else 'see'} {hint}"


def _without(flags: list[str], names: Sequence[str]) -> list[str]:
    """Return the flags without those in `names`, which take a value each."""
    kept, skip = [], False
    for part in flags:
        if not skip and part.partition("=")[0] not in names:
            kept.append(part)
        skip = not skip and part in names
    return kept


def _holds_run(config: TrainConfig) -> bool:
    """Return whether the folder holds a run to resume or, without --resume, to preserve."""
    if config.run.resume is None:
        return CONFIG in occupants(config.folder)
    return (config.folder / CONFIG).exists()


def _read_train(flags: list[str]) -> TrainConfig:
    try:
        config = read_train_flags("hvdtrain train", flags)
    except UsageError as error:
        raise UsageError(*(f"train: {problem}" for problem in error.problems)) from None
    folder = config.folder
    if config.run.resume is None and _holds_run(config):
        raise UsageError(
            f"train: --experiment={folder.name}: {folder} already holds a run; nothing was "
            "changed. Choose another --experiment or --output, add --resume auto, or remove it"
        )
    return config


def _check_resume(config: TrainConfig, restarts: int) -> None:
    resume = config.run.resume
    if restarts and resume not in (None, "auto"):
        raise UsageError(
            f"train: --resume={resume}: a restart continues from the newest checkpoint. "
            "Resume from this one without --restarts first, then use --resume auto"
        )


def _check_weights(config: TrainConfig, workers: int, arguments: dict[str, Any]) -> None:
    if workers > 0:
        config.batch.weights(workers)
    if config.batch.rank_weights and (arguments["min_np"] or workers) != workers:
        raise UsageError(
            f"--min-np={arguments['min_np']}: --rank-weights={config.batch.rank_weights} are for "
            f"{workers} workers; give only one of them"
        )


def _check_numbers(arguments: dict[str, Any]) -> list[str]:
    problems = []
    for flag, smallest in (("np", 1), ("min_np", 1), ("restarts", 0)):
        value = arguments[flag]
        if value is not None and value < smallest:
            shown = "-np " if flag == "np" else f"--{flag.replace('_', '-')}="
            problems.append(f"{shown}{value}: must be at least {smallest}")
    if arguments["np"] is not None and arguments["np"] > MOST_SLOTS:
        problems.append(f"-np {arguments['np']}: must be at most {MOST_SLOTS:,}")
    for flag in ("start_timeout_s", "watchdog_timeout_s"):
        value = arguments[flag]
        if not 0 < value < float("inf"):
            problems.append(
                f"--{flag.replace('_', '-')}={value:g}: must be a number of seconds above 0"
            )
    if arguments["min_np"] is not None and not arguments["restarts"]:
        problems.append("--min-np: applies to restarts; add --restarts R")
    interface = arguments["network_interface"]
    if interface is not None and interface not in (
        interfaces := [name for _, name in socket.if_nameindex()]
    ):
        problems.append(
            f"--network-interface={interface}: this machine has no such interface "
            f"(it has {', '.join(interfaces)})"
        )
    if arguments["log_dir"] is not None and arguments["log_dir"].is_file():
        problems.append(f"--log-dir={arguments['log_dir']}: is a file; choose another")
    return problems


def _find_hosts(arguments: dict[str, Any]) -> tuple[Host, ...]:
    found = find_hosts(arguments)
    if found:
        return found
    if arguments["np"] is None:
        raise UsageError("how many workers? Give -np N, or hosts by -H or --hostfile")
    return (Host("localhost", max(1, arguments["np"]), source="-np"),)


def run(arguments: dict[str, Any], unknown: list[str], topology: Topology) -> int:
    """Launch and return the exit code: that of the first failing worker, or 128 + n on signal n.

    Raises UsageError.
    """
    if topology.launched:
        raise UsageError(
            "launch starts the workers itself: run it once, not under horovodrun, mpirun or srun"
        )
    launch = read_launch(arguments, unknown)
    if arguments["dry_run"]:
        return _dry_run(launch)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # workers' output may not fit its encoding
            stream.reconfigure(errors="replace")
    started_s = time.time()
    stop = StopRequests()
    view = make_view(launch.plan.workers, sys.stdout, launch.log_dir)
    logs = Logs(launch.log_dir, view.line)
    try:
        view.notice(f"{launch.plan.workers} workers, {launch.plan.controller}; logs: {logs.folder}")
        for setting in launch.settings:
            view.notice(f"set {setting.name}={setting.value}: {setting.why}")
        outcome = LaunchJob(launch.plan, launch.work, logs, stop, view.notice, view.update).run()
        if outcome.exit_code != EXIT_OK:
            _leave_summary(launch, outcome, started_s, view.notice)
    finally:
        logs.close()
        view.close()
    if outcome.exit_code != EXIT_OK:
        complain(f"hvdtrain launch: {outcome.text}")
        complain(f"hvdtrain launch: exit code {outcome.exit_code}; logs in {launch.log_dir}")
    return outcome.exit_code


def _dry_run(launch: Launch) -> int:
    hosts = take_slots(launch.plan.hosts, launch.plan.workers)
    ssh = SshSetup(hosts, launch.plan.ssh)
    engine = engine_of(launch.plan, Placed(hosts, None), [ssh.name_of(host) for host in hosts])
    say(shlex.join(horovodrun_argv(engine, agent_argv("JOB"))))
    for setting in launch.settings:
        complain(f"{setting.name}={setting.value}: {setting.why}")
    complain(f"each worker runs: {shlex.join(launch.work.command)}")
    return EXIT_OK


def _leave_summary(
    launch: Launch, outcome: JobOutcome, started_s: float, notify: Callable[[str], None]
) -> None:
    """Write the summary of a run whose rank 0 was killed before, or did not find the cause."""
    if launch.config is None:
        return
    folder = launch.config.folder
    path = folder / "summary.json"
    config = folder / "config.yaml"
    if not config.exists() or config.stat().st_mtime < started_s:  # rank 0 did not get so far
        return
    try:
        held: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
        own = path.exists() and path.stat().st_mtime >= started_s
        if own and not str(held.get("error")).startswith(PeerFailure.__name__):
            return
        directory = RunDirectory(folder, reopen=True)
        try:
            status = "stopped" if outcome.exit_code in STOPPED else "failed"
            found = {"status": status, "error": outcome.text, "exit_code": outcome.exit_code}
            directory.write_summary({"world_size": launch.plan.workers} | held | found)
        finally:
            directory.close()
    except (HvdtrainError, OSError, ValueError) as error:
        notify(f"the summary cannot be written: {error}")
