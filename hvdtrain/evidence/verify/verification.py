"""`hvdtrain verify`: its run, its table, its JSON and its explanations."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hvdtrain.errors import EXIT_OK, HvdtrainError, VerifyMismatch, name_ranks
from hvdtrain.evidence.verify import VerifyOptions
from hvdtrain.evidence.verify.cases import Case, plan_cases
from hvdtrain.evidence.verify.collectives import FaultyRunner, Runner
from hvdtrain.evidence.verify.running import REPEATS, Result, run_cases
from hvdtrain.exchange import run_on_all
from hvdtrain.exchange.connect import connect_workers
from hvdtrain.exchange.gpus import CPU, find_own_gpu
from hvdtrain.files import check_json, write_json
from hvdtrain.log import counted, say
from hvdtrain.ring import Transport
from hvdtrain.run.process import leave_at_once, report_failure
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


def verify(options: VerifyOptions, topology: Topology) -> int:
    """Collective: verify and return the exit code; failures are reported here."""
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(FUSION_THRESHOLD))
    torch.set_num_threads(1)
    exchange = connect_workers()
    try:
        with exchange.peer_failures():
            results = _run(options, exchange)
            exchange.close()
        _judge(options, exchange, results)
    except Exception as error:
        leave_at_once(report_failure(error, topology))
    return EXIT_OK


def _run(options: VerifyOptions, exchange: HorovodExchange) -> list[Result]:
    """Collective: run all cases; rank 0 prints the table and writes the JSON."""
    first = exchange.rank == 0
    run_on_all(exchange, "json", lambda: check_json(options.json) if first else None)
    transport = exchange.ring()
    threshold = int(os.environ["HOROVOD_FUSION_THRESHOLD"])
    if first:
        fused = f"fused up to {size_text(threshold)}" if threshold else "not fused"
        fault = f"; injecting {options.fault}" if options.fault else ""
        say(
            f"verify: {exchange.size} workers ({exchange.controller}), seed {options.seed}, "
            f"tensors submitted together or as a group are {fused}{fault}\n{COLUMNS}"
        )
    results = _results(options, exchange, transport, CPU)
    gpu = find_own_gpu(exchange)
    if gpu.device is not None:
        if first:
            say(f"verify: now tensors on GPUs ({_way(exchange)})")
        results += _results(options, exchange, transport, gpu.device)
    elif gpu.why and first:
        say(f"verify: tensors on GPUs are not verified: {gpu.why}")
    transport.close()
    if first and options.json:
        content = {
            "workers": exchange.size,
            "controller": exchange.controller,
            "gpu": str(gpu.device.type) if gpu.device else None,
            "gpu_not_verified": gpu.why or None,
            "nccl": exchange.has_nccl,
            "seed": options.seed,
            "fault": options.fault,
            "fusion_threshold_bytes": threshold,
            "right": sum(result.ok for result in results),
            "wrong": sum(not result.ok for result in results),
            "cases": [as_json(result) for result in results],
        }
        write_json(Path(options.json), content)
    return results


def _way(exchange: HorovodExchange) -> str:
    """Return how Horovod exchanges tensors on GPUs, for messages."""
    return "by NCCL" if exchange.has_nccl else f"copied to the host, by {exchange.controller}"


def _results(
    options: VerifyOptions,
    exchange: HorovodExchange,
    transport: Transport,
    device: torch.device,
) -> list[Result]:
    """Collective: return all outcomes; rank 0 prints each row of the table once it is complete."""
    cases = plan_cases(options.operations, options.dtypes, options.sizes, exchange.size)
    runner = Runner(exchange, device)
    if options.fault:
        runner = FaultyRunner(exchange, options.fault, transport, options.seed, device)

    def repeatable(case: Case) -> bool:
        return exchange.repeatable or case.submission == "alone"  # such a one is never fused

    outcomes = run_cases(cases, runner, transport, options.seed, repeatable)
    results = []
    for _, row in itertools.groupby(outcomes, lambda r: (r.case.operation.name, r.case.dtype)):
        results += (of_row := list(row))
        if exchange.rank == 0:
            say(table_row(of_row))
    return results


def _judge(options: VerifyOptions, exchange: HorovodExchange, results: list[Result]) -> None:
    """Report success, or raise; the outcome is the same on every rank."""
    cases = counted(len(results), "case")
    total = f"{cases} on {exchange.size} workers ({exchange.controller})"
    if on_gpus := sum(result.device != CPU.type for result in results):
        total += f", {on_gpus:,} of them on GPUs ({_way(exchange)})"
    wrong = [result for result in results if not result.ok and not result.spoiled]
    if wrong:  # a fault of the installation itself
        raise VerifyMismatch(explain(wrong[0], len(wrong) - 1))
    if options.fault is None:
        if exchange.rank == 0:
            say(f"verify: {total}: all right")
        return
    spoiled = [result for result in results if result.spoiled]
    detected = [result for result in spoiled if not result.ok]
    if not spoiled:
        raise HvdtrainError(
            f"verify: {options.fault} was not injected: it changes nothing in any of these {total}"
        )
    summary = (
        f"{options.fault} was injected in {len(spoiled)} of {total}, and found in {len(detected)}"
    )
    if not detected:
        raise HvdtrainError(f"verify: {summary}: each time it stayed within the rounding bound")
    raise VerifyMismatch(f"{explain(detected[0], 0)}\n  {summary}")


def table_row(row: Sequence[Result]) -> str:
    """Return the table's line for all cases of one operation and dtype."""
    first = row[0].case
    alone = [result for result in row if result.case.submission == "alone"]
    sizes = sorted(result.case.bytes for result in alone)
    largest = max(alone, key=lambda result: result.case.bytes)
    worst = max(result.worst for result in row)
    bit_equal = [result.bit_equal for result in row]
    repeatable = sum(result.repeatable for result in row)
    right = sum(result.ok for result in row)
    return (
        f"{first.operation.name:<22}{first.dtype:<9}"
        f"{size_text(sizes[0]) + ' - ' + size_text(sizes[-1]):<16}{len(row):>5}  {worst:>11.3g}  "
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
    lines = [f"verify: wrong result: {result.case}{on_gpu}", *_places(result)]
    lines.append(f"  {_kind_of_fault(result)}")
    if others:
        lines.append(f"  wrong cases besides this one: {others}; see the table, or --json")
    return "\n".join(lines)


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
        carried = result.case.operation.reduction == "none"
        suspect = "what was sent" if carried else "the reduction"
        return f"all {size} ranks agree on the wrong value: suspect {suspect}"
    if result.bit_equal is None:
        several = f"the share of {name_ranks(result.wrong)}"
        whose = "every rank's share" if len(result.wrong) == size else several
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
    ranks = range(len(result.by_rank))
    if len(groups) == 2 and groups[0][1] == groups[1][1]:
        return list(ranks)
    return [rank for rank in ranks if tuple(result.by_rank[rank].digests) != groups[0][0]]


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
