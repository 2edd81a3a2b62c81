"""`doctor --burn-in`: the same training on every core and GPU of every host, and the comparison.

All units (cores or GPUs) of one kind must compute the same bits. The answer of most units is right;
another one reveals a processor, a card or memory that computes wrong results, often without any
other symptom.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

from hvdtrain.launcher.doctor import Facts, Finding
from hvdtrain.launcher.doctor.sessions import (
    STEP_S,
    NoAnswer,
    ProbeSession,
    explain,
    on_all,
    open_sessions,
)
from hvdtrain.launcher.doctor.trainings import GPU
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.ssh import SshSetup
from hvdtrain.log import counted, duration, say

CHECK = "burn-in"
FIRST_S = 45.0  # for login, and for starting a process on each core
POLL_S = 1.0
OFTEN_S, SELDOM_S, TIMES = 10.0, 300.0, 20  # progress: limits of the interval; how many times
SHOWN = 4  # items in one list
START_FIX = "see dmesg there: is memory short (a core needs 0.5 GiB)?"


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
        votes: dict[str, Fraction] = {}
        for unit in self.units:
            for answer, occurrences in unit.answers.items():
                share = Fraction(occurrences["count"], unit.repetitions)
                votes[answer] = votes.get(answer, Fraction()) + share
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
    listing: set[str] = field(default_factory=set)  # hosts that still look for GPUs
    unlisted: dict[str, str] = field(default_factory=dict)  # host -> why it has not found them
    gpus: dict[str, Facts] = field(default_factory=dict)  # what drivers report during the burn-in

    def running(self) -> list[str]:
        """Return the hosts that answer and have not finished."""
        hosts = (
            host
            for host, units in self.units.items()
            if host in self.listing or any(unit.running for unit in units)
        )
        return [host for host in hosts if host not in self.lost]

    def kinds(self) -> list[Kind]:
        """Return the units that have given an answer, by kind."""
        kinds: dict[str, list[Unit]] = {}
        for unit in (unit for units in self.units.values() for unit in units):
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
        _ask(results, sessions, ssh, {"do": "burn_in", "seconds": seconds}, FIRST_S)
        while running := results.running():
            if time.monotonic() - shown_s >= interval_s:
                shown_s = time.monotonic()
                say(_progress(results, shown_s - began))
            time.sleep(POLL_S)
            asked = {host: sessions[host] for host in running}
            _ask(results, asked, ssh, {"do": "burn_in_state"}, STEP_S)
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
    answers = on_all(lambda session: session.ask_again({"do": "gpus"}), hosts)
    results.gpus |= answers


def _ask(
    results: BurnIn,
    sessions: Mapping[str, ProbeSession],
    ssh: SshSetup,
    request: Mapping[str, Any],
    limit_s: float,
) -> None:
    """Ask hosts for their results so far; those that do not answer are lost."""

    def ask(session: ProbeSession) -> Facts | Finding:
        try:
            return session.ask(request, time.monotonic() + limit_s)
        except NoAnswer as error:
            return explain(session.host, ssh.by_hand(session.host), error)

    for host, answer in on_all(ask, sessions).items():
        if isinstance(answer, Finding):
            results.lost[host] = dataclasses.replace(answer, check=CHECK)
        elif state := answer.get(request["do"]):
            results.units[host] = [Unit(host=host, **unit) for unit in state["units"]]
            results.traces |= state["traces"]
            results.listing -= {host}
            results.listing |= {host} if state["listing"] else set()
            results.unlisted |= {host: state["problem"]} if state["problem"] else {}
        else:
            text = f"trainings cannot be started: {'; '.join(answer.errors.values())}"
            results.lost[host] = Finding(CHECK, "fail", host, text, START_FIX)


def _progress(results: BurnIn, elapsed_s: float) -> str:
    units = [unit for units in results.units.values() for unit in units]
    counts = Counter(unit.what for unit in units)
    what = ", ".join(counted(count, name) for name, count in counts.items())
    done = counted(sum(unit.repetitions for unit in units), "repetition")
    wrong = [str(unit) for kind in results.kinds() for unit in kind.units if kind.wrong(unit)]
    passed = f"{duration(min(elapsed_s, results.seconds))} of {duration(results.seconds)}"
    return f"burn-in: {passed}, {what}, {done}, wrong: {few(wrong) or 'none'}"


def few(items: Sequence[object], separator: str = ", ") -> str:
    """Return the first items as text, and the number of the others."""
    more = [f"and {len(items) - SHOWN:,} more"] if len(items) > SHOWN else []
    return separator.join([*map(str, items[:SHOWN]), *more])


def burn_in_json(results: BurnIn) -> dict[str, Any]:
    """Return all results, as written by --json."""
    right = {kind.name: kind.right for kind in results.kinds()}
    sources = {name: getattr(results, name) for name in ("seconds", "traces", "unlisted")}
    units = {
        host: list(map(dataclasses.asdict, host_units))
        for host, host_units in results.units.items()
    }
    lost = {host: dataclasses.asdict(finding) for host, finding in results.lost.items()}
    gpus = {host: facts.get("gpus") for host, facts in results.gpus.items()}
    return {"right": right, **sources, "units": units, "lost": lost, "gpus": gpus}
