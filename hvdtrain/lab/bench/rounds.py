"""Rounds of contestants, one after the other; ratios within rounds, and tables of them."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.errors import TrainingError
from hvdtrain.evidence import trials
from hvdtrain.evidence.children import ChildFailure
from hvdtrain.launcher.processes import StopRequests

WIDEST = 0.2  # middle half of a ratio, as part of the median, for which the median is shown
UNCLEAR = "unclear"

Key = TypeVar("Key")
Value = TypeVar("Value")


def plan_of(kind: type[Value], arguments: Mapping[str, Any]) -> Value:
    """Return the dataclass `kind`, whose fields are all among the arguments."""
    return kind(**{name: arguments[name] for name in kind.__annotations__})


@contextmanager
def scratch_folder(bench: str) -> Iterator[Path]:
    """Yield a folder for jobs, and end whatever is started within this context.

    A signal raises Stopped. Raises TrainingError for a ChildFailure.
    """
    StopRequests()
    with trials.scratch_folder("bench") as folder:
        try:
            yield folder
        except ChildFailure as failure:
            raise TrainingError(f"bench {bench}: {failure}") from failure


def in_turn(contestants: Sequence[Key], number: int) -> Sequence[Key]:
    """Return the order of a round; every other one is reversed, to balance who follows whom."""
    return contestants if number % 2 == 0 else contestants[::-1]


def measure(
    contestants: Sequence[Key],
    rounds: int,
    run: Callable[[Key, Path], Value],
    folder: Path,
    report: Callable[[str], None],
) -> dict[Key, list[Value]]:
    """Run one contestant after the other; return results by contestant and round.

    Raises ChildFailure as `run`, which receives a new folder.
    """
    results: dict[Key, list[Value]] = {contestant: [] for contestant in contestants}
    for number in range(rounds):
        for contestant in in_turn(contestants, number):
            run_folder = folder / f"{number}-{contestants.index(contestant)}"
            run_folder.mkdir(mode=0o700)
            results[contestant].append(run(contestant, run_folder))
            report(f"round {number + 1}: {contestant}: {results[contestant][-1]}")
    return results


@dataclass(frozen=True)
class Ratio:
    """The spread of a ratio between two contestants over all rounds."""

    median: float
    lowest: float
    lower_quartile: float
    upper_quartile: float
    highest: float

    @property
    def shown(self) -> str:
        """Return the median as text; another word if the rounds differ too much for one figure."""
        is_clear = self.upper_quartile - self.lower_quartile <= WIDEST * self.median
        return f"{self.median:.3f}" if is_clear else UNCLEAR

    @property
    def middle_half(self) -> str:
        """Return the quartiles as text."""
        return f"{self.lower_quartile:.3f} to {self.upper_quartile:.3f}"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return the spread of ours over theirs within one or more rounds."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    lower, _, upper = (
        statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
    )
    return Ratio(statistics.median(ratios), min(ratios), lower, upper, max(ratios))


def paired(
    rounds: Mapping[str, Sequence[float]], pairs: Mapping[str, tuple[str, str]]
) -> dict[str, Ratio]:
    """Return the ratio of each pair of contestants, the first over the second, by its label."""
    return {label: ratio(rounds[one], rounds[other]) for label, (one, other) in pairs.items()}


def ratio_within_rounds(rates: Sequence[float], to: Sequence[float]) -> Ratio | None:
    """Return the ratio over rounds in which neither failed; None without such a round."""
    ended = [pair for pair in zip(rates, to, strict=True) if not any(map(math.isnan, pair))]
    return ratio(*zip(*ended, strict=True)) if ended else None


def ratio_and_spread(over: Ratio | None) -> str:
    """Return the cell of a ratio: its median and, in parentheses, its middle half."""
    return f"{over.shown} ({over.middle_half})" if over else "-"


def median(rates: Sequence[float]) -> float | None:
    """Return the median without failed rounds; None where all failed."""
    ended = [rate for rate in rates if not math.isnan(rate)]
    return statistics.median(ended) if ended else None


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column is aligned to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
        for row in rows
    ]


def ratio_lines(ratios: Mapping[str, Ratio]) -> list[str]:
    """Return the lines of a table of ratios: median, middle half and range."""
    rows = [
        [f"ratio, {name}", r.shown, r.middle_half, f"{r.lowest:.3f} to {r.highest:.3f}"]
        for name, r in ratios.items()
    ]
    return [*columns([["", "median", "middle half", "all"], *rows]), *advice(ratios.values())]


def advice(ratios: Iterable[Ratio | None]) -> list[str]:
    """Return a line on ratios that are not clear, if there are any."""
    if all(over is None or over.shown != UNCLEAR for over in ratios):
        return []
    return [
        f"  {UNCLEAR}: the middle half of the rounds is wider than {100 * WIDEST:.0f} % of the "
        "median: run more --rounds, or measure when the machine is quiet"
    ]
