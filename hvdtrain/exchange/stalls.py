"""Detection of a collective that never ends because another rank has stopped.

Horovod's own stall inspector ends a job when some ranks have submitted a collective and others have
not. It runs in threads that communicate with all ranks in every cycle: if a whole process has
stopped (SIGSTOP, a frozen virtual machine), these wait too, over Open MPI forever. So a thread of
each process here enforces the same limit, the user's HOROVOD_STALL_SHUTDOWN_TIME_SECONDS.
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
TRAIN_LIMIT_S = 1800  # default of `train`; others may load or save for long while a rank waits
_DEFAULT_WARNING_S = 60.0  # Horovod's own
_LOOK_S = 0.5

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class StallWatch:
    """The time that this process has been waiting in its current collective."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def begin(self) -> float | None:
        """Record the start of a collective. Returns the argument for `end`."""
        before, self._since_s = self._since_s, time.monotonic()
        return before

    def end(self, before: float | None) -> None:
        """Record the end of a collective; `before`: from `begin`, not None inside another one."""
        self._since_s = None if before is None else time.monotonic()

    def start(
        self, give_up: Callable[[PeerFailure], None], environment: Mapping[str, str] = os.environ
    ) -> None:
        """Call `give_up`, in a thread, when a collective exceeds the limit of `environment`.

        Without a limit nothing is watched.
        """
        limit_s = _seconds(environment, LIMIT, 0.0)
        if limit_s <= 0 or environment.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
            return
        # Leave Horovod, which can name the ranks, time for its up to three periodic checks.
        patience_s = limit_s + 3 * _seconds(environment, WARNING, _DEFAULT_WARNING_S)

        def watch() -> None:
            while (since_s := self._since_s) is None or time.monotonic() - since_s < patience_s:
                time.sleep(_LOOK_S)
            give_up(
                PeerFailure(
                    f"nothing was received from the other ranks for {patience_s:g} s "
                    f"({LIMIT}={limit_s:g}): one of them has stopped, or its host is frozen"
                )
            )

        threading.Thread(target=watch, name="stall-watch", daemon=True).start()


def waits(
    method: Callable[Concatenate[Any, Parameters], Result],
) -> Callable[Concatenate[Any, Parameters], Result]:
    """Decorate a method that waits for other ranks, so that its object's `stalls` times it."""

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
