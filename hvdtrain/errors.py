"""The exception hierarchy of hvdtrain, with the exit code of each class.

HvdtrainError             1   the run failed
├── UsageError            2   a flag, a configuration or an input is wrong; nothing was started
├── PreflightError        3   this machine lacks a requirement; the message names the fix
├── TrainingError         1   training cannot continue (for example, the loss is not finite)
├── PeerFailure           1   another rank failed first; this one has no cause of its own to report
├── TransportError        1   a ring neighbour timed out, disconnected or sent invalid data
├── AuditMismatch        17   reduced gradients differ from the reference by more than rounding
│   └── ComputeMismatch       a local gradient differs when another rank computes it
├── VerifyMismatch       17   the result of a collective differs from the ring reference
├── ReplayMismatch       17   a recorded step differs when it is computed again
├── Stopped           128+n   signal n arrived
└── AgreedFailure         *   failures of one or more ranks, raised on all; their highest code
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import TypeVar

Result = TypeVar("Result")

FEW_RANKS = 3  # more in a row are named by the first and the last

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_PREFLIGHT = 3
EXIT_MISMATCH = 17


class HvdtrainError(Exception):
    """Base class of all errors meant for the user; printed without a traceback."""

    exit_code = EXIT_FAILED


class UsageError(HvdtrainError):
    """Invalid input. Holds every problem found, so that the user can fix all of them at once."""

    exit_code = EXIT_USAGE

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class PreflightError(HvdtrainError):
    """A missing or broken requirement of this machine."""

    exit_code = EXIT_PREFLIGHT


class TrainingError(HvdtrainError):
    """A condition under which training cannot continue."""


class PeerFailure(HvdtrainError):
    """A collective that ended early because another rank has failed."""


class TransportError(HvdtrainError):
    """A failed exchange of a message with a ring neighbour."""


class AuditMismatch(HvdtrainError):
    """A reduced gradient that differs from the ring reference by more than the rounding bound."""

    exit_code = EXIT_MISMATCH


class ComputeMismatch(AuditMismatch):
    """A gradient that another rank, which computed it again, found to be different."""

    def __init__(self, text: str, wrong_rank: int | None) -> None:
        """`wrong_rank`: the one that computed wrongly; None: it is not known."""
        super().__init__(text)
        self.wrong_rank = wrong_rank


class VerifyMismatch(HvdtrainError):
    """A collective of this installation whose result differs from the ring reference."""

    exit_code = EXIT_MISMATCH


class ReplayMismatch(HvdtrainError):
    """A recorded step, or its record, is not what is found when it is computed again."""

    exit_code = EXIT_MISMATCH


class Stopped(HvdtrainError):
    """A signal that asked this process to end."""

    def __init__(self, signal_number: int, more: str = "") -> None:
        name = signal.Signals(signal_number).name
        super().__init__(f"stopped by {name}" + (f": {more}" if more else ""))
        self.exit_code = 128 + signal_number


class AgreedFailure(HvdtrainError):
    """Failures exchanged between ranks; the same text on every rank."""

    def __init__(self, failures: Mapping[int, tuple[int, str]], size: int) -> None:
        """`failures`: rank -> (exit code, text)."""
        self.exit_code = max(code for code, _ in failures.values())
        ranks_by_text: dict[str, list[int]] = {}
        for rank, (_, text) in failures.items():
            ranks_by_text.setdefault(text, []).append(rank)
        super().__init__(
            "\n".join(
                text if len(ranks) == size else f"{name_ranks(ranks)}: {text}"
                for text, ranks in ranks_by_text.items()
            )
        )


def name_ranks(ranks: list[int]) -> str:
    """Return the ranks as text: 'rank 3', 'ranks 0, 2', or 'ranks 0 to 30, 32' of many."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    named = [[f"{run[0]} to {run[-1]}"] if len(run) > FEW_RANKS else map(str, run) for run in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(chain.from_iterable(named))


def shell_code(code: int) -> int:
    """Return the exit code that a shell would give: 128 + n for minus n, an end by signal n."""
    return code if code >= 0 else 128 - code


def closest(name: str, choices: Iterable[str]) -> str | None:
    """Return the one of `choices` that a misspelt `name` most probably means, if any is close."""
    import difflib  # only for a mistake: every process imports this module

    return next(iter(difflib.get_close_matches(name, list(choices), n=1)), None)


def refuse(problems: Iterable[str], ending: str = "") -> None:
    """Raise UsageError with these problems, if there are any. `ending`: advice after the last."""
    if listed := list(problems):
        listed[-1] += ending
        raise UsageError(*listed)


def first_problem(*checks: tuple[object, str | None]) -> str | None:
    """Return the problem of the first check that holds: pairs of condition and problem."""
    return next((problem for is_wrong, problem in checks if is_wrong), None)


def every_problem(*checks: tuple[object, str]) -> list[str]:
    """Return the problems of all checks that hold: pairs of condition and problem."""
    return [problem for is_wrong, problem in checks if is_wrong]


def attempt(problems: list[str], action: Callable[[], Result]) -> Result | None:
    """Return the result of `action`, or on UsageError extend `problems` and return None."""
    try:
        return action()
    except UsageError as error:
        problems.extend(error.problems)
        return None
