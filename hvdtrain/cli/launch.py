"""`hvdtrain launch`: preflight checks, workers, supervision, restarts and verdict."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.cli import COMMANDS
from hvdtrain.cli.flags import add_host_flags, attempt, find_hosts, read_train_flags, ssh_options
from hvdtrain.config import TrainConfig
from hvdtrain.errors import EXIT_OK, HvdtrainError, PeerFailure, Stopped, UsageError, closest
from hvdtrain.files import time_at
from hvdtrain.interpreter import module_argv
from hvdtrain.launcher.horovodrun import (
    SETTING_REASONS,
    agent_argv,
    find_controller,
    horovodrun_argv,
    search_path,
    settings_for,
)
from hvdtrain.launcher.hosts import MOST_SLOTS, Host, take_slots
from hvdtrain.launcher.job import JobPlan, LaunchJob, horovodrun_options
from hvdtrain.launcher.logs import Logs
from hvdtrain.launcher.processes import StopRequests
from hvdtrain.launcher.ranks import Limits
from hvdtrain.launcher.ssh import SshSetup
from hvdtrain.launcher.verdict import JobOutcome, is_of_stop
from hvdtrain.launcher.view import make_view
from hvdtrain.log import complain, counted, moment, say
from hvdtrain.records.directory import CONFIG, RunDirectory, free_folder, numbering
from hvdtrain.topology import Topology

HELP = "run train, verify, bench or a script on several workers: checked, watched, restarted"
DESCRIPTION = """\
Start `train`, `verify`, `bench` or your own script on several workers, on one or more machines:
checks before the start, a log per rank, progress, the cause of a failure, and restarts.

    hvdtrain launch -np 4 -- train --model lenet
    hvdtrain launch --hostfile hosts --restarts 3 -- train --config run.yaml --resume auto
    hvdtrain launch -np 4 -H alpha:2,beta:2 -- python my_horovod_script.py
    hvdtrain launch -np 2 -- verify

Hosts: -H or --hostfile, else those of Slurm or the MPI Operator, else this machine (-np required).
"""
WATCHDOG_S, SCRIPT_WATCHDOG_S = 600.0, 3600.0
SECONDS = "must be a number of seconds above 0"
OWN_COMMANDS = ("train", "verify", "bench")  # those that run on every worker
BATCH_FLAGS = ("--batch-size", "--batch_size", "--global-batch-size", "--global_batch_size")


@dataclass(frozen=True)
class Launch:
    """The parsed arguments of `hvdtrain launch`."""

    plan: JobPlan
    log_dir: Path
    config: TrainConfig | None  # None for other commands than `train`
    logs_follow: bool = False  # a script's move to the folder of its run
    note: str = ""  # on the name of a new run, if another run has the one that was asked for


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags, named as in horovodrun where it has them."""
    add = parser.add_argument
    text = "start N workers (default: all slots of the hosts; required without hosts)"
    add("-np", type=int, metavar="N", help=text)
    add_host_flags(parser)
    add(
        "--controller",
        choices=("auto", "gloo", "mpi"),
        default="auto",
        help="negotiate and reduce over this controller (default: mpi on one host, if available, "
        "else gloo)",
    )
    add(
        "--start-timeout-s",
        type=float,
        default=600.0,
        metavar="S",
        help="allow workers S seconds to connect, then to begin their first step (default: 600 s)",
    )
    add(
        "--watchdog-timeout-s",
        type=float,
        metavar="S",
        help="end the job after S seconds without progress, or without output of a script "
        f"(default: {WATCHDOG_S:g} s for train, {SCRIPT_WATCHDOG_S:g} s for other commands)",
    )
    add(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="write one log per rank to DIR (default: logs/ in the run, else ./logs/)",
    )
    add(
        "--restarts",
        type=int,
        default=0,
        metavar="R",
        help="restart up to R times after failures; train resumes from a checkpoint (default: 0)",
    )
    add("--min-np", type=int, metavar="N", help="restart with N or more workers (default: -np)")
    add("--dry-run", action="store_true", help="print horovodrun's command; contact no host")
    add("--plain", action="store_true", help="print plain lines, no live view, on a terminal too")
    add("--verbose", action="store_true", help="log details to horovodrun.log; print settings")
    shown = "-- train ... | -- verify | -- bench NAME | -- python SCRIPT ..."
    add("command", nargs=argparse.REMAINDER, metavar=shown, help="run this on every worker")


