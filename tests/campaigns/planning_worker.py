"""Samples a second of hvdtrain's own step, model after model, in one job: for the campaign
`planning`, which starts it under horovodrun (or alone) with the file that is to be written.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from hvdtrain.bench.jobs import make_job, our_step
from hvdtrain.bench.rounds import run_rounds
from hvdtrain.cli.train import connect
from hvdtrain.exchange import Exchange
from hvdtrain.memory import keep_freed_memory
from hvdtrain.topology import Topology

ROUNDS = 3
WORK = {"lenet": (128, 20), "mlp": (128, 10), "resnet18-small": (16, 2)}  # batch size, steps


def samples_per_s(model: str, exchange: Exchange) -> list[float]:
    """Collective: of each round, over all ranks, going by the slowest."""
    batch_size, steps = WORK[model]
    job = make_job(model, batch_size, exchange)
    job = replace(job, optimizer=exchange.distribute(job.optimizer, job.model))
    seconds = run_rounds({model: our_step(job, exchange)}, ROUNDS, steps, exchange)[model]
    return [exchange.size * batch_size / one for one in seconds]


def main() -> int:
    """Collective: rank 0 writes the file that `sys.argv` names."""
    torch.set_num_threads(1)
    keep_freed_memory()
    exchange = connect(Topology.from_environment())
    found = {model: samples_per_s(model, exchange) for model in WORK}
    if exchange.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found), "utf-8")
    exchange.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
