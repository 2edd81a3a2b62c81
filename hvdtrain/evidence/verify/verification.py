"""`hvdtrain verify`: its run, its table, its JSON and its explanations."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hvdtrain.errors import EXIT_OK, HvdtrainError, VerifyMismatch, name_ranks, refuse
from hvdtrain.evidence.verify.cases import Case
from hvdtrain.evidence.verify.collectives import FaultyRunner, Runner
from hvdtrain.evidence.verify.running import REPEATS, Result, run_cases
from hvdtrain.exchange.agreement import run_on_all
from hvdtrain.exchange.connect import connect_workers
from hvdtrain.exchange.gpus import find_own_gpu
from hvdtrain.files import json_problems, write_json
from hvdtrain.log import counted, say
from hvdtrain.ring import Transport
from hvdtrain.run.process import leave_at_once, report_failure
from hvdtrain.tensors import CPU
from hvdtrain.topology import Topology

if TYPE_CHECKING:
    from hvdtrain.exchange.horovod import HorovodExchange

# Horovod's own default, in bytes, with which groups are fused; a tensor submitted alone never is.
# (Training in hvdtrain does not use fusion.)
FUSION_THRESHOLD = 64 << 20
COLUMNS = (
    f"{'operation':<22}{'dtype':<9}{'sizes':<16}{'cases':>5}  {'error/bound':>11}"
    f"  {'bit-equal':<10}{'repeatable':<11}{'busbw':>11}  verdict"
)
UNITS = ((1 << 20, "MiB"), (1 << 10, "KiB"))


def verify(cases: Sequence[Case], arguments: Mapping[str, Any], topology: Topology) -> int:
    """Collective: verify and return the exit code; failures are reported here.

    `arguments`: those named inject, json (a file for the outcome of every case) and seed are read.
    """
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(FUSION_THRESHOLD))
    torch.set_num_threads(1)
    exchange = connect_workers()
    try:
        with exchange.peer_failures():
            results = _run(cases, arguments, exchange)
            exchange.close()
        _judge(arguments["inject"], exchange, results)
    except Exception as error:
        leave_at_once(report_failure(error, topology))
    return EXIT_OK


def _run(
    cases: Sequence[Case], arguments: Mapping[str, Any], exchange: HorovodExchange
) -> list[Result]:
    """Collective: run all cases; rank 0 prints the table and writes the JSON."""
    first = exchange.rank == 0
    run_on_all(
        exchange, "json", lambda: refuse(json_problems(arguments["json"])) if first else None
    )
    transport = exchange.ring()
    threshold = int(os.environ["HOROVOD_FUSION_THRESHOLD"])
    if first:
        say(_header(arguments, exchange, threshold))
    results = _results(cases, arguments, exchange, transport, CPU)
    gpu = find_own_gpu(exchange)
    if gpu.device is not None:
        if first:
            say(f"verify: now tensors on GPUs ({_way(exchange)})")
        results += _results(cases, arguments, exchange, transport, gpu.device)
    elif gpu.why and first:
        say(f"verify: tensors on GPUs are not verified: {gpu.why}")
    transport.close()
    if first and arguments["json"]:
        write_json(
            arguments["json"],
            {
                "workers": exchange.size,
                "controller": exchange.controller,
                "gpu": str(gpu.device.type) if gpu.device else None,
                "gpu_not_verified": gpu.why or None,
                "nccl": exchange.has_nccl,
                "seed": arguments["seed"],
                "fault": arguments["inject"],
                "fusion_threshold_bytes": threshold,
                "right": sum(result.ok for result in results),
                "wrong": sum(not result.ok for result in results),
                "cases": [as_json(result) for result in results],
            },
        )
    return results


def _header(arguments: Mapping[str, Any], exchange: HorovodExchange, threshold: int) -> str:
    """Return what is printed before the rows of the table."""
    fused = f"fused up to {size_text(threshold)}" if threshold else "not fused"
    fault = f"; injecting {arguments['inject']}" if arguments["inject"] else ""
    return (
        f"verify: {exchange.size} workers ({exchange.controller}), seed {arguments['seed']}, "
        f"tensors submitted together or as a group are {fused}{fault}\n{COLUMNS}"
    )


def _way(exchange: HorovodExchange) -> str:
    """Return how Horovod exchanges tensors on GPUs, for messages."""
    return "by NCCL" if exchange.has_nccl else f"copied to the host, by {exchange.controller}"


def _results(
    cases: Sequence[Case],
    arguments: Mapping[str, Any],
    exchange: HorovodExchange,
    transport: Transport,
    device: torch.device,
) -> list[Result]:
    """Collective: return all outcomes; rank 0 prints each row of the table once it is complete."""
    runner, seed = Runner(exchange, device), arguments["seed"]
    if arguments["inject"]:
        runner = FaultyRunner(exchange, arguments["inject"], transport, seed, device)
    outcomes = run_cases(
        cases,
        runner,
        transport,
        seed,
        # A tensor that is submitted alone is never fused.
        lambda case: exchange.repeatable or case.submission == "alone",
    )
    results = []
    for _, row in itertools.groupby(outcomes, lambda r: (r.case.operation.name, r.case.dtype)):
        results += (of_row := list(row))
        if exchange.rank == 0:
            say(table_row(of_row))
    return results


def _judge(fault: str | None, exchange: HorovodExchange, results: list[Result]) -> None:
    """Report success, or raise; the outcome is the same on every rank."""
    total = f"{counted(len(results), 'case')} on {exchange.size} workers ({exchange.controller})"
    if on_gpus := sum(result.device != CPU.type for result in results):
        total += f", {on_gpus:,} of them on GPUs ({_way(exchange)})"
    wrong = [result for result in results if not result.ok and not result.spoiled]
    if wrong:  # a fault of the installation itself
        raise VerifyMismatch(explain(wrong[0], len(wrong) - 1))
    if fault is None:
        if exchange.rank == 0:
            say(f"verify: {total}: all right")
        return
    spoiled = [result for result in results if result.spoiled]
    detected = [result for result in spoiled if not result.ok]
    if not spoiled:
        raise HvdtrainError(
            f"verify: {fault} was not injected: it changes nothing in any of these {total}"
        )
    summary = f"{fault} was injected in {len(spoiled)} of {total}, and found in {len(detected)}"
    if not detected:
        raise HvdtrainError(f"verify: {summary}: each time it stayed within the rounding bound")
    raise VerifyMismatch(f"{explain(detected[0], 0)}\n  {summary}")


def table_row(row: Sequence[Result]) -> str:
    """Return the table's line for all cases of one operation and dtype."""
    first = row[0].case
    alone = [result for result in row if result.case.submission == "alone"]
    sizes = sorted(result.case.bytes for result in alone)
    largest = max(alone, key=lambda result: result.case.bytes)
    bit_equal = [result.bit_equal for result in row]
    repeatable = sum(result.repeatable for result in row)
    right = sum(result.ok for result in row)
    return (
        f"{first.operation.name:<22}{first.dtype:<9}"
        f"{size_text(sizes[0]) + ' - ' + size_text(sizes[-1]):<16}{len(row):>5}  "
        f"{max(result.worst for result in row):>11.3g}  "
        f"{'-' if None in bit_equal else 'yes' if all(bit_equal) else 'NO':<10}"
        f"{'yes' if repeatable == len(row) else f'{repeatable} of {len(row)}':<11}"
        f"{largest.bus_bandwidth / 1e6:>6,.0f} MB/s  "
        f"{'right' if right == len(row) else f'WRONG in {len(row) - right}'}"
    )


