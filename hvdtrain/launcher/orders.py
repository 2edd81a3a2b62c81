"""What the agents of one job must know. It reaches each host in a file that its user alone can
read, so that neither the user's environment nor the job's secret shows on a command line.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
from dataclasses import asdict, dataclass

from hvdtrain.errors import PreflightError
from hvdtrain.launcher.doctor.tickets import read_ticket


@dataclass(frozen=True)
class Orders:
    """One job's."""

    token: str  # shared by the launcher and the agents
    command: list[str]  # of a worker
    folder: str  # in which it runs
    environment: dict[str, str]  # the user's, where launch was called

    @property
    def ring_token(self) -> str:
        """The workers' secret: it does not give away the job's own."""
        return hmac.new(self.token.encode(), b"ring", hashlib.sha256).hexdigest()

    def as_text(self) -> str:
        return json.dumps(asdict(self))


def read_orders(job: str) -> tuple[Orders, tuple[str, int]]:
    """This host's orders, and where the launcher listens. Raises PreflightError without them."""
    found = read_ticket(job)
    if found is None:
        raise PreflightError(
            f"job {job} has left no orders on {socket.gethostname()}. Agents are started by "
            "`hvdtrain launch` alone"
        )
    fields = json.loads(found["ticket"])
    address, port = found["channel"]
    return Orders(**fields), (address, port)
