"""Copies of a live run in the memory of rank 0's host and of one other, its partner.

    rank 0:   state, records and progress --> memory of its host
                      |  broadcast
    partner:  state   +---------------------> memory of its host

Every rank has the same model and optimizer, so they do not travel. A restart copies the newest one
to rank 0's disk (hvdtrain/run/recall.py).
"""

import os
import socket
from pathlib import Path
from typing import Any

from hvdtrain.exchange import Exchange
from hvdtrain.log import say
from hvdtrain.pulse import MEMORY_DIR
from hvdtrain.records.folders import run_id_of
from hvdtrain.records.ledger import Ledger
from hvdtrain.records.memory_copy import Additions, MemoryCopy
from hvdtrain.train.checkpoint import Snapshot


class RunMemory:
    """The copies of a run, on every rank; only rank 0 and its partner, if any, have one each."""

    def __init__(self, exchange: Exchange, run: Path, copy: MemoryCopy | None) -> None:
        """`run`: the folder of the run, which only rank 0 reads. `copy`: that of this host."""
        self._exchange, self._copy, self._trace = exchange, copy, None
        self._additions = Additions(run)

    @property
    def is_partner(self) -> bool:
        """Return whether this rank, which is not rank 0, has a copy."""
        return self._copy is not None and self._exchange.rank > 0

    def share(self, progress: dict[str, Any]) -> dict[str, Any]:
        """Collective: return the progress of rank 0, and add to the records of each copy; call
        before the state is captured.
        """
        additions = self._additions.take() if self._exchange.rank == 0 else []
        progress, additions = self._exchange.broadcast_object(
            (progress, additions), "hvdtrain.memory.records"
        )
        self._trace = progress["trace"]
        if self._copy is not None:
            self._copy.add(additions)
        return progress

    def save(self, snapshot: Snapshot | None, on_disk: bool) -> None:
        """Write a checkpoint to the copy of this host, if any, in the background; not on rank 0 if
        it is written to its disk.
        """
        is_due = self.is_partner or not on_disk
        if self._copy is not None and snapshot is not None and is_due:
            self._copy.save(snapshot, self._trace)

    def wait(self) -> None:
        """Wait until the last checkpoint is written."""
        if self._copy is not None:
            self._copy.wait()

    def remove(self) -> None:
        """Remove the copies, of a run that has finished."""
        if self._copy is not None:
            self._copy.remove()


def open_memory(interval: int, run: Path, exchange: Exchange, ledger: Ledger) -> RunMemory | None:
    """Collective: return the copies of a run, to be made every `interval` steps; None where that
    is 0 or the launcher gives no memory, which is printed. `run`: the folder of the run.
    """
    if not interval:
        return None
    here = socket.gethostname(), os.environ.get(MEMORY_DIR)
    hosts, roots = zip(*exchange.all_gather_object(here, "hvdtrain.memory.hosts"), strict=True)
    if roots[0] is None:
        if exchange.rank == 0:
            say(
                f"--memory-interval={interval}: has no effect, as memory is kept for the restarts "
                f"of `hvdtrain launch --restarts` ({MEMORY_DIR} is not set)"
            )
        return None
    others = (rank for rank, host in enumerate(hosts) if host != hosts[0] and roots[rank])
    partner = next(others, None)
    of_rank_0 = (run_id_of(run), ledger.takeaway) if exchange.rank == 0 else None
    run_id, takeaway = exchange.broadcast_object(of_rank_0, "hvdtrain.memory.run")
    if exchange.rank == 0:
        second = "" if partner is None else f" and {hosts[partner]}"
        say(f"memory: the state of every step {interval} on {hosts[0]}{second}")
    root, copy = roots[exchange.rank], None
    if root is not None and exchange.rank in (0, partner):
        copy = MemoryCopy(Path(root, run.name), run_id, takeaway)
    return RunMemory(exchange, run, copy)
