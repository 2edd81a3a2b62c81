"""Notices a collective that never ends, because another rank has stopped for good.

Horovod's own stall inspector ends a job when some ranks have asked for a collective and others have
not. It runs in threads that speak to all ranks in every cycle: where a whole process has stopped
(SIGSTOP, a frozen virtual machine), these wait too, over Open MPI for ever. So the same limit, the
user's HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, is kept here once more, by a thread of each process.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from hvdtrain.errors import PeerFailure

LIMIT = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
WARNING = "HOROVOD_STALL_CHECK_TIME_SECONDS"
TRAIN_LIMIT_S = 1800  # of `train`: others may load or save for long while a rank waits for them
_DEFAULT_WARNING_S = 60.0  # Horovod's own
_LOOK_S = 0.5

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class StallWatch:
    """Knows for how long this process has been waiting in the collective that it is in."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def begin(self) -> float | None:
        """A collective begins. Returns what `end` needs."""
        before, self._since_s = self._since_s, time.monotonic()
        return before

    def end(self, before: float | None) -> None:
        """It has ended, perhaps within another one."""
        self._since_s = None if before is None else time.monotonic()

    def start(
        self, give_up: Callable[[PeerFailure], None], environment: Mapping[str, str] = os.environ
    ) -> None:
        """Call `give_up`, in a thread, when a collective lasts longer than the limit of
        `environment`; without a limit, never.
        """
        limit_s = _seconds(environment, LIMIT, 0.0)
        if limit_s <= 0 or environment.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
            return
        # Horovod, which can name the ranks, looks once in so long, and up to three times: first.
        patience_s = limit_s + 3 * _seconds(environment, WARNING, _DEFAULT_WARNING_S)

        def watch() -> None:
            while (since_s := self._since_s) is None or time.monotonic() - since_s < patience_s:
                time.sleep(_LOOK_S)
            give_up(
                PeerFailure(
                    f"nothing has come from the other ranks for {patience_s:g} s "
                    f"({LIMIT}={limit_s:g}): one of them has stopped, or its host is frozen"
                )
            )

        threading.Thread(target=watch, name="stall-watch", daemon=True).start()


def waits(
    method: Callable[Concatenate[Any, Parameters], Result],
) -> Callable[Concatenate[Any, Parameters], Result]:
    """Decorate a method that waits for other ranks: its object's `stalls` counts the time in it."""

    @functools.wraps(method)
    def counted(self: Any, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        before = self.stalls.begin()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.stalls.end(before)

    return counted


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name, "")
    return float(text) if text.isdigit() else default
