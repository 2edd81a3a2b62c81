"""Profiles of a range of training steps: of torch on every rank, and of Horovod."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import cuda
from torch.profiler import ProfilerActivity, profile

from hvdtrain.errors import TrainingError
from hvdtrain.exchange import Exchange


@dataclass
class StepProfiler:
    """A profiler of a range of steps: torch's on every rank, and Horovod's timeline.

    Both can be opened in chrome://tracing and https://ui.perfetto.dev.
    """

    steps: tuple[int, int] | None  # first and last, counted from 1; None: no profile
    folder: Path  # receives rank-N.json of every rank, and timeline.json of rank 0
    exchange: Exchange
    _profile: profile | None = None

    def begin(self, step: int) -> None:
        """Start the profile if `step` is in the range; call before each step."""
        due = self.steps is not None and self.steps[0] <= step <= self.steps[1]
        if not due or self._profile is not None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrainingError(f"--profile: {self.folder}: {error.strerror}") from error
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] if cuda.is_available() else []
        self._profile = profile(activities=activities)
        self._profile.start()
        self.exchange.start_timeline(self.folder / "timeline.json")

    def end(self, step: int) -> None:
        """Write the profile at the end of the range; call after each step."""
        if self.steps is not None and step >= self.steps[1]:
            self.close()

    def close(self) -> None:
        """Stop the profile and write it. Further calls have no effect."""
        if self._profile is None:
            return
        done, self._profile, self.steps = self._profile, None, None
        self.exchange.stop_timeline()
        done.stop()
        done.export_chrome_trace(str(self.folder / f"rank-{self.exchange.rank}.json"))
