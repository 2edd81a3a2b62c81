"""The main program of one process of a compared system.

Under horovodrun it is `python -m hvdtrain.lab.systems.process SPEC`, and its number is its rank.
All others are forked from a server that has imported this module, as importing torch takes seconds.
It writes `process-NUMBER.json`, with its measurements or its error, and
`process-NUMBER.safetensors`, with the parameters that it holds.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hvdtrain.errors import EXIT_FAILED, EXIT_OK, HvdtrainError
from hvdtrain.lab.systems import find_strategy
from hvdtrain.lab.systems.contract import Place, Spec, Strategy, Traffic
from hvdtrain.lab.systems.work import Work
from hvdtrain.topology import Topology

WARM_UP_STEPS = 5  # not measured, if there are at least twice as many steps
WATCH_S = 1.0


def main() -> int:
    """Collective: run as a rank under horovodrun; return the exit code."""
    return run(Path(sys.argv[1]), Topology.from_environment().rank)


def run_forked(spec_path: str, number: int, log_path: str) -> None:
    """Collective: run in a forked process, with its own session and log file; exit at the end."""
    os.setsid()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.close(log)
    sys.exit(run(Path(spec_path), number))


def run(spec_path: Path, number: int) -> int:
    """Collective: run this process of its system and write its results; return the exit code."""
    spec = Spec.from_text(spec_path.read_text("utf-8"))
    signal.alarm(math.ceil(spec.time_limit_s) + 1)
    threading.Thread(target=_end_with, args=(spec.controller_pid,), daemon=True).start()
    target = Path(spec.folder) / f"process-{number}"
    try:
        content = take_part(spec, number, target)
    except Exception as error:
        traceback.print_exc()
        kind = "" if isinstance(error, HvdtrainError) else f"{type(error).__name__}: "
        _write(target, {"error": f"{kind}{error}", "failed_at": time.time()})
        sys.stderr.flush()
        os._exit(EXIT_FAILED)  # other processes may be blocked, so collective cleanup could hang
    _write(target, content)
    return EXIT_OK


def take_part(spec: Spec, number: int, target: Path) -> dict[str, Any]:
    """Collective: run all steps, save the parameters, return the measurements."""
    torch.set_num_threads(1)
    strategy_class = find_strategy(spec.system)
    work = Work(spec.work)
    place = Place(number, len(strategy_class.processes(spec)), spec)
    strategy = strategy_class(work, place)
    measured = run_steps(strategy)
    parameters = strategy.parameters()
    if parameters:
        save_file({n: v.contiguous() for n, v in parameters.items()}, f"{target}.safetensors")
    content = measured | {
        "name": strategy.name,
        "process_id": os.getpid(),
        "peak_memory_bytes": peak_memory(),
        "notes": strategy.notes(),
        "figures": strategy.figures(),
    }
    strategy.close()
    return content


def run_steps(strategy: Strategy) -> dict[str, Any]:
    """Collective: run all steps; return times, phases and traffic of those after the warm-up."""
    work = strategy.work
    steps = work.spec.steps
    warm_up = WARM_UP_STEPS if steps >= 2 * WARM_UP_STEPS else 0
    samples, begun_s, before = 0, time.monotonic(), strategy.traffic()
    for number, batch in enumerate(work.batches()):
        if number == warm_up:
            work.clock.read()
            samples, begun_s, before = 0, time.monotonic(), strategy.traffic()
        work.clock.restart(number + 1)
        strategy.step(batch)
        samples += len(batch.indices)
    ended_s, after = time.monotonic(), strategy.traffic()
    measured_steps = steps - warm_up
    phases = work.clock.read()
    return {
        "begun_s": begun_s,  # monotonic clock of the machine, shared by all processes
        "ended_s": ended_s,
        "samples": samples,
        "steps": measured_steps,
        "phases_s": {name: seconds / measured_steps for name, seconds in phases.items()},
        "traffic": _per_step(before, after, measured_steps),
    }


def _per_step(
    before: Mapping[str, Traffic] | None, after: Mapping[str, Traffic] | None, steps: int
) -> dict[str, dict[str, float]] | None:
    if before is None or after is None:
        return None
    return {name: total.since(before[name]).over(steps)._asdict() for name, total in after.items()}


def peak_memory() -> int:
    """Return the peak memory of this process in bytes (VmHWM, which an exec resets)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _end_with(controller_pid: int) -> None:
    """Exit once the controller is gone: a killed command cannot end its processes."""
    while True:
        time.sleep(WATCH_S)
        try:
            os.kill(controller_pid, 0)
        except ProcessLookupError:
            os._exit(EXIT_FAILED)


def _write(target: Path, content: dict[str, Any]) -> None:
    """Write the JSON file atomically: it may be read while other processes still run."""
    beside = Path(f"{target}.tmp")
    beside.write_text(json.dumps(content), "utf-8")
    beside.replace(f"{target}.json")


if __name__ == "__main__":
    sys.exit(main())
