"""`doctor --burn-in`: the same training on every core of every host, and the comparison.

All cores of one kind must compute the same bits. The answer of most cores is right; another one
reveals a processor or memory that computes wrong results, often without any other symptom.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

from hvdtrain.launcher.doctor import ALL_HOSTS, Facts, Finding
from hvdtrain.launcher.doctor.sessions import (
    STEP_S,
    NoAnswer,
    ProbeSession,
    explain,
    on_all,
    open_sessions,
)
from hvdtrain.launcher.hosts import Host
from hvdtrain.launcher.ssh import SshSetup
from hvdtrain.log import counted, duration, say

CHECK = "burn-in"
FIRST_S = 45.0  # for login, and for starting a process on each core
POLL_S = 1.0
OFTEN_S, SELDOM_S, TIMES = 10.0, 300.0, 20  # progress: limits of the interval; how many times
SHOWN = 4  # items in one list
WRONG_FIX = (
    "take the host out of the hostfile, and test its memory (memtest86+); if that is good, the "
    "processor is at fault"
)
ENDED_FIX = "see dmesg there: out of memory (a core needs 0.5 GiB), or a machine check?"
UNDECIDED_FIX = "to see which is wrong, burn in with more cores of this kind; until then, use none"


@dataclass(frozen=True)
class Core:
    """The results of one core, as sent by its probe (see cores.py)."""

    host: str
    number: int
    kind: str
    running: bool
    problem: str | None  # why its process has ended early
    repetitions: int
    answers: Mapping[str, Mapping[str, Any]]  # `count`, and `at`: the first repetitions

    def __str__(self) -> str:
        return f"{self.host} core {self.number}"


@dataclass(frozen=True)
class Kind:
    """All cores of one kind. `right`: the answer of most of them; None if there is no majority.

    Each core has one vote, divided among its answers. So a core that contradicts itself loses
    against a single one that does not.
    """

    name: str
    cores: Sequence[Core]

    @cached_property
    def right(self) -> str | None:
        votes: dict[str, Fraction] = {}
        for core in self.cores:
            for answer, given in core.answers.items():
                share = Fraction(given["count"], core.repetitions)
                votes[answer] = votes.get(answer, Fraction()) + share
        most = max(votes.values())
        best = [answer for answer, vote in votes.items() if vote == most]
        return best[0] if len(best) == 1 else None

    def wrong(self, core: Core) -> int:
        """Return the number of wrong repetitions, as far as it is known which are right."""
        right = self.right
        good = core.answers.get(right, {"count": 0})["count"] if right else core.repetitions
        return core.repetitions - int(good)


@dataclass
class BurnIn:
    """The results so far, the traces of answers, and findings for hosts that do not answer."""

    seconds: float
    cores: dict[str, list[Core]] = field(default_factory=dict)  # by host
    traces: dict[str, Mapping[str, str]] = field(default_factory=dict)
    lost: dict[str, Finding] = field(default_factory=dict)

    def running(self) -> list[str]:
        """Return the hosts that answer and have not finished."""
        hosts = (host for host, cores in self.cores.items() if any(it.running for it in cores))
        return [host for host in hosts if host not in self.lost]

    def kinds(self) -> list[Kind]:
        """Return the cores that have given an answer, by kind."""
        kinds: dict[str, list[Core]] = {}
        for core in (core for cores in self.cores.values() for core in cores):
            if core.answers:
                kinds.setdefault(core.kind, []).append(core)
        return [Kind(name, cores) for name, cores in kinds.items()]

    def difference(self, answer: str, other: str) -> str:
        """Return the first tensor that differs, for the end of a message, as far as it is known."""
        found, expected = self.traces.get(answer, {}), self.traces.get(other, {})
        different = [name for name in expected if found.get(name, expected[name]) != expected[name]]
        return f", first in {different[0]}" if different else ""


def burn_in(hosts: Sequence[Host], ssh: SshSetup, seconds: float) -> BurnIn:
    """Train on every core of the hosts for so long, and show progress; leave no process behind."""
    found, began, shown_s = BurnIn(seconds), time.monotonic(), 0.0
    interval_s = min(SELDOM_S, max(OFTEN_S, seconds / TIMES))
    with open_sessions(hosts, ssh) as sessions:
        _ask(found, sessions, ssh, {"do": "burn_in", "seconds": seconds}, FIRST_S)
        while running := found.running():
            if time.monotonic() - shown_s >= interval_s:
                shown_s = time.monotonic()
                say(_progress(found, shown_s - began))
            time.sleep(POLL_S)
            asked = {host: sessions[host] for host in running}
            _ask(found, asked, ssh, {"do": "burn_in_state"}, STEP_S)
    return found


def _ask(
    found: BurnIn,
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
            found.lost[host] = dataclasses.replace(answer, check=CHECK)
        elif state := answer.get(request["do"]):
            found.cores[host] = [Core(host=host, **core) for core in state["cores"]]
            found.traces |= state["traces"]
        else:
            text = f"trainings cannot be started: {'; '.join(answer.errors.values())}"
            found.lost[host] = Finding(CHECK, "fail", host, text, ENDED_FIX)


def _progress(found: BurnIn, elapsed_s: float) -> str:
    cores = [core for cores in found.cores.values() for core in cores]
    done = counted(sum(core.repetitions for core in cores), "repetition")
    wrong = [str(core) for kind in found.kinds() for core in kind.cores if kind.wrong(core)]
    passed = f"{duration(min(elapsed_s, found.seconds))} of {duration(found.seconds)}"
    return (
        f"burn-in: {passed}, {counted(len(cores), 'core')}, {done}, wrong: {_few(wrong) or 'none'}"
    )


def check_burn_in(found: BurnIn) -> list[Finding]:
    """Check that all cores of a kind give one answer: findings by host, then by kind."""
    kinds = found.kinds()
    hosts = [_check_host(found, kinds, host, cores) for host, cores in found.cores.items()]
    return [*hosts, *found.lost.values(), *_check_kinds(found, kinds)]


def _check_host(found: BurnIn, kinds: Sequence[Kind], host: str, cores: Sequence[Core]) -> Finding:
    own = [(kind, core) for kind in kinds for core in kind.cores if core.host == host]
    undecided = any(kind.right is None for kind, _ in own)
    wrong = [_describe(found, kind, core) for kind, core in own if kind.wrong(core)]
    ended = [
        f"core {core.number} {core.problem}, after {counted(core.repetitions, 'repetition')}"
        for core in cores
        if core.problem
    ]
    done = counted(sum(core.repetitions for core in cores), "repetition")
    count = sum(kind.wrong(core) for kind, core in own)
    result = "no majority" if undecided else f"{count:,} wrong"
    text = f"{counted(len(cores), 'core')}, {done}, {result}"
    text = "; ".join(filter(None, [text, _few(wrong, "; "), _few(ended, "; ")]))
    fix = "; ".join([WRONG_FIX] * bool(wrong) + [ENDED_FIX] * bool(ended))
    return Finding(CHECK, "fail" if wrong or ended or undecided else "ok", host, text, fix)


def _describe(found: BurnIn, kind: Kind, core: Core) -> str:
    """Return which repetitions of a core were wrong, and what differed first."""
    others = [answer for answer in core.answers if answer != kind.right]
    count = kind.wrong(core)
    numbers = _few(sorted(number for answer in others for number in core.answers[answer]["at"]))
    how = "repeatable" if count == core.repetitions else f"transient: {numbers}"
    where = found.difference(others[0], kind.right or "")
    of = counted(core.repetitions, "repetition")
    return f"core {core.number} wrong in {count:,} of {of} ({how}){where}"


def _check_kinds(found: BurnIn, kinds: Sequence[Kind]) -> list[Finding]:
    """Return a finding for each kind: what was compared, or that there is no majority."""
    findings = []
    for kind in kinds:
        if kind.right is None:
            text = f"{_disagreement(found, kind)}: no majority ({kind.name})"
            findings.append(Finding(CHECK, "fail", ALL_HOSTS, text, UNDECIDED_FIX))
            continue
        names = _few(list(dict.fromkeys(core.host for core in kind.cores)))
        among = "one another" if len(kind.cores) > 1 else "itself only"
        others = f", not with {counted(len(kinds) - 1, 'other kind')}" if len(kinds) > 1 else ""
        compared = f"{counted(len(kind.cores), 'core')} compared with {among}{others}"
        findings.append(Finding(CHECK, "ok", ALL_HOSTS, f"{names}: {compared} ({kind.name})"))
    return findings


def _disagreement(found: BurnIn, kind: Kind) -> str:
    answers = list(dict.fromkeys(answer for core in kind.cores for answer in core.answers))
    groups = [_few([core for core in kind.cores if it in core.answers]) for it in answers[:SHOWN]]
    alone = f"{kind.cores[0]} disagrees with itself"
    who = alone if len(kind.cores) == 1 else f"{' and '.join(groups)} disagree"
    return who + found.difference(answers[1], answers[0])


def _few(items: Sequence[object], separator: str = ", ") -> str:
    """Return the first items as text, and the number of the others."""
    more = [f"and {len(items) - SHOWN:,} more"] if len(items) > SHOWN else []
    return separator.join([*map(str, items[:SHOWN]), *more])


def burn_in_json(found: BurnIn) -> dict[str, Any]:
    """Return all results, as written by --json."""
    right = {kind.name: kind.right for kind in found.kinds()}
    return {"right": right, **dataclasses.asdict(found)}
