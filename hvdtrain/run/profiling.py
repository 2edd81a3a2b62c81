"""Profiles of a few steps: torch's profiler on every rank, and Horovod's timeline.

Both can be opened in chrome://tracing and https://ui.perfetto.dev.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from hvdtrain.errors import TrainingError
from hvdtrain.exchange import Exchange


class StepProfiler:
    """A profiler of a range of steps."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path, exchange: Exchange) -> None:
        """`steps`: first and last step, counted from 1; None: no profile.

        `folder`: receives rank-N.json of every rank, and timeline.json of rank 0.
        """
        self._steps = steps
        self._folder = folder
        self._exchange = exchange
        self._profile: profile | None = None

    def begin(self, step: int) -> None:
        """Start the profile if `step` is in the range; call before each step."""
        if self._steps is None or self._profile is not None:
            return
        if not self._steps[0] <= step <= self._steps[1]:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrainingError(f"--profile: {self._folder}: {error.strerror}") from error
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile = profile(activities=activities)
        self._profile.start()
        self._exchange.start_timeline(self._folder / "timeline.json")

    def end(self, step: int) -> None:
        """Write the profile at the end of the range; call after each step."""
        if self._steps is not None and step >= self._steps[1]:
            self.close()

    def close(self) -> None:
        """Stop the profile and write it. Further calls have no effect."""
        if self._profile is None:
            return
        done, self._profile, self._steps = self._profile, None, None
        self._exchange.stop_timeline()
        done.stop()
        done.export_chrome_trace(str(self._folder / f"rank-{self._exchange.rank}.json"))
