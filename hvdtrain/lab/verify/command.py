"""`hvdtrain verify` under horovodrun: the installation's collectives against the ring."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hvdtrain.errors import EXIT_OK, HvdtrainError, VerifyMismatch
from hvdtrain.exchange import agree
from hvdtrain.exchange.connect import connect_workers
from hvdtrain.files import check_json, write_json
from hvdtrain.lab.verify import Case, Result, plan_cases, run_cases
from hvdtrain.lab.verify.collectives import FaultyRunner, HonestRunner, Runner
from hvdtrain.lab.verify.report import COLUMNS, as_json, explain, size_text, table_row
from hvdtrain.log import say
from hvdtrain.ring import Transport
from hvdtrain.run.failure import leave_at_once, tell
from hvdtrain.topology import Topology

if TYPE_CHECKING:
    from hvdtrain.exchange.horovod import HorovodExchange

# Horovod's own default, in bytes. Without it groups would not travel fused; what is submitted alone
# does not in any case. (Training in hvdtrain does without fusion.)
FUSION_THRESHOLD = 64 << 20


@dataclass(frozen=True)
class VerifyOptions:
    """What is to be verified."""

    operations: tuple[str, ...]
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]  # bytes
    fault: str | None
    json: str | None
    seed: int


def run(options: VerifyOptions, topology: Topology) -> int:
    """Collective: verify; failures are told here. Returns the exit code."""
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(FUSION_THRESHOLD))
    torch.set_num_threads(1)
    exchange = connect_workers()
    try:
        with exchange.peer_failures():
            results = _run(options, exchange)
            exchange.close()
        _judge(options, exchange, results)
    except Exception as error:
        leave_at_once(tell(error, topology))
    return EXIT_OK


def _run(options: VerifyOptions, exchange: HorovodExchange) -> list[Result]:
    """Collective: run all cases; rank 0 prints the table and writes the JSON."""
    first = exchange.rank == 0
    agree(exchange, "json", lambda: check_json(options.json) if first else None)
    transport = exchange.ring()
    if first:
        say(_header(options, exchange))
    results = _results(options, exchange, transport)
    transport.close()
    if first and options.json:
        _write(Path(options.json), options, exchange, results)
    return results


def _results(
    options: VerifyOptions, exchange: HorovodExchange, transport: Transport
) -> list[Result]:
    """Collective: every case's outcome. A row of the table is printed as soon as it is known."""
    cases = plan_cases(options.operations, options.dtypes, options.sizes, exchange.size)
    runner: Runner = HonestRunner(exchange)
    if options.fault:
        runner = FaultyRunner(runner, options.fault, transport, options.seed)

    def repeatable(case: Case) -> bool:
        # A tensor alone has nothing to be fused with.
        return exchange.repeatable or case.submission == "alone"

    results = []
    outcomes = run_cases(cases, runner, transport, options.seed, repeatable)
    for _, row in itertools.groupby(outcomes, lambda r: (r.case.operation.name, r.case.dtype)):
        results += (of_row := list(row))
        if exchange.rank == 0:
            say(table_row(of_row))
    return results


def _judge(options: VerifyOptions, exchange: HorovodExchange, results: list[Result]) -> None:
    """Say that all is right, or raise: the same on every rank."""
    wrong = [result for result in results if not result.ok]
    total = f"{len(results)} cases on {exchange.size} workers ({exchange.controller})"
    if options.fault is None:
        if wrong:
            raise VerifyMismatch(explain(wrong[0], len(wrong) - 1))
        if exchange.rank == 0:
            say(f"verify: {total}: all right")
        return
    spoiled = [result for result in results if result.spoiled]
    found = [result for result in wrong if result.spoiled]
    honest = [result for result in wrong if not result.spoiled]
    if honest:  # a fault of the installation's own
        raise VerifyMismatch(explain(honest[0], len(honest) - 1))
    if not spoiled:
        raise HvdtrainError(
            f"verify: {options.fault} was not injected: it changes nothing in any of these {total}"
        )
    told = f"{options.fault} was injected in {len(spoiled)} of {total}, and found in {len(found)}"
    if not found:
        raise HvdtrainError(f"verify: {told}: each time it stayed within the rounding bound")
    raise VerifyMismatch(f"{explain(found[0], 0)}\n  {told}")


def _header(options: VerifyOptions, exchange: HorovodExchange) -> str:
    threshold = int(os.environ["HOROVOD_FUSION_THRESHOLD"])
    fused = f"fused up to {size_text(threshold)}" if threshold else "not fused"
    fault = f"; injecting {options.fault}" if options.fault else ""
    return (
        f"verify: {exchange.size} workers ({exchange.controller}), seed {options.seed}, tensors "
        f"submitted together or as a group are {fused}{fault}\n{COLUMNS}"
    )


def _write(
    path: Path, options: VerifyOptions, exchange: HorovodExchange, results: list[Result]
) -> None:
    content = {
        "workers": exchange.size,
        "controller": exchange.controller,
        "seed": options.seed,
        "fault": options.fault,
        "fusion_threshold_bytes": int(os.environ["HOROVOD_FUSION_THRESHOLD"]),
        "right": sum(result.ok for result in results),
        "wrong": sum(not result.ok for result in results),
        "cases": [as_json(result) for result in results],
    }
    write_json(path, content)