def size_text(count: int) -> str:
    """Return a size as text: '0 B', '4 KiB', '64 MiB'."""
    for unit, name in UNITS:
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} B"


def explain(result: Result, others: int) -> str:
    """Return a message on a mismatch: the case, the place, the error and the kind of fault.

    `others`: number of further cases that are wrong.
    """
    on_gpu = "" if result.device == CPU.type else f", on {result.device}"
    rest = f"\n  wrong cases besides this one: {others}; see the table, or --json" if others else ""
    lines = [f"verify: wrong result: {result.case}{on_gpu}", *_places(result)]
    return "\n".join([*lines, f"  {_kind_of_fault(result)}{rest}"])


def _places(result: Result) -> list[str]:
    """Return the worst element of each wrong rank; equal lines of several ranks are merged."""
    if result.wrong:
        by_text: dict[str, list[int]] = {}
        for rank in result.wrong:
            by_text.setdefault(str(result.by_rank[rank].finding), []).append(rank)
        return [f"  {name_ranks(ranks)}: {text}" for text, ranks in by_text.items()]
    if result.bit_equal is False:
        return [
            f"  rank {rank}: tensor {element.tensor}, index {element.index}: value {element.value} "
            f"where rank 0 holds {element.reference}; both are within the bound"
            for rank, report in enumerate(result.by_rank)
            if (element := report.difference) is not None
        ]
    changing = [rank for rank, report in enumerate(result.by_rank) if len(set(report.digests)) > 1]
    return [f"  {name_ranks(changing)}: {REPEATS} runs on the same values differ in their bits"]


