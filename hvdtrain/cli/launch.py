"""`hvdtrain launch`: checks, workers, supervision, restarts, verdict."""

from __future__ import annotations

import io
import json
import shlex
import sys
import time
from collections.abc import Callable
from typing import Any

from hvdtrain.cli.launch_options import Launch, read_launch
from hvdtrain.cli.live import make_view
from hvdtrain.errors import EXIT_OK, HvdtrainError, PeerFailure
from hvdtrain.launcher.command import agent_argv, horovodrun_argv
from hvdtrain.launcher.hosts import take_slots
from hvdtrain.launcher.logs import Logs
from hvdtrain.launcher.recovery import Job, Placed, engine_of
from hvdtrain.launcher.ssh import SshSetup
from hvdtrain.launcher.stopping import StopRequests
from hvdtrain.launcher.verdict import STOPPED, Outcome
from hvdtrain.log import complain, say
from hvdtrain.run.directory import RunDirectory


def run(arguments: dict[str, Any], unknown: list[str]) -> int:
    """Returns the exit code: the first failing worker's, or 128 + n after signal n."""
    launch = read_launch(arguments, unknown)
    if arguments["dry_run"]:
        return _dry_run(launch)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a worker's output need not fit its encoding
            stream.reconfigure(errors="replace")
    started_s = time.time()
    stop = StopRequests()
    view = make_view(launch.plan.workers, sys.stdout, launch.log_dir)
    logs = Logs(launch.log_dir, view.line)
    try:
        view.tell(f"{launch.plan.workers} workers, {launch.plan.controller}; logs: {logs.folder}")
        for setting in launch.settings:
            view.tell(f"set {setting.name}={setting.value}: {setting.why}")
        outcome = Job(launch.plan, launch.work, logs, stop, view.tell, view.update).run()
        if outcome.exit_code != EXIT_OK:
            _leave_summary(launch, outcome, started_s, view.tell)
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
    launch: Launch, outcome: Outcome, started_s: float, tell: Callable[[str], None]
) -> None:
    """Of a run whose rank 0 was killed before it could write its own, or knows no cause."""
    if launch.config is None:
        return
    folder = launch.config.folder
    path = folder / "summary.json"
    config = folder / "config.yaml"
    if not config.exists() or config.stat().st_mtime < started_s:  # no rank 0 came so far here
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
        tell(f"no summary could be written: {error}")
