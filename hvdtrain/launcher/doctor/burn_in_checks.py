"""Checks of a burn-in: pure, results of all cores and GPUs -> findings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.launcher.doctor import ALL_HOSTS, Finding
from hvdtrain.launcher.doctor.burn_in import CHECK, SHOWN, BurnIn, Kind, Unit, few
from hvdtrain.launcher.doctor.gpu_checks import check_gpu_clocks, check_gpu_errors
from hvdtrain.launcher.doctor.trainings import CORE, GPU
from hvdtrain.log import counted

WRONG_FIX = {
    CORE: "take the host out of the hostfile, and test its memory (memtest86+); if that is good, "
    "the processor is at fault",
    GPU: "select other GPUs by CUDA_VISIBLE_DEVICES, and run the vendor's diagnosis (dcgmi diag "
    "-r 3, nvidia-smi -q -d ECC,ROW_REMAPPER); see that the card is cooled and powered well",
}
ENDED_FIX = {
    CORE: "see dmesg there: out of memory (a core needs 0.5 GiB), or a machine check?",
    GPU: "see dmesg there: an Xid error of the driver, or out of memory (a GPU needs 2 GiB)?",
}
UNDECIDED_FIX = "to see which is wrong, burn in with more {}s of this kind; until then, use none"
SUMS_FIX = (
    "see the links between its GPUs (nvidia-smi topo -m, nvidia-smi nvlink -s), and what "
    "`NCCL_DEBUG=INFO hvdtrain launch -np 2 -- verify` prints there"
)
SLOW_SUMS = 0.5  # of the bandwidth of the fastest like host


def check_burn_in(results: BurnIn) -> list[Finding]:
    """Check that all units of a kind give one answer: findings by host, by kind, then of the GPUs
    under load and of the sums between them.
    """
    kinds = results.kinds()
    hosts = []
    for host, units in results.units.items():
        for what in dict.fromkeys(unit.what for unit in units):
            matching = [unit for unit in units if unit.what == what]
            hosts.append(_check_host(results, kinds, host, matching))
    unlisted = [
        Finding(CHECK, "fail", host, why, "see what `python -c 'import torch'` prints there")
        for host, why in results.unlisted.items()
    ]
    lost = results.lost.values()
    more = [*_check_kinds(results, kinds), *_check_load(results), *_check_sums(results)]
    return [*hosts, *unlisted, *lost, *more]


def _check_host(
    results: BurnIn, kinds: Sequence[Kind], host: str, units: Sequence[Unit]
) -> Finding:
    """Return the finding for the units of one host that are all cores or all GPUs."""
    what = units[0].what
    pairs = [(kind, unit) for kind in kinds for unit in kind.units if unit in units]
    undecided = any(kind.right is None for kind, _ in pairs)
    wrong = [_describe(results, kind, unit) for kind, unit in pairs if kind.wrong(unit)]
    ended = [
        f"{unit.name} {unit.problem}, after {counted(unit.repetitions, 'repetition')}"
        for unit in units
        if unit.problem
    ]
    done = counted(sum(unit.repetitions for unit in units), "repetition")
    count = sum(kind.wrong(unit) for kind, unit in pairs)
    result = "no majority" if undecided else f"{count:,} wrong"
    text = f"{counted(len(units), what)}, {done}, {result}"
    text = "; ".join(filter(None, [text, few(wrong, "; "), few(ended, "; ")]))
    fix = "; ".join([WRONG_FIX[what]] * bool(wrong) + [ENDED_FIX[what]] * bool(ended))
    return Finding(CHECK, "fail" if wrong or ended or undecided else "ok", host, text, fix)


def _describe(results: BurnIn, kind: Kind, unit: Unit) -> str:
    """Return which repetitions of a unit were wrong, and what differed first."""
    others = [answer for answer in unit.answers if answer != kind.right]
    count = kind.wrong(unit)
    numbers = few(sorted(number for answer in others for number in unit.answers[answer]["at"]))
    how = "repeatable" if count == unit.repetitions else f"transient: {numbers}"
    where = results.difference(others[0], kind.right or "")
    of = counted(unit.repetitions, "repetition")
    return f"{unit.name} wrong in {count:,} of {of} ({how}){where}"


def _check_kinds(results: BurnIn, kinds: Sequence[Kind]) -> list[Finding]:
    """Return a finding for each kind: what was compared, or that there is no majority."""
    findings = []
    for kind in kinds:
        if kind.right is None:
            text = f"{_disagreement(results, kind)}: no majority ({kind.name})"
            fix = UNDECIDED_FIX.format(kind.what)
            findings.append(Finding(CHECK, "fail", ALL_HOSTS, text, fix))
            continue
        names = few(list(dict.fromkeys(unit.host for unit in kind.units)))
        among = "one another" if len(kind.units) > 1 else "itself only"
        like = [other for other in kinds if other.what == kind.what]
        others = f", not with {counted(len(like) - 1, 'other kind')}" if len(like) > 1 else ""
        compared = f"{counted(len(kind.units), kind.what)} compared with {among}{others}"
        findings.append(Finding(CHECK, "ok", ALL_HOSTS, f"{names}: {compared} ({kind.name})"))
    return findings


def _disagreement(results: BurnIn, kind: Kind) -> str:
    answers = list(dict.fromkeys(answer for unit in kind.units for answer in unit.answers))
    groups = [
        few([unit for unit in kind.units if answer in unit.answers]) for answer in answers[:SHOWN]
    ]
    alone = f"{kind.units[0]} disagrees with itself"
    who = alone if len(kind.units) == 1 else f"{' and '.join(groups)} disagree"
    return who + results.difference(answers[1], answers[0])


def _check_load(results: BurnIn) -> list[Finding]:
    """Check what drivers reported of the GPUs at work: clocks, and errors of memory."""
    errors = [finding for finding in check_gpu_errors(results.gpus) if finding.status != "ok"]
    findings = [*check_gpu_clocks(results.gpus), *errors]
    return [
        dataclasses.replace(finding, check=CHECK, text=f"at work: {finding.text}")
        for finding in findings
    ]


def _check_sums(results: BurnIn) -> list[Finding]:
    """Check the all-reduce between the GPUs of each host: right, and as fast as on like hosts."""
    slowest: dict[str, Mapping[str, Any]] = {}
    findings = []
    for host, units in results.units.items():
        sums = [unit.sums for unit in units if unit.sums]
        if missing := [reduction["missing"] for reduction in sums if "missing" in reduction]:
            text = f"the all-reduce between GPUs is not measured: {missing[0]}"
            findings.append(Finding(CHECK, "warn", host, text, SUMS_FIX))
        elif wrong := [reduction["wrong"] for reduction in sums if reduction["wrong"]]:
            text = f"the all-reduce between GPUs gives wrong sums: {wrong[0]}"
            findings.append(Finding(CHECK, "fail", host, text, SUMS_FIX))
        elif sums:
            slowest[host] = max(sums, key=lambda reduction: reduction["seconds"])
    for host, reduction in slowest.items():
        like = [other for other in slowest.values() if other["devices"] == reduction["devices"]]
        best, speed = max(map(bus_bandwidth, like)), bus_bandwidth(reduction)
        slow = speed < SLOW_SUMS * best
        text = (
            f"all-reduce of {reduction['bytes'] >> 20} MiB between {reduction['devices']} GPUs "
            f"({reduction['backend']}): bus bandwidth {speed / 1e9:.2f} GB/s"
        )
        text += f", but {best / 1e9:.2f} GB/s on a like host" if slow else ""
        fix = SUMS_FIX if slow else ""
        findings.append(Finding(CHECK, "warn" if slow else "ok", host, text, fix))
    return findings


def bus_bandwidth(sums: Mapping[str, Any]) -> float:
    """Return the bytes/s that each GPU's link must carry: busbw of nccl-tests."""
    passing = 2 * (sums["devices"] - 1) / sums["devices"]
    return float(sums["bytes"] * passing / sums["seconds"])
