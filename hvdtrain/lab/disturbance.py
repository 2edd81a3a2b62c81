"""How much else a machine did while it was measured."""

import os
from pathlib import Path
from typing import Any

STAT = Path("/proc/stat")
STEAL = 7  # its field in the line of all cores: time in which the hypervisor ran something else


class Disturbance:
    """What disturbs a measurement: the load before its start, and time stolen from its cores."""

    def __init__(self) -> None:
        self.load = os.getloadavg()[0]  # of the minute before
        self._before = _ticks()

    def content(self) -> dict[str, Any]:
        """Return the figures up to now, for JSON."""
        spent = [now - then for now, then in zip(_ticks(), self._before, strict=True)]
        stolen = spent[STEAL] / max(1, sum(spent))
        return {"load_before": self.load, "stolen": stolen, "cores": os.cpu_count()}

    def line(self) -> str:
        """Return the figures up to now as a line of text."""
        content = self.content()
        return (
            f"machine: {content['cores']} cores, load {self.load:.2f} in the minute before; "
            f"{100 * content['stolen']:.1f} % of their time went to other virtual machines"
        )


def _ticks() -> list[int]:
    """Return the time of all cores since the machine's start, by use; guests' is in users'."""
    fields = STAT.read_text().splitlines()[0].split()[1:9]
    return [int(field) for field in fields]
