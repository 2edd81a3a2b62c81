"""What `hvdtrain launch` sets for speed and safety, unless the user has set it, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineSetting:
    """One environment variable."""

    name: str
    value: str
    why: str


def settings_for(
    controller: str, environment: Mapping[str, str], watchdog_timeout_s: float, ours: bool
) -> list[EngineSetting]:
    """The settings of a job. `ours`: its workers are `hvdtrain train`, which sets its own."""
    stall_s = str(max(1, round(watchdog_timeout_s)))
    found = [
        EngineSetting(
            "HOROVOD_FUSION_THRESHOLD",
            "0",
            "each tensor by itself: runs repeat, and it is the fastest on few workers",
        ),
    ]
    if controller == "mpi":
        found.append(
            EngineSetting(
                "OMPI_MCA_mpi_yield_when_idle",
                "1",
                "Open MPI spins while it waits, which takes compute time from full cores",
            )
        )
    if not ours:
        found += [
            EngineSetting(
                "HOROVOD_STALL_CHECK_TIME_SECONDS",
                str(max(1, min(60, round(watchdog_timeout_s / 2)))),
                "Horovod warns when some ranks wait for others",
            ),
            EngineSetting(
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
                stall_s,
                "and ends the job, as --watchdog-timeout-s says",
            ),
        ]
    return [setting for setting in found if setting.name not in environment]