def _kind_of_fault(result: Result) -> str:
    size = len(result.by_rank)
    if not result.wrong and result.bit_equal is not False:
        return "the order of summation is not the same in every run, though it should be"
    if result.bit_equal:
        reduces = result.case.operation.reduction != "none"
        suspect = "the reduction" if reduces else "what was sent"
        return f"all {size} ranks agree on the wrong value: suspect {suspect}"
    if result.bit_equal is None:
        all_wrong = len(result.wrong) == size
        whose = "every rank's share" if all_wrong else f"the share of {name_ranks(result.wrong)}"
        return f"{whose} is wrong (each holds its own): suspect the reduction or its delivery"
    odd = differing_ranks(result)
    if len(odd) == size:
        return "the ranks hold different values: suspect delivery, the network or memory"
    verb = "differs" if len(odd) == 1 else "differ"
    return f"{name_ranks(odd)} {verb} from the others: suspect delivery, the network or memory"


def differing_ranks(result: Result) -> list[int]:
    """Return the ranks that account for a difference in bits.

    The wrong ones, if others are right; else those outside the largest group that agrees; else,
    where no group is the largest, all.
    """
    if 0 < len(result.wrong) < len(result.by_rank):
        return result.wrong
    groups = Counter(tuple(report.digests) for report in result.by_rank).most_common(2)
    is_tie = len(groups) == 2 and groups[0][1] == groups[1][1]
    return [
        rank
        for rank, report in enumerate(result.by_rank)
        if is_tie or tuple(report.digests) != groups[0][0]
    ]


def as_json(result: Result) -> dict[str, Any]:
    """Return a case for the JSON file; infinite ratios are the text "inf"."""
    case = result.case
    return {
        "device": result.device,
        "operation": case.operation.name,
        "dtype": case.dtype,
        "bytes": case.bytes,
        "lengths": list(case.lengths),
        "submission": case.submission,
        "values": case.values,
        "ok": result.ok,
        "worst_error_over_bound": "inf" if math.isinf(result.worst) else result.worst,
        "bit_equal": result.bit_equal,
        "repeatable": result.repeatable,
        "repeatable_claimed": result.repeatable_claimed,
        "seconds": result.seconds,
        "bus_bandwidth_bytes_per_s": result.bus_bandwidth,
        "fault_injected": result.spoiled,
        "wrong_ranks": result.wrong,
        "explanation": None if result.ok else explain(result, 0),
    }
