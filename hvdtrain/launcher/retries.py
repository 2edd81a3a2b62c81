"""The restarts of a job after failures: how many, after which pause, and when to give up."""

from dataclasses import dataclass

from hvdtrain.launcher.verdict import JobOutcome

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # doubled from start to start
FRUITLESS = 3  # consecutive starts without progress after which the job is given up
LASTING_S = 600.0  # a start of a script that reports no steps counts as progress after this long


@dataclass
class Retries:
    """The restarts of a job after failures, and the pauses before them."""

    most: int
    failures: int = 0
    pause_s: float = 0.0  # before the next start; none after a start that has made progress
    furthest: int = 0  # step of all starts so far
    _fruitless: int = 0

    @property
    def are_used_up(self) -> bool:
        return self.failures == self.most

    def note(self, outcome: JobOutcome, lasted_s: float) -> str | None:
        """Take the outcome of a start; return the reason if the job is to be given up."""
        has_lasted = not outcome.steps and lasted_s > LASTING_S
        progress = outcome.steps > self.furthest or has_lasted
        self.furthest = max(self.furthest, outcome.steps)
        if outcome.regroups:
            return None
        self.failures += 1
        self._fruitless = 0 if progress else self._fruitless + 1
        pause_s = min(max(FIRST_PAUSE_S, self.pause_s * 2), LONGEST_PAUSE_S)
        self.pause_s = 0.0 if progress else pause_s
        if self._fruitless < FRUITLESS:
            return None
        text = f"{FRUITLESS} starts in a row made no progress past step {self.furthest}"
        return f"{text}: given up"
