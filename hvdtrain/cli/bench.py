"""`hvdtrain bench NAME`: each bench is in a module of its own."""

from __future__ import annotations

import importlib
from typing import Any

from hvdtrain.cli.bench_options import WITHIN_A_JOB
from hvdtrain.topology import Topology


def run(arguments: dict[str, Any], topology: Topology) -> int:
    """Measure, and tell the medians and ratios. Returns the exit code."""
    if arguments["bench"] in WITHIN_A_JOB:
        from hvdtrain.cli import bench_within

        return bench_within.run(arguments, topology)
    module = importlib.import_module(f"hvdtrain.cli.bench_{arguments['bench']}")
    return int(module.run(arguments))
