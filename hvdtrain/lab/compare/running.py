"""The processes of one system, from their start to their end."""

from __future__ import annotations

import sys
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path

from hvdtrain.lab.children import Child, Commanded, Forked, Result, read_json, watch
from hvdtrain.lab.systems.contract import Spec, Strategy
from hvdtrain.lab.systems.process import run_forked
from hvdtrain.launcher.command import Engine, horovodrun_argv

START_TIMEOUT_S = 60


def run_system(
    spec: Spec, strategy: type[Strategy], controller: str, context: ForkServerContext
) -> list[Result]:
    """What each process of the system has measured. Raises ChildFailure."""
    folder = Path(spec.folder)
    deadline = time.monotonic() + spec.time_limit_s
    children: list[Child] = []
    try:
        start_system(spec, strategy, controller, context, children)
        watch(children, folder, deadline, spec.time_limit_s)
    finally:
        for child in children:
            child.end()
    numbers = range(len(strategy.processes(spec)))
    return [read_json(folder / f"process-{number}.json") for number in numbers]


def start_system(
    spec: Spec,
    strategy: type[Strategy],
    controller: str,
    context: ForkServerContext,
    children: list[Child],
) -> None:
    """Make the system's folder, and add each process to `children` as it is started: they are to
    be ended also where a later one could not be. Raises ChildFailure.
    """
    folder = Path(spec.folder)
    folder.mkdir(mode=0o700)
    path = folder / "spec.json"
    path.write_text(spec.as_text(), "utf-8")
    if strategy.under_horovodrun:
        command = [sys.executable, "-m", "hvdtrain.lab.systems.process", str(path)]
        argv = horovodrun_argv(_engine(spec, controller), command)
        children.append(Commanded(argv, folder / "process-0.log"))
        return
    for number in range(len(strategy.processes(spec))):
        children.append(_fork(context, path, number))


def _engine(spec: Spec, controller: str) -> Engine:
    hosts = (("localhost", spec.workers),)
    return Engine(spec.workers, controller, hosts, None, START_TIMEOUT_S)


def _fork(context: ForkServerContext, spec_path: Path, number: int) -> Forked:
    log = spec_path.parent / f"process-{number}.log"
    process = context.Process(target=run_forked, args=(str(spec_path), number, str(log)))
    process.start()
    return Forked(process)
