"""Benches within one job, alone or under horovodrun: a table, and JSON."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

import torch

from hvdtrain.cli.json_file import write_json
from hvdtrain.cli.train import connect
from hvdtrain.exchange import Exchange
from hvdtrain.lab.bench.audit import bench_audit
from hvdtrain.lab.bench.checkpoint import bench_checkpoint
from hvdtrain.lab.bench.ring import bench_ring
from hvdtrain.lab.bench.rounds import Measured, Options
from hvdtrain.lab.bench.step import bench_step
from hvdtrain.log import say
from hvdtrain.run.memory import keep_freed_memory
from hvdtrain.topology import Topology

BENCHES = {
    "step": bench_step,
    "checkpoint": bench_checkpoint,
    "ring": bench_ring,
    "audit": bench_audit,
}


def run(arguments: dict[str, Any], topology: Topology) -> int:
    """Collective: measure, and tell the medians and ratios. Returns the exit code."""
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
    return 0


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