def read_launch(arguments: dict[str, Any], unknown: Sequence[str]) -> Launch:
    """Return the parsed arguments; raise UsageError with every problem.

    `unknown`: the problems of unknown arguments. The rest of the line was then misparsed too.
    """
    if unknown:
        raise UsageError(*unknown)
    command = _read_command(arguments["command"])
    ours = command[:1] == ["train"]
    default_s = WATCHDOG_S if ours else SCRIPT_WATCHDOG_S
    given_s, np, min_np = (arguments[name] for name in ("watchdog_timeout_s", "np", "min_np"))
    limits = Limits(arguments["start_timeout_s"], default_s if given_s is None else given_s)
    problems = [*_check_command(command), *_check_numbers(arguments, limits)]
    hosts, note = attempt(problems, lambda: find_hosts(arguments)), ""
    if hosts == () and np is None:
        problems.append("how many workers? Give -np N, or hosts by -H or --hostfile")
    elif hosts == () and (around := Topology.from_environment().in_job_of_several):
        problems.append(
            f"{around}: this is one of several hosts or processes, and launch would start a job of "
            "its own in each. Start it once, with all hosts by -H or --hostfile; for a job on this "
            f"machine alone, add -H localhost:{np}"
        )
    elif hosts == ():
        hosts = (Host("localhost", max(1, np), source="-np"),)
    workers = np or sum(host.slots for host in hosts or ())
    taken = attempt(problems, lambda: take_slots(hosts, workers)) if hosts else None
    if hosts and 0 < workers < (min_np or 0):
        problems.append(f"--min-np={min_np}: is above the {counted(workers, 'worker')} of -np")
    ssh = attempt(problems, lambda: ssh_options(arguments))
    many = len({host.address for host in taken or ()})
    controller = attempt(problems, lambda: find_controller(arguments["controller"], many))
    config = attempt(problems, lambda: _read_train(command[1:])) if ours else None
    if config is not None:
        command, config, note = _numbered(command, config)
        problems += _check_train(config, workers, min_np, arguments["restarts"])
    if problems or hosts is None or ssh is None or controller is None:
        raise UsageError(*problems)
    first, restarted = _worker_commands(command, config, workers)
    plan = JobPlan(
        command=first,
        restarted=restarted,
        workers=workers,
        min_workers=min_np or workers,
        hosts=hosts,
        controller=controller.name,
        reason=controller.reason,
        interface=arguments["network_interface"],
        ssh=ssh,
        limits=limits,
        restarts=arguments["restarts"],
        settings=settings_for(controller.name, os.environ, limits.watchdog_timeout_s, command[0]),
        verbose=arguments["verbose"],
        typed=shlex.join(["hvdtrain", *sys.argv[1:]]),
    )
    log_dir = arguments["log_dir"] or (config.folder / "logs" if config else Path("logs"))
    if log_dir.is_symlink() and not arguments["log_dir"]:
        raise UsageError(
            f"{log_dir}: is a symbolic link, which is not followed; give --log-dir DIR"
        )
    return Launch(plan, log_dir, config, not config and not arguments["log_dir"], note)


def _worker_commands(
    command: list[str], config: TrainConfig | None, workers: int
) -> tuple[list[str], list[str]]:
    """Return the first command and that of restarts."""
    entry_point = module_argv("hvdtrain.cli") if command[0] in OWN_COMMANDS else []
    first, flags = [*entry_point, *command], command[1:]
    if config is None:
        return first, first
    # The global batch stays on any number of workers; a run to resume has its own.
    resumes = config.run.resume is not None and (config.folder / CONFIG).exists()
    if config.batch.batch_size is not None and not resumes:
        batch = str(config.batch.resolve(workers))
        flags = [*_without(flags, BATCH_FLAGS), "--global-batch-size", batch]
    return first, [*entry_point, "train", *flags, "--resume", "auto"]


def _read_command(words: list[str]) -> list[str]:
    """Return the command after `--`; `hvdtrain train` is `train`, as typed without `launch`."""
    command = words[1:] if words[:1] == ["--"] else [*words]
    is_own = command[:1] == ["hvdtrain"] and command[1:2] and command[1] in OWN_COMMANDS
    return command[1:] if is_own else command


