"""`doctor --burn-in`: the same training on every core and GPU of every host, and the comparison.

All units (cores or GPUs) of one kind must compute the same bits. The answer of most units is right;
another one reveals a processor, a card or memory that computes wrong results, often without any
other symptom. The results are checked by `check_burn_in`.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from hvdtrain.launcher.doctor import ALL_HOSTS, Facts, Finding, HostCheck
from hvdtrain.launcher.doctor.gpu_checks import check_cards
from hvdtrain.launcher.doctor.sessions import STEP_S, ProbeSession, on_all, open_sessions
from hvdtrain.launcher.doctor.trainings import CORE, GPU
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.ssh import SshSetup
from hvdtrain.log import counted, duration, few, say

CHECK = "burn-in"
FIRST_S = 45.0  # for login, and for starting a process on each core
POLL_S = 1.0
OFTEN_S, SELDOM_S, TIMES = 10.0, 300.0, 20  # progress: limits of the interval; how many times
SHOWN = 4  # answers in a message
SLOW_SUMS = 0.5  # of the bandwidth of the fastest like host
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
SUMS_FIX = (
    "see the links between its GPUs (nvidia-smi topo -m, nvidia-smi nvlink -s), and what "
    "`NCCL_DEBUG=INFO hvdtrain launch -np 2 -- verify` prints there"
)


@dataclass(frozen=True)
class Unit:
    """The results of one core or GPU, as sent by its probe (see trainings.py)."""

    host: str
    what: str  # CORE or GPU
    number: int
    kind: str
    running: bool
    problem: str | None  # why its process has ended early
    repetitions: int
    answers: Mapping[str, Mapping[str, Any]]  # `count`, and `at`: the first repetitions
    sums: Mapping[str, Any] | None = None  # of the all-reduce between all GPUs of the host
    uuid: str = ""  # of a GPU: its number depends on CUDA_VISIBLE_DEVICES

    @property
    def name(self) -> str:
        return f"{self.what} {self.number}" + (f" ({self.uuid})" if self.uuid else "")

    def __str__(self) -> str:
        return f"{self.host} {self.name}"


@dataclass(frozen=True)
class Kind:
    """All units of one kind. `right`: the answer of most of them; None if there is no majority.

    Each unit has one vote, divided among its answers. So a unit that contradicts itself loses
    against a single one that does not.
    """

    name: str
    units: Sequence[Unit]

    @property
    def what(self) -> str:
        return self.units[0].what

    @cached_property
    def right(self) -> str | None:
        votes: dict[str, Fraction] = defaultdict(Fraction)
        for unit in self.units:
            for answer, occurrences in unit.answers.items():
                votes[answer] += Fraction(occurrences["count"], unit.repetitions)
        most = max(votes.values())
        best = [answer for answer, vote in votes.items() if vote == most]
        return best[0] if len(best) == 1 else None

    def wrong(self, unit: Unit) -> int:
        """Return the number of wrong repetitions, as far as it is known which are right."""
        right = self.right
        good = unit.answers.get(right, {"count": 0})["count"] if right else unit.repetitions
        return unit.repetitions - int(good)


@dataclass
class BurnIn:
    """The results so far, the traces of answers, and findings for hosts that do not answer."""

    seconds: float
    units: dict[str, list[Unit]] = field(default_factory=dict)  # by host
    traces: dict[str, Mapping[str, str]] = field(default_factory=dict)
    lost: dict[str, Finding] = field(default_factory=dict)
    listing: dict[str, bool] = field(default_factory=dict)  # whether hosts still look for GPUs
    unlisted: dict[str, str] = field(default_factory=dict)  # host -> why it has not found them
    gpus: dict[str, Facts] = field(default_factory=dict)  # what drivers report during the burn-in

    def running(self) -> list[str]:
        """Return the hosts that answer and have not finished."""
        return [
            host
            for host, units in self.units.items()
            if host not in self.lost and (self.listing[host] or any(unit.running for unit in units))
        ]

    def kinds(self) -> list[Kind]:
        """Return the units that have given an answer, by kind."""
        kinds: dict[str, list[Unit]] = {}
        for unit in itertools.chain(*self.units.values()):
            if unit.answers:
                kinds.setdefault(unit.kind, []).append(unit)
        return [Kind(name, units) for name, units in kinds.items()]

    def difference(self, answer: str, other: str) -> str:
        """Return the first tensor that differs, for the end of a message, as far as it is known."""
        trace, expected = self.traces.get(answer, {}), self.traces.get(other, {})
        different = [name for name in expected if trace.get(name, expected[name]) != expected[name]]
        return f", first in {different[0]}" if different else ""


def burn_in(hosts: Sequence[Host], ssh: SshSetup, seconds: float) -> BurnIn:
    """Train on every core and GPU of the hosts for so long, and show progress; leave no process
    behind. When half of the time is over, drivers report their GPUs under load.
    """
    results, began, shown_s = BurnIn(seconds), time.monotonic(), 0.0
    interval_s = min(SELDOM_S, max(OFTEN_S, seconds / TIMES))
    with open_sessions(hosts, ssh) as sessions:
        _ask(results, sessions, {"do": "burn_in", "seconds": seconds}, FIRST_S)
        while running := results.running():
            if time.monotonic() - shown_s >= interval_s:
                shown_s = time.monotonic()
                say(_progress(results, shown_s - began))
            time.sleep(POLL_S)
            asked = {host: sessions[host] for host in running}
            _ask(results, asked, {"do": "burn_in_state"}, STEP_S)
            if time.monotonic() - began > seconds / 2:
                _ask_drivers(results, sessions)
    return results


def _ask_drivers(results: BurnIn, sessions: Mapping[str, ProbeSession]) -> None:
    """Ask the driver of each host whose GPUs are at work, once."""
    hosts = {
        host: sessions[host]
        for host in results.running()
        if host not in results.gpus and any(unit.what == GPU for unit in results.units[host])
    }
    results.gpus |= on_all(lambda session: session.ask_again({"do": "gpus"}), hosts)


def _ask(
    results: BurnIn,
    sessions: Mapping[str, ProbeSession],
    request: Mapping[str, Any],
    limit_s: float,
) -> None:
    """Ask hosts for their results so far; those that do not answer are lost."""
    answers = on_all(lambda session: session.ask_or_explain(request, limit_s), sessions)
    for host, answer in answers.items():
        if isinstance(answer, Finding):
            results.lost[host] = replace(answer, check=CHECK)
        elif state := answer.get(request["do"]):
            results.units[host] = [Unit(host=host, **unit) for unit in state["units"]]
            results.traces |= state["traces"]
            results.listing[host] = state["listing"]
            results.unlisted |= {host: state["problem"]} if state["problem"] else {}
        else:
            text = f"trainings cannot be started: {'; '.join(answer.errors.values())}"
            fix = "see dmesg there: is memory short (a core needs 0.5 GiB)?"
            results.lost[host] = Finding(CHECK, "fail", host, text, fix)


def _progress(results: BurnIn, elapsed_s: float) -> str:
    units = list(itertools.chain(*results.units.values()))
    counts = Counter(unit.what for unit in units)
    what = ", ".join(counted(count, name) for name, count in counts.items())
    done = counted(sum(unit.repetitions for unit in units), "repetition")
    wrong = [str(unit) for kind in results.kinds() for unit in kind.units if kind.wrong(unit)]
    passed = f"{duration(min(elapsed_s, results.seconds))} of {duration(results.seconds)}"
    return f"burn-in: {passed}, {what}, {done}, wrong: {few(wrong) or 'none'}"


def burn_in_json(results: BurnIn) -> dict[str, Any]:
    """Return all results, as written by --json."""
    return {
        "right": {kind.name: kind.right for kind in results.kinds()},
        "seconds": results.seconds,
        "traces": results.traces,
        "unlisted": results.unlisted,
        "units": {host: list(map(asdict, units)) for host, units in results.units.items()},
        "lost": {host: asdict(finding) for host, finding in results.lost.items()},
        "gpus": {host: facts.get("gpus") for host, facts in results.gpus.items()},
    }


def check_burn_in(results: BurnIn) -> list[Finding]:
    """Check that all units of a kind give one answer: findings by host, by kind, then of the GPUs
    under load and of the sums between them.
    """
    kinds = results.kinds()
    hosts = [
        _check_host(results, kinds, host, [unit for unit in units if unit.what == what])
        for host, units in results.units.items()
        for what in dict.fromkeys(unit.what for unit in units)
    ]
    unlisted = [
        Finding(CHECK, "fail", host, why, "see what `python -c 'import torch'` prints there")
        for host, why in results.unlisted.items()
    ]
    return [
        *hosts,
        *unlisted,
        *results.lost.values(),
        *_check_kinds(results, kinds),
        *_check_load(results),
        *_check_sums(results),
    ]


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
    parts = [f"{counted(len(units), what)}, {done}, {result}"]
    parts += [few(problems, separator="; ") for problems in (wrong, ended)]
    text = "; ".join(filter(None, parts))
    fix = "; ".join([WRONG_FIX[what]] * bool(wrong) + [ENDED_FIX[what]] * bool(ended))
    return Finding(CHECK, "fail" if wrong or ended or undecided else "ok", host, text, fix)


def _describe(results: BurnIn, kind: Kind, unit: Unit) -> str:
    """Return which repetitions of a unit were wrong, and what differed first."""
    others = [answer for answer in unit.answers if answer != kind.right]
    count = kind.wrong(unit)
    numbers = few(sorted(number for answer in others for number in unit.answers[answer]["at"]))
    how = "repeatable" if count == unit.repetitions else f"transient: {numbers}"
    of = counted(unit.repetitions, "repetition")
    difference = results.difference(others[0], kind.right or "")
    return f"{unit.name} wrong in {count:,} of {of} ({how}){difference}"


def _check_kinds(results: BurnIn, kinds: Sequence[Kind]) -> list[Finding]:
    """Return a finding for each kind: what was compared, or that there is no majority."""
    check = HostCheck(CHECK)
    for kind in kinds:
        if kind.right is None:
            check.add(
                ALL_HOSTS,
                "fail",
                f"{_disagreement(results, kind)}: no majority ({kind.name})",
                f"to see which is wrong, burn in with more {kind.what}s of this kind; until then, "
                "use none",
            )
            continue
        names = few(list(dict.fromkeys(unit.host for unit in kind.units)))
        among = "one another" if len(kind.units) > 1 else "itself only"
        like = [other for other in kinds if other.what == kind.what]
        others = f", not with {counted(len(like) - 1, 'other kind')}" if len(like) > 1 else ""
        compared = f"{counted(len(kind.units), kind.what)} compared with {among}{others}"
        check.add(ALL_HOSTS, "ok", f"{names}: {compared} ({kind.name})")
    return check.findings


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
    errors = [f for f in check_cards(results.gpus, "gpu errors") if f.status != "ok"]
    return [
        replace(finding, check=CHECK, text=f"at work: {finding.text}")
        for finding in [*check_cards(results.gpus, "gpu clocks"), *errors]
    ]


def _check_sums(results: BurnIn) -> list[Finding]:
    """Check the all-reduce between the GPUs of each host: right, and as fast as on like hosts."""
    check = HostCheck(CHECK)
    slowest: dict[str, Mapping[str, Any]] = {}
    for host, units in results.units.items():
        sums = [unit.sums for unit in units if unit.sums]
        if missing := [reduction["missing"] for reduction in sums if "missing" in reduction]:
            text = f"the all-reduce between GPUs is not measured: {missing[0]}"
            check.add(host, "warn", text, SUMS_FIX)
        elif wrong := [reduction["wrong"] for reduction in sums if reduction["wrong"]]:
            text = f"the all-reduce between GPUs gives wrong sums: {wrong[0]}"
            check.add(host, "fail", text, SUMS_FIX)
        elif sums:
            slowest[host] = max(sums, key=lambda reduction: reduction["seconds"])
    for host, reduction in slowest.items():
        like = [other for other in slowest.values() if other["devices"] == reduction["devices"]]
        best, speed = max(map(bus_bandwidth, like)), bus_bandwidth(reduction)
        text = (
            f"all-reduce of {reduction['bytes'] >> 20} MiB between {reduction['devices']} GPUs "
            f"({reduction['backend']}): bus bandwidth {speed / 1e9:.2f} GB/s"
        )
        if speed < SLOW_SUMS * best:
            text += f", but {best / 1e9:.2f} GB/s on a like host"
            check.add(host, "warn", text, SUMS_FIX)
        else:
            check.add(host, "ok", text)
    return check.findings


def bus_bandwidth(sums: Mapping[str, Any]) -> float:
    """Return the bytes/s that each GPU's link must carry: busbw of nccl-tests."""
    passing = 2 * (sums["devices"] - 1) / sums["devices"]
    return float(sums["bytes"] * passing / sums["seconds"])
