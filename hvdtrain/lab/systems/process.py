"""The processes of a compared system: how they are started, and the main program of each.

Under horovodrun that is `python -m hvdtrain.lab.systems.process SPEC`, and its number is its rank.
All others are forked from a server that has imported this module, as importing torch takes seconds.
Each writes `process-NUMBER.json`, with its measurements or its error, and
`process-NUMBER.safetensors`, with the parameters that it holds.
"""

import json
import multiprocessing
import os
import sys
import time
import traceback
from dataclasses import asdict
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hvdtrain.errors import EXIT_FAILED, EXIT_OK, HvdtrainError
from hvdtrain.evidence.children import (
    LATE,
    ONE_THREAD,
    Child,
    CommandProcess,
    Result,
    read_json,
    watch,
)
from hvdtrain.files import replace_file
from hvdtrain.interpreter import module_argv, peak_memory, started_elsewhere
from hvdtrain.lab.systems import find_strategy
from hvdtrain.lab.systems.contract import Member, Spec, Strategy
from hvdtrain.lab.systems.work import Work, WorkSpec
from hvdtrain.launcher.horovodrun import horovodrun_argv, in_own_session
from hvdtrain.topology import Topology

FORKS = multiprocessing.get_context("forkserver")
WARM_UP_STEPS = 5  # not measured, if there are at least twice as many steps
PRELOADED = ["hvdtrain.lab.systems.process", "torch._dynamo"]  # optimizers import the latter


class ForkedProcess:
    """A process forked by the fork server."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    def exit_code(self) -> int | None:
        return self._process.exitcode

    def processes(self) -> list[int]:
        return [self._process.pid] if self._process.pid else []

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()


def start_fork_server() -> None:
    """Start the fork server, which imports in the background; its forks compute with one thread."""
    os.environ.update(ONE_THREAD)
    FORKS.set_forkserver_preload(PRELOADED)
    with started_elsewhere():
        forkserver.ensure_running()


def run_system(spec: Spec, strategy: type[Strategy], controller: str) -> list[Result]:
    """Run the system and return the measurements of each process. Raises ChildFailure."""
    folder = Path(spec.folder)
    deadline = time.monotonic() + spec.time_limit_s
    children: list[Child] = []
    try:
        start_system(spec, strategy, controller, children)
        watch(children, folder, deadline, LATE.format(spec.time_limit_s))
    finally:
        for child in children:
            child.end()
    numbers = range(len(strategy.processes(spec)))
    return [read_json(folder / f"process-{number}.json") for number in numbers]


def start_system(
    spec: Spec, strategy: type[Strategy], controller: str, children: list[Child]
) -> None:
    """Make the system's folder and start its processes. Raises ChildFailure.

    Each process is added to `children` as it starts, so that the caller can end those that run
    when a later one fails to start.
    """
    folder = Path(spec.folder)
    folder.mkdir(mode=0o700)
    argv = write_spec(spec)
    if strategy.under_horovodrun:
        command = horovodrun_argv(in_own_session(argv), spec.workers, controller)
        children.append(CommandProcess(command, folder / "process-0.log"))
        return
    for number in range(len(strategy.processes(spec))):
        log = folder / f"process-{number}.log"
        process = FORKS.Process(target=run_forked, args=(argv[-1], number, str(log)))
        process.start()
        children.append(ForkedProcess(process))


def write_spec(spec: Spec) -> list[str]:
    """Write the specification to its folder; return the command of each of its processes."""
    path = Path(spec.folder) / "spec.json"
    path.write_text(json.dumps(asdict(spec)), "utf-8")
    return [*module_argv("hvdtrain.lab.systems.process"), str(path)]


def run_forked(spec_path: str, number: int, log_path: str) -> None:
    """Collective: run in a forked process, with its own session and log file; exit at the end."""
    os.setsid()
    with Path(log_path).open("wb") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    sys.exit(run(Path(spec_path), number))


def run(spec_path: Path, number: int) -> int:
    """Collective: run this process of its system and write its results; return the exit code."""
    values = read_json(spec_path)
    spec = Spec(**values | {"work": WorkSpec(**values["work"])})
    target = Path(spec.folder) / f"process-{number}"
    try:
        content, code = take_part(spec, number, target), EXIT_OK
    except Exception as error:
        traceback.print_exc()
        kind = "" if isinstance(error, HvdtrainError) else f"{type(error).__name__}: "
        content, code = {"error": f"{kind}{error}", "failed_at": time.time()}, EXIT_FAILED
    # Atomically: it may be read while other processes still run.
    replace_file(Path(f"{target}.json"), [json.dumps(content)])
    if code:
        sys.stderr.flush()
        os._exit(code)  # other processes may be blocked, so collective cleanup could hang
    return code


def take_part(spec: Spec, number: int, target: Path) -> dict[str, Any]:
    """Collective: run all steps, save the parameters, return the measurements."""
    torch.set_num_threads(1)
    strategy_class = find_strategy(spec.system)
    member = Member(number, len(strategy_class.processes(spec)), spec)
    strategy = strategy_class(Work(spec.work), member)
    measured = run_steps(strategy)
    if parameters := strategy.parameters():
        save_file({n: v.contiguous() for n, v in parameters.items()}, f"{target}.safetensors")
    measured |= {
        "name": strategy.name,
        "peak_memory_bytes": peak_memory(),
        "notes": strategy.notes(),
        "figures": strategy.figures(),
    }
    strategy.close()
    return measured


def run_steps(strategy: Strategy) -> dict[str, Any]:
    """Collective: run all steps; return times, phases and traffic of those after the warm-up."""
    work = strategy.work
    warm_up = WARM_UP_STEPS if work.spec.steps >= 2 * WARM_UP_STEPS else 0
    steps = work.spec.steps - warm_up
    samples, begun_s, before = 0, time.monotonic(), strategy.traffic()
    for number, batch in enumerate(work.batches()):
        if number == warm_up:
            work.clock.read()
            samples, begun_s, before = 0, time.monotonic(), strategy.traffic()
        work.clock.restart(number + 1)
        strategy.step(batch)
        samples += len(batch.indices)
    ended_s, after = time.monotonic(), strategy.traffic()
    traffic = None
    if before and after:
        traffic = {n: asdict(total.since(before[n], steps)) for n, total in after.items()}
    return {
        "begun_s": begun_s,  # monotonic clock of the machine, shared by all processes
        "ended_s": ended_s,
        "samples": samples,
        "phases_s": {name: seconds / steps for name, seconds in work.clock.read().items()},
        "traffic": traffic,
    }


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), Topology.from_environment().rank))