def _check_command(command: list[str]) -> list[str]:
    if not command:
        return ["nothing to launch: give `-- train ...` or `-- python SCRIPT ...`"]
    name = command[0]
    if re.fullmatch(r"(python|pypy)[\d.]*", Path(name).name) and _reads_stdin(command[1:]):
        return [
            f"{shlex.join(command)}: reads its code from standard input, which only the launcher "
            "has: save it as a script, and launch that"
        ]
    if name in OWN_COMMANDS or shutil.which(name, path=search_path(os.environ)):
        return []
    if Path(name).suffix == ".py":
        return [f"{name}: is not a command; launch a Python script with `-- python {name} ...`"]
    reason = "is not executable" if Path(name).is_file() else "no such command"
    hint = "give `-- train ...`, `-- python SCRIPT ...`, or a command that is on PATH"
    if name in COMMANDS:
        return [f"{name}: does not run on workers; use `hvdtrain {shlex.join(command)}` alone"]
    if near := closest(name, OWN_COMMANDS):
        hint = f"did you mean {near}?"
    return [f"{name or repr(name)}: {reason}; {hint}"]


def _reads_stdin(words: Sequence[str]) -> bool:
    """Return whether Python, given these words, has no script, module or code."""
    for index, word in enumerate(words):
        if word == "-" or not word.startswith("-"):
            return word == "-"
        if word[1] in "cmVh?" or word.startswith("--"):  # -c CODE, -m MODULE, or only information
            return False
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            return _reads_stdin(words[index + 2 :])
    return True


def _without(flags: list[str], names: Sequence[str]) -> list[str]:
    """Return the flags without those in `names`, which take a value each."""
    kept, skip = [], False
    for part in flags:
        if not skip and part.partition("=")[0] not in names:
            kept.append(part)
        skip = not skip and part in names
    return kept


def _numbered(command: list[str], config: TrainConfig) -> tuple[list[str], TrainConfig, str]:
    """Return both with a name that no run has, unless one is resumed, and a note if it is another.

    All starts of a job must be given the same name, as the later ones resume the first.
    """
    folder = config.folder
    free = folder if config.run.resume else free_folder(folder)
    if free == folder:
        return command, config, ""
    config = replace(config, run=replace(config.run, experiment=free.name))
    command = [*_without(command, ("--experiment",)), "--experiment", free.name]
    return command, config, numbering(folder, free)


def _read_train(flags: list[str]) -> TrainConfig:
    try:
        return read_train_flags("hvdtrain train", flags)
    except UsageError as error:
        raise UsageError(*(f"train: {problem}" for problem in error.problems)) from None


def _check_train(config: TrainConfig, workers: int, min_np: int | None, restarts: int) -> list[str]:
    problems: list[str] = []
    weights, resume = config.batch.rank_weights, config.run.resume
    if workers > 0:
        attempt(problems, lambda: config.batch.weights(workers))
    if weights not in (None, "auto") and (min_np or workers) != workers:
        problems.append(
            f"--min-np={min_np}: --rank-weights={weights} are for {counted(workers, 'worker')}; "
            "give only one of them"
        )
    if restarts and resume not in (None, "auto"):
        problems.append(
            f"train: --resume={resume}: a restart continues from the newest checkpoint. "
            "Resume from this one without --restarts first, then use --resume auto"
        )
    return problems


