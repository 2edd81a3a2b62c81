"""`hvdtrain launch`: preflight checks, workers, supervision, restarts and verdict."""

import io
import os
import shlex
import socket
import sys
import time
from argparse import REMAINDER
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.cli.flags import (
    CONTROLLERS,
    HOST_FLAGS,
    SECONDS,
    Command,
    Flag,
    ssh_options,
    wrong_flags,
)
from hvdtrain.cli.kubernetes import KUBERNETES_FLAGS, print_kubernetes
from hvdtrain.cli.metrics import METRICS_FLAGS, read_endpoint
from hvdtrain.cli.nodes import NODES_FLAGS, describe, find_job_hosts
from hvdtrain.cli.worker_command import (
    check_command,
    check_train,
    job_name,
    log_folder,
    numbered,
    read_command,
    read_train,
    worker_commands,
)
from hvdtrain.config import TrainConfig
from hvdtrain.config.fields import Check, at_least
from hvdtrain.errors import EXIT_OK, HvdtrainError, Stopped, UsageError, attempt, refuse
from hvdtrain.files import time_at
from hvdtrain.launcher.background import run_in_background
from hvdtrain.launcher.horovodrun import (
    SETTING_REASONS,
    find_controller,
    settings_for,
)
from hvdtrain.launcher.hosts import MOST_SLOTS, take_slots
from hvdtrain.launcher.job import JobPlan, LaunchJob, job_argv
from hvdtrain.launcher.logs import Logs
from hvdtrain.launcher.metrics import Endpoint, MetricsServer
from hvdtrain.launcher.nodes import Rendezvous
from hvdtrain.launcher.nodes.hub import joined
from hvdtrain.launcher.processes import StopRequests
from hvdtrain.launcher.ranks import STOP_WITHIN_S, Limits
from hvdtrain.launcher.ssh import SshSetup
from hvdtrain.launcher.supervise import Watch
from hvdtrain.launcher.verdict import JobOutcome, is_of_stop
from hvdtrain.launcher.view import make_view
from hvdtrain.log import complain, counted, moment, say
from hvdtrain.pulse import STOP_WITHIN, stop_within_s
from hvdtrain.records.directory import complete_summary
from hvdtrain.slurm import is_step
from hvdtrain.topology import Topology

WATCHDOG_S, SCRIPT_WATCHDOG_S = 600.0, 3600.0
FLAGS = (  # named as in horovodrun where it has them
    Flag(
        "-np",
        "start N workers (default: all slots of the hosts; required without hosts)",
        int,
        metavar="N",
    ),
    HOST_FLAGS,
    NODES_FLAGS,
    Flag(
        "--controller",
        "negotiate and reduce over this controller (default: mpi on one host, if available, "
        "else gloo)",
        default="auto",
        choices=CONTROLLERS,
    ),
    Flag(
        "--start-timeout-s",
        "allow workers, and with --nnodes the hosts, S seconds to connect, then workers to begin "
        "their first step (default: 600 s)",
        float,
        default=600.0,
        metavar="S",
        check=SECONDS,
    ),
    Flag(
        "--watchdog-timeout-s",
        "end the job after S seconds without progress, or without output of a script "
        f"(default: {WATCHDOG_S:g} s for train, {SCRIPT_WATCHDOG_S:g} s for other commands)",
        float,
        metavar="S",
        check=SECONDS,
    ),
    Flag(
        "--stop-within-s",
        "after a signal, let workers save and end for S seconds, then kill them "
        f"(default: {STOP_WITHIN}, else {STOP_WITHIN_S:g} s)",
        float,
        metavar="S",
        check=SECONDS,
    ),
    Flag(
        "--log-dir",
        "write one log per rank to DIR (default: logs/ in the run, else ./logs/)",
        Path,
        metavar="DIR",
        check=Check(lambda path: not path.is_file(), "={}: is a file; choose another"),
    ),
    Flag(
        "--restarts",
        "restart up to R times after failures; train resumes from a checkpoint (default: 0)",
        int,
        default=0,
        metavar="R",
        check=at_least(0),
    ),
    Flag(
        "--min-np",
        "restart with N or more workers (default: -np)",
        int,
        metavar="N",
        check=at_least(1),
    ),
    METRICS_FLAGS,
    KUBERNETES_FLAGS,
    Flag("--detach", "go on in the background, without a terminal, once the checks passed", bool),
    Flag("--dry-run", "print horovodrun's command; contact no host", bool),
    Flag("--plain", "print plain lines, no live view, on a terminal too", bool),
    Flag("--verbose", "log details to horovodrun.log; print settings", bool),
    Flag(
        "command",
        "run this on every worker",
        metavar="-- train ... | -- evaluate ... | -- bench NAME | -- python SCRIPT ...",
        more={"nargs": REMAINDER},
    ),
)


