"""`hvdtrain bench step|checkpoint`, alone or under horovodrun: a table, and JSON."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hvdtrain.bench.checkpoint import bench_checkpoint
from hvdtrain.bench.step import bench_step
from hvdtrain.cli.train import connect
from hvdtrain.log import say
from hvdtrain.topology import Topology

BENCHES = {"step": bench_step, "checkpoint": bench_checkpoint}


def run(arguments: dict[str, Any], topology: Topology) -> int:
    """Collective: measure, and tell the medians and ratios. Returns the exit code."""
    torch.set_num_threads(1)
    exchange = connect(topology)
    seconds, ratios = BENCHES[arguments["bench"]](
        arguments["model"],
        arguments["batch_size"],
        arguments["rounds"],
        arguments["steps"],
        exchange,
    )
    if exchange.rank == 0:
        say(
            f"{arguments['bench']}: {arguments['model']}, {arguments['batch_size']} samples a "
            f"worker, {exchange.size} workers ({exchange.controller}), one thread each; "
            f"{arguments['rounds']} rounds of {arguments['steps']} steps in turns"
        )
        for name, times in seconds.items():
            say(f"  {name:24} {1000 * statistics.median(times):9.3f} ms a step")
        for name, result in ratios.items():
            say(
                f"  ratio, {name:24} {result.median:6.3f}  "
                f"(rounds: {result.lowest:.3f} to {result.highest:.3f})"
            )
        if arguments["json"]:
            results = {name: asdict(result) for name, result in ratios.items()}
            content = {"seconds_per_step": seconds, "ratios": results}
            Path(arguments["json"]).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    exchange.close()
    return 0