def _check_numbers(arguments: dict[str, Any], limits: Limits) -> list[str]:
    np, min_np, restarts = (arguments[name] for name in ("np", "min_np", "restarts"))
    interface, log_dir = arguments["network_interface"], arguments["log_dir"]
    interfaces = [name for _, name in socket.if_nameindex()]
    no_interface = f"this machine has no such interface (it has {', '.join(interfaces)})"
    start_s, watchdog_s = limits.start_timeout_s, limits.watchdog_timeout_s
    checks = [
        (f"-np {np}", np is not None and np < 1, "must be at least 1"),
        (f"--min-np={min_np}", min_np is not None and min_np < 1, "must be at least 1"),
        (f"--restarts={restarts}", restarts < 0, "must be at least 0"),
        (f"-np {np}", (np or 0) > MOST_SLOTS, f"must be at most {MOST_SLOTS:,}"),
        (f"--start-timeout-s={start_s:g}", not 0 < start_s < math.inf, SECONDS),
        (f"--watchdog-timeout-s={watchdog_s:g}", not 0 < watchdog_s < math.inf, SECONDS),
        ("--min-np", min_np is not None and not restarts, "applies to restarts; add --restarts R"),
        (f"--network-interface={interface}", interface not in (None, *interfaces), no_interface),
        (f"--log-dir={log_dir}", log_dir and log_dir.is_file(), "is a file; choose another"),
    ]
    return [f"{flag}: {problem}" for flag, is_wrong, problem in checks if is_wrong]


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Launch and return the exit code: that of the first failing worker, or 128 + n on signal n."""
    if topology.launched:
        raise UsageError(
            "launch starts the workers itself: run it once, not under horovodrun, mpirun or srun"
        )
    launch = read_launch(arguments, problems)
    if arguments["dry_run"]:
        return _dry_run(launch)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # workers' output may not fit its encoding
            stream.reconfigure(errors="replace")
    started_s = time.time()
    since_s = started_s if launch.config is None else time_at(launch.config.folder)
    stop = StopRequests()
    view = make_view(launch.plan.workers, sys.stdout, launch.log_dir, arguments["plain"])
    logs = Logs(launch.log_dir, view.line, launch.logs_follow)
    try:
        workers = counted(launch.plan.workers, "worker")
        view.notice(f"{workers}, {_controller(launch.plan)}; logs: {logs.folder}")
        for name, value in launch.plan.settings.items() if launch.plan.verbose else ():
            view.notice(f"set {name}={value}: {SETTING_REASONS[name]}")
        if launch.note:
            view.notice(launch.note)
        outcome = LaunchJob(launch.plan, logs, stop, view.notice, view.update).run()
        _leave_summary(launch, outcome, started_s, since_s, view.notice)
    except Stopped as stopped:  # in the checks, or in a pause before a restart
        view.notice(str(stopped))
        return stopped.exit_code
    finally:
        logs.close()
        view.close()
    if outcome.exit_code != EXIT_OK:
        complain(f"hvdtrain launch: {outcome.text}")
        complain(f"hvdtrain launch: exit code {outcome.exit_code}; logs in {logs.folder}")
    return outcome.exit_code


def _dry_run(launch: Launch) -> int:
    plan = replace(launch.plan, hosts=take_slots(launch.plan.hosts, launch.plan.workers))
    options = horovodrun_options(plan, SshSetup(plan.hosts, plan.ssh))
    say(shlex.join(horovodrun_argv(options, agent_argv("JOB"))))
    complain(_controller(plan))
    for name, value in plan.settings.items():
        complain(f"{name}={value}: {SETTING_REASONS[name]}")
    if launch.note:
        complain(launch.note)
    complain(f"each worker runs: {shlex.join(plan.command)}")
    return EXIT_OK


def _controller(plan: JobPlan) -> str:
    return plan.controller + (f" ({plan.reason})" if plan.reason else "")


def _leave_summary(
    launch: Launch,
    outcome: JobOutcome,
    started_s: float,
    since_s: float,
    notify: Callable[[str], None],
) -> None:
    """Write the summary of a run whose rank 0 was killed before, or did not find the cause.

    `since_s`: when the launcher started, by the clock of the file server.
    """
    if launch.config is None or outcome.exit_code == EXIT_OK:
        return
    folder = launch.config.folder
    path, config = folder / "summary.json", folder / CONFIG
    if not config.exists() or config.stat().st_mtime < since_s:  # rank 0 did not get so far
        return
    try:
        held: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
        is_current = path.exists() and path.stat().st_mtime >= since_s
        if is_current and not str(held.get("error")).startswith(PeerFailure.__name__):
            return
        with closing(RunDirectory(folder, reopen=True)) as directory:
            status = "stopped" if is_of_stop(outcome.exit_code) else "failed"
            ending = {"status": status, "error": outcome.text, "exit_code": outcome.exit_code}
            ending |= {"ended": moment()} | ({} if is_current else {"started": moment(started_s)})
            directory.write_summary({"world_size": launch.plan.workers} | held | ending)
    except (HvdtrainError, OSError, ValueError) as error:
        notify(f"the summary cannot be written: {error}")
