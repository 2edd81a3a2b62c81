"""`hvdtrain bench NAME`: measurement, printed table, and files of JSON and plots."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hvdtrain.errors import EXIT_FAILED, EXIT_OK, TrainingError
from hvdtrain.exchange import Exchange
from hvdtrain.exchange.connect import connect
from hvdtrain.files import write_json
from hvdtrain.lab.bench import classic, scaling, start
from hvdtrain.lab.bench.plots import draw_classic, draw_plots, draw_start
from hvdtrain.lab.bench.ring import bench_ring
from hvdtrain.lab.bench.scaling_results import as_json, points_of, table
from hvdtrain.lab.bench.turns import Measured, Options
from hvdtrain.lab.bench.within_job import bench_audit, bench_checkpoint, bench_step
from hvdtrain.lab.charts import Plot, write_plots
from hvdtrain.lab.children import ChildFailure, fork_server, guarded
from hvdtrain.launcher.stopping import StopRequests
from hvdtrain.log import say
from hvdtrain.run.memory import keep_freed_memory
from hvdtrain.topology import Topology

SCRATCH = "hvdtrain-bench-"
BENCHES = {
    "step": bench_step,
    "checkpoint": bench_checkpoint,
    "ring": bench_ring,
    "audit": bench_audit,
}


def run_within_a_job(arguments: dict[str, Any], topology: Topology) -> int:
    """Collective: measure, print medians and ratios, and return the exit code."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as train does
    options = Options(
        rounds=arguments["rounds"],
        steps=arguments["steps"],
        model=arguments["model"],
        batch_size=arguments["batch_size"],
        megabytes=arguments["megabytes"],
    )
    exchange = connect(topology)
    measured = BENCHES[arguments["bench"]](options, exchange)
    if exchange.rank == 0:
        say(_table(arguments["bench"], options, measured, exchange))
        content: dict[str, Any] = {
            "seconds_per_step": measured.seconds,
            "ratios": {name: asdict(result) for name, result in measured.ratios.items()},
        }
        if measured.megabytes is not None:
            content["megabytes"] = measured.megabytes
        write_json(arguments["json"], content)
    exchange.close()
    return EXIT_OK


def _table(bench: str, options: Options, measured: Measured, exchange: Exchange) -> str:
    width = max(map(len, [*measured.seconds, *measured.ratios]))
    lines = [
        f"{bench}: {measured.what}, {exchange.size} workers ({exchange.controller}), one thread "
        f"each; {options.rounds} rounds of {options.steps} steps in turns"
    ]
    for name, times in measured.seconds.items():
        seconds = statistics.median(times)
        speed = f"{measured.megabytes / seconds:9.0f} MB/s" if measured.megabytes else ""
        lines.append(f"  {name:{width}} {1000 * seconds:9.3f} ms a step {speed}".rstrip())
    for name, result in measured.ratios.items():
        lines.append(
            f"  ratio, {name:{width}} {result.median:6.3f}  (middle half: "
            f"{result.lower_quartile:.3f} to {result.upper_quartile:.3f}, "
            f"all: {result.lowest:.3f} to {result.highest:.3f})"
        )
    return "\n".join(lines)


def run_scaling(arguments: dict[str, Any]) -> int:
    """Measure all cases, in turns; return the exit code, 1 where some have failed."""
    StopRequests()  # a signal raises Stopped, on which running processes are ended
    plan = scaling.ScalingPlan(**_fields(scaling.ScalingPlan, arguments))
    scaling.examine(plan)
    with guarded(), tempfile.TemporaryDirectory(prefix=SCRATCH) as folder:
        starter = scaling.Starter(plan.controller, plan.time_limit_s, fork_server())
        rates, problems = scaling.measure(plan, starter, Path(folder), say)
    points = points_of(plan, rates)
    say(table(plan, points))
    found = as_json(plan, rates, points, problems)
    _write(arguments, found, draw_plots(plan, rates, points))
    return EXIT_FAILED if problems else EXIT_OK


def run_start(arguments: dict[str, Any]) -> int:
    """Measure all starts, one after the other; return the exit code. Raises TrainingError."""
    StopRequests()
    plan = start.StartPlan(**_fields(start.StartPlan, arguments))
    with guarded(), tempfile.TemporaryDirectory(prefix=SCRATCH) as folder:
        try:
            starts = start.measure(plan, start.StartRunner(plan), Path(folder), say)
        except ChildFailure as failure:
            raise TrainingError(f"bench start: {failure}") from failure
    say(start.table(plan, starts))
    seconds = {name: [asdict(one) for one in starts[name]] for name in starts}
    ratios = {name: asdict(ratio) for name, ratio in start.ratios_of(starts).items()}
    found = {**asdict(plan), "starts": seconds, "ratios": ratios}
    _write(arguments, found, [draw_start(starts)])
    return EXIT_OK


def run_classic(arguments: dict[str, Any]) -> int:
    """Run all settings, one after the other; return the exit code. Raises TrainingError."""
    StopRequests()
    data = arguments["data"] or classic.data_that_is_there(Path(arguments["data_dir"]))
    plan = classic.ClassicPlan(**_fields(classic.ClassicPlan, arguments | {"data": data}))
    with guarded(), tempfile.TemporaryDirectory(prefix=SCRATCH) as folder:
        try:
            results = classic.measure(plan, classic.train, Path(folder), say)
        except ChildFailure as failure:
            raise TrainingError(f"bench classic: {failure}") from failure
    say(classic.table(plan, results))
    _write(arguments, classic.as_json(plan, results), [draw_classic(plan, results)])
    return EXIT_OK


RUNS: dict[str, Callable[[dict[str, Any]], int]] = {
    "scaling": run_scaling,
    "start": run_start,
    "classic": run_classic,
}


def _fields(kind: type[Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that are fields of the dataclass `kind`."""
    return {name: arguments[name] for name in kind.__dataclass_fields__}


def _write(arguments: dict[str, Any], found: dict[str, Any], plots: Iterable[Plot]) -> None:
    write_json(arguments["json"], found)
    for path in write_plots(plots, arguments["output"]):
        say(f"written to {path}")
