"""The errors that hvdtrain raises, as one tree. Each carries the exit code that it ends in.

HvdtrainError             1   the run failed
├── UsageError            2   a flag, a configuration or an input is wrong; nothing was started
├── PreflightError        3   this machine lacks something; the fix is named
├── TrainingError         1   training cannot go on (a loss that is not finite, say)
├── PeerFailure           1   another rank failed first; this one has nothing of its own to report
├── TransportError        1   a ring neighbour fell silent, vanished or sent what it should not
├── AuditMismatch        17   reduced gradients are further from the reference than rounding allows
├── VerifyMismatch       17   a collective's result is not what the ring reference says
├── Stopped           128+n   signal n arrived
└── AgreedFailure         *   what one or more ranks met, raised alike on all; their highest code
"""

from __future__ import annotations

import signal
from collections.abc import Mapping

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_PREFLIGHT = 3
EXIT_MISMATCH = 17


class HvdtrainError(Exception):
    """Base of all errors meant for the user: its text is shown without a traceback."""

    exit_code = EXIT_FAILED


class UsageError(HvdtrainError):
    """Bad input. Holds every problem found, so that the user mends them in one go."""

    exit_code = EXIT_USAGE

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class PreflightError(HvdtrainError):
    """Something that the machine must have is missing or broken."""

    exit_code = EXIT_PREFLIGHT


class TrainingError(HvdtrainError):
    """Training cannot go on."""


class PeerFailure(HvdtrainError):
    """A collective ended early because another rank has failed."""


class TransportError(HvdtrainError):
    """A message of the ring could not be exchanged with a neighbour."""


class AuditMismatch(HvdtrainError):
    """A reduced gradient differs from the ring reference by more than the rounding bound."""

    exit_code = EXIT_MISMATCH


class VerifyMismatch(HvdtrainError):
    """A collective of this installation gave a result that the ring reference does not explain."""

    exit_code = EXIT_MISMATCH


class Stopped(HvdtrainError):
    """A signal asked this process to end."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.exit_code = 128 + signal_number


class AgreedFailure(HvdtrainError):
    """Failures that the ranks told one another; the same text on every rank."""

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
    """'rank 3' or 'ranks 0, 2'."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
