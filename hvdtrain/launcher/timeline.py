"""Where the time from a failure to the first new step goes, in the launcher's own clock.

    failure, noticed, ended, paused, checked, started, imported, joined, loaded, caught up

Each moment counts once all ranks have reached it. A start that fails again before it has caught up
is counted as `earlier starts` of the same recovery.
"""

import time
from collections.abc import Sequence

from hvdtrain.launcher.ranks import Rank
from hvdtrain.pulse import BEGUN

BACK = "back after"  # the beginning of the line


class Timeline:
    """The recovery of a job, from a failure until it makes new steps."""

    def __init__(self) -> None:
        self._since_s: float | None = None  # None: no recovery is in progress
        self._last_s = 0.0
        self._parts: dict[str, float] = {}

    def fail(self, since_s: float, noticed_s: float) -> None:
        """Begin at a failure of this time, or count what was done since an earlier one."""
        if self._since_s is None:
            self._since_s, self._last_s = since_s, since_s
            self._parts = {}
        else:
            self._parts = {"earlier starts": since_s - self._since_s}
            self._last_s = since_s
        self.pass_("noticed", noticed_s)

    def pass_(self, moment: str, now_s: float | None = None) -> None:
        """Record that a moment is reached, unless it is recorded or no recovery is in progress."""
        if self._since_s is not None and moment not in self._parts:
            now_s = time.monotonic() if now_s is None else now_s
            self._parts[moment], self._last_s = now_s - self._last_s, now_s

    def follow(self, ranks: Sequence[Rank], furthest: int) -> str:
        """Record the moments that the ranks have reached; return the line for the last one, once.

        `furthest`: the last step of the starts before.
        """
        if self._since_s is None:
            return ""
        moments = {
            "started": all(rank.state != "waiting" for rank in ranks),
            "imported": all(rank.speaks for rank in ranks),
            "joined": all(rank.phase != BEGUN for rank in ranks),
            "loaded": not any(rank.is_preparing for rank in ranks),
            "caught up": max(rank.step for rank in ranks) > furthest,
        }
        for moment, is_reached in moments.items():
            if not is_reached:
                return ""
            self.pass_(moment)
        total_s, self._since_s = self._last_s - self._since_s, None
        parts = (f"{moment} {seconds:.1f}" for moment, seconds in self._parts.items())
        return f"{BACK} {total_s:.1f} s: {', '.join(parts)}"
