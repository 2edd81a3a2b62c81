"""Jobs of several hosts without SSH: the same `hvdtrain launch --nnodes N` on each host, a node.

                  node rank 0                                     other nodes
    horovodrun, checks -- shell (named `ssh`) --> hub <-- TCP --> node -- pipes --> command

What SSH would run on a host, a node runs: each command is started by a message over the node's one
connection to node rank 0, which carries its input and output and its exit code. All else, from the
checks to restarts, is as over SSH.

hub      the end at node rank 0: who may join, and messages from shells to nodes and back
node     the other nodes' end
shell    the program that stands for ssh at node rank 0
"""

import hashlib
import os
import secrets
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

from hvdtrain import __version__
from hvdtrain.launcher.protocol import Message

SECRET = "HVDTRAIN_RENDEZVOUS_SECRET"  # environment variable
# Environment variable of what a node runs: the address by which it reaches node rank 0.
FIRST_NODE = "HVDTRAIN_FIRST_NODE"
NO_CONNECTION = "hvdtrain: node rank"  # what a shell's line on a missing node begins with
MOST_SHOWN = 300  # characters of a command
CODING = "latin-1"  # of bytes within a message


def own_secret() -> str:
    """Return a secret of this user on this machine; made at the first call. Raises OSError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "hvdtrain" / "rendezvous-secret"
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError), NamedTemporaryFile("w", dir=path.parent) as file:  # mode 0600
        file.write(secrets.token_hex(32))
        file.flush()
        os.link(file.name, path)
    return path.read_text("ascii")


@dataclass(frozen=True)
class Rendezvous:
    """Where the nodes of a job meet, and which of them this is."""

    nodes: int
    rank: int
    host: str  # of node rank 0, as the others reach it
    port: int
    secret: str
    slots: int  # workers of each node
    command: tuple[str, ...] = ()  # what the user typed after `--`

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def job(self) -> Message:
        """Return what must be the same on all nodes, by its name in messages."""
        return {
            "hvdtrain": __version__,
            "--nnodes": self.nodes,
            "workers of each node (--nproc-per-node)": self.slots,
            "command": _shortened(shlex.join(self.command)),
        }


def _shortened(text: str) -> str:
    """Return a long text as its beginning and a digest of all of it: greetings have a limit."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... (sha256 {digest})"
