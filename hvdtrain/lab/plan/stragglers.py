"""Synchronous steps wait for the slowest of N workers: how much longer, going by measured steps."""

from __future__ import annotations

import math
from collections.abc import Sequence


def expected_maximum(values: Sequence[float], draws: int) -> float:
    """The expected maximum of so many independent draws from the measured values themselves.

    With m values in order, the i-th is the maximum with probability (i/m)^N - ((i-1)/m)^N (the
    empirical distribution: H. A. David, H. N. Nagaraja, "Order Statistics", 2003, chapter 2).
    Nothing is assumed of a distribution's tail, so it never exceeds the largest value: with N well
    above m it is a lower bound.
    """
    count = len(values)
    return math.fsum(
        value * ((place / count) ** draws - ((place - 1) / count) ** draws)
        for place, value in enumerate(sorted(values), start=1)
    )


def slowdown(step_times_s: Sequence[float], workers: int) -> float:
    """By what factor N workers are slower than the mean of one; 1 where nothing was measured."""
    if not step_times_s:
        return 1.0
    mean = math.fsum(step_times_s) / len(step_times_s)
    return max(expected_maximum(step_times_s, workers) / mean, 1.0)