@dataclass(frozen=True)
class Launch:
    """The parsed arguments of `hvdtrain launch`."""

    plan: JobPlan
    log_dir: Path
    config: TrainConfig | None  # None for other commands than `train`
    logs_follow: bool = False  # a script's move to the folder of its run
    name: str = "job"  # in the list of jobs
    note: str = ""  # on the name of a new run, if another run has the one that was asked for
    endpoint: Endpoint | None = None  # of metrics
    meeting: Rendezvous | None = None  # of several nodes


def read_launch(arguments: dict[str, Any], unknown: Sequence[str]) -> Launch:
    """Return the parsed arguments. Raises UsageError with every problem."""
    refuse(unknown)  # problems of unknown arguments: the rest of the line was then misparsed too
    command, note = read_command(arguments["command"]), ""
    np, min_np, restarts = (arguments[name] for name in ("np", "min_np", "restarts"))
    problems = [*check_command(command), *wrong_flags(FLAGS, arguments)]
    hosts, meeting = attempt(problems, lambda: find_job_hosts(arguments, command)) or ((), None)
    workers = np or sum(host.slots for host in hosts)
    taken = attempt(problems, lambda: take_slots(hosts, workers)) if hosts else None
    problems += _check(arguments, workers if hosts else 0)
    ssh = attempt(problems, lambda: ssh_options(arguments))
    endpoint, many = read_endpoint(arguments, problems), len({host.address for host in taken or ()})
    controller = attempt(problems, lambda: find_controller(arguments["controller"], many))
    within_s = arguments["stop_within_s"] or attempt(problems, stop_within_s) or STOP_WITHIN_S
    config = attempt(problems, lambda: read_train(command))
    if config is not None:
        command, config, note = numbered(command, config)
        problems += check_train(config, workers, min_np, restarts)
    if problems or ssh is None or controller is None:
        raise UsageError(*problems)
    first, restarted = worker_commands(command, config, workers)
    watchdog_s = arguments["watchdog_timeout_s"] or (WATCHDOG_S if config else SCRIPT_WATCHDOG_S)
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
        limits=Limits(arguments["start_timeout_s"], watchdog_s, within_s),
        restarts=restarts,
        settings=settings_for(controller.name, os.environ, watchdog_s, command[0]),
        verbose=arguments["verbose"],
        typed=shlex.join(["hvdtrain", *sys.argv[1:]]),
    )
    log_dir, follow = log_folder(arguments["log_dir"], config), not (config or arguments["log_dir"])
    return Launch(plan, log_dir, config, follow, job_name(command, config), note, endpoint, meeting)


