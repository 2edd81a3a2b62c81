"""Ratios between contestants, and the tables of benches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """The spread of a ratio between two contestants over all rounds."""

    median: float
    lowest: float
    lower_quartile: float
    upper_quartile: float
    highest: float

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


def ratio_within_rounds(rates: Sequence[float], to: Sequence[float]) -> Ratio | None:
    """Return the ratio over rounds in which neither failed; None without such a round."""
    ended = [pair for pair in zip(rates, to, strict=True) if not any(map(math.isnan, pair))]
    return ratio([rate for rate, _ in ended], [other for _, other in ended]) if ended else None


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
    rows = [["", "median", "middle half", "all"]]
    for name, quantiles in ratios.items():
        spread = f"{quantiles.lowest:.3f} to {quantiles.highest:.3f}"
        rows.append([f"ratio, {name}", f"{quantiles.median:.3f}", quantiles.middle_half, spread])
    return columns(rows)
