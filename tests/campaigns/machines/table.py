"""The outcomes of scenarios as a table in Markdown, and their comparison."""

from __future__ import annotations

from collections.abc import Sequence
from email.utils import parsedate_to_datetime

from tests.campaigns.machines.scenarios import SCENARIOS
from tests.campaigns.machines.steps import Outcome

HEAD = ("scenario", "release of", "gcc", "Python", "torch", "MPI", "seconds", "hash", "result")
RIGHT = ("seconds",)
HASH_CHARACTERS = 8


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a table in Markdown."""
    rules = ["---:" if name in RIGHT else "---" for name in HEAD]
    rows = [HEAD, rules, *(row(outcome) for outcome in outcomes)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def row(outcome: Outcome) -> list[str]:
    """Return the cells of one outcome; of its hashes, each once."""
    releases = {it.name: it.release for it in SCENARIOS}
    day = ""
    if outcome.snapshot:
        day = f"{parsedate_to_datetime(outcome.snapshot):%Y-%m-%d}"
    hashes = dict.fromkeys(it[:HASH_CHARACTERS] for it in outcome.hashes.values())
    return [
        outcome.scenario,
        f"{releases[outcome.scenario]} {day}".strip(),
        outcome.gcc,
        outcome.python,
        outcome.torch,
        outcome.mpi,
        f"{outcome.seconds:.0f}",
        " ".join(hashes),
        f"failed: {outcome.problem.partition(':')[0]}" if outcome.problem else "ok",
    ]


def different_hashes(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the groups of equal torch and architecture whose trainings ended differently."""
    groups: dict[tuple[str, str], dict[str, list[str]]] = {}
    for outcome in outcomes:
        group = groups.setdefault((outcome.torch_release, outcome.architecture), {})
        for training, found in outcome.hashes.items():
            group.setdefault(found, []).append(f"{outcome.scenario} {training}")
    return [
        f"torch {torch} on {architecture} ended with {len(group)} hashes: "
        + "; ".join(f"{found}: {', '.join(names)}" for found, names in group.items())
        for (torch, architecture), group in groups.items()
        if len(group) > 1
    ]