def _check(arguments: dict[str, Any], workers: int) -> list[str]:
    """Return the problems of values that depend on this machine, or on others.

    `workers`: their number; 0 if there are no hosts for them.
    """
    np, min_np, interface = (arguments[name] for name in ("np", "min_np", "network_interface"))
    interfaces = [name for _, name in socket.if_nameindex()]
    no_interface = f"this machine has no such interface (it has {', '.join(interfaces)})"
    alone = min_np is not None and not arguments["restarts"]
    above = f"is above the {counted(workers, 'worker')} of -np"
    checks = [
        (f"-np {np}", np is not None and np < 1, "must be at least 1"),
        (f"-np {np}", (np or 0) > MOST_SLOTS, f"must be at most {MOST_SLOTS:,}"),
        (f"--min-np={min_np}", 0 < workers < (min_np or 0), above),
        ("--min-np", alone, "applies to restarts; add --restarts R"),
        (f"--network-interface={interface}", interface not in (None, *interfaces), no_interface),
    ]
    return [f"{flag}: {problem}" for flag, is_wrong, problem in checks if is_wrong]


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Launch and return the exit code: that of the first failing worker, or 128 + n on signal n.
    With --detach, 0 once the workers are being started.
    """
    if topology.launched and not is_step(os.environ):
        elsewhere = "not under horovodrun or mpirun; under srun, once on each host"
        raise UsageError(f"launch starts the workers itself: run it once, {elsewhere}")
    if arguments["print_kubernetes"] or arguments["image"]:
        return print_kubernetes(FLAGS, arguments, problems)
    launch = read_launch(arguments, problems)
    if arguments["dry_run"]:
        return _dry_run(launch)
    if launch.meeting and launch.meeting.rank:
        from hvdtrain.launcher.nodes.node import run_node  # only Linux has what it needs

        limit_s = launch.plan.limits.start_timeout_s
        return run_node(launch.meeting, limit_s, lambda line: say(f"hvdtrain launch: {line}"))
    metrics = MetricsServer(launch.endpoint, launch.plan.typed) if launch.endpoint else None
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # workers' output may not fit its encoding
            stream.reconfigure(errors="replace")
    logs = Logs(launch.log_dir, lambda rank, text: None, launch.logs_follow)
    supervise = partial(_supervise, launch, logs, metrics)
    if not arguments["detach"]:
        return supervise(arguments["plain"], lambda: None).exit_code
    return run_in_background(launch.name, launch.plan.typed, logs, partial(supervise, True))


def _supervise(
    launch: Launch,
    logs: Logs,
    metrics: MetricsServer | None,
    plain: bool,
    report: Callable[[], None],
) -> JobOutcome:
    """Run a job to its end; show and return its outcome. `report` is called while workers run."""
    started_s = time.time()
    since_s = started_s if launch.config is None else time_at(launch.config.folder)
    stop = StopRequests(many=launch.meeting is not None)
    view = make_view(launch.plan.workers, sys.stdout, logs.folder, plain, metrics)
    logs.show = view.line

    def show(watch: Watch) -> None:
        report()
        view.update(watch)

    try:
        workers = counted(launch.plan.workers, "worker")
        view.notice(f"{workers}, {_controller(launch.plan)}; logs: {logs.folder}")
        for name, value in launch.plan.settings.items() if launch.plan.verbose else ():
            view.notice(f"set {name}={value}: {SETTING_REASONS[name]}")
        if launch.note:
            view.notice(launch.note)
        with joined(launch.plan, launch.meeting, view.notice, stop.noted) as (plan, tell):
            outcome = LaunchJob(plan, logs, stop, view.notice, show).run()
            tell(outcome)
        _leave_summary(launch, outcome, started_s, since_s, view.notice)
    except Stopped as stopped:  # in the checks, or in a pause before a restart
        view.notice(str(stopped))
        return JobOutcome(stopped.exit_code, str(stopped))
    finally:
        logs.close()
        view.close()
    if outcome.exit_code != EXIT_OK:
        complain(f"hvdtrain launch: {outcome.text}")
        complain(f"hvdtrain launch: exit code {outcome.exit_code}; logs in {logs.folder}")
    return outcome


def _dry_run(launch: Launch) -> int:
    if launch.meeting and launch.meeting.rank:
        say(describe(launch.meeting))
        return EXIT_OK
    plan = replace(launch.plan, hosts=take_slots(launch.plan.hosts, launch.plan.workers))
    say(shlex.join(job_argv(plan, SshSetup(plan.hosts, plan.ssh), "JOB")))
    reasons = [f"{name}={value}: {SETTING_REASONS[name]}" for name, value in plan.settings.items()]
    meeting = describe(launch.meeting) if launch.meeting else None
    command = f"each worker runs: {shlex.join(plan.command)}"
    for line in filter(None, (_controller(plan), *reasons, launch.note, meeting, command)):
        complain(line)
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
    status = "stopped" if is_of_stop(outcome.exit_code) else "failed"
    ending = {"status": status, "error": outcome.text, "exit_code": outcome.exit_code}
    start = {"world_size": launch.plan.workers, "started": moment(started_s)}
    try:
        complete_summary(launch.config.folder, start, {**ending, "ended": moment()}, since_s)
    except (HvdtrainError, OSError, ValueError) as error:
        notify(f"the summary cannot be written: {error}")


COMMAND = Command(
    "run train, evaluate or a script on several workers: checked, watched, restarted",
    """\
Start `train`, `evaluate`, `predict`, `verify`, `bench` or your own script on several workers, on
one or more machines: checks before the start, a log per rank, progress, the cause of a failure, and
restarts.

    hvdtrain launch -np 4 -- train --model lenet
    hvdtrain launch --hostfile hosts --restarts 3 -- train --config run.yaml --resume auto
    hvdtrain launch -np 4 -H alpha:2,beta:2 -- python my_horovod_script.py
    hvdtrain launch -np 2 -- evaluate runs/lenet-digits
    hvdtrain launch -np 2 -- verify
    hvdtrain launch -np 4 --detach -- train --model lenet
    hvdtrain launch --nnodes 2 --node-rank R --rendezvous alpha:29500 -- train ...

Hosts: -H or --hostfile, else those of Slurm or the MPI Operator, else this machine (-np required).
Without SSH: --nnodes, with the same command on each host (R: 0, 1).
""",
    FLAGS,
    run,
)
