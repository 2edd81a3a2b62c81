"""Many ranks in one thread, and a trace of their messages as a picture and as a table.

`python -m tests.ring_trace 3` prints those of docs/ring.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hvdtrain.errors import TransportError
from hvdtrain.ring.algorithm import (
    Transfer,
    Transfers,
    all_reduce_transfers,
    broadcast_transfers,
    flatten,
)
from hvdtrain.ring.operations import Array, finish, reduction, split_evenly

MOST_RANKS = 62  # one bit of an int64 per rank
PHASES = ("reduce-scatter", "all-gather")
Watch = Callable[[Sequence[Transfer]], object]


def run_in_step(positions: Sequence[Transfers], watch: Watch | None = None) -> None:
    """Run one generator for each position of a ring; position p sends to p + 1.

    `watch` is called at each step with the transfers of all positions, before the messages are
    delivered. Raises TransportError when the lengths of a message and of its incoming array differ,
    and ValueError when the generators do not yield the same number of transfers.
    """
    with np.errstate(all="ignore"):
        for transfers in zip(*positions, strict=True):
            if watch:
                watch(transfers)
            _deliver(transfers)


def _deliver(transfers: Sequence[Transfer]) -> None:
    outgoing = transfers[-1].outgoing
    for position, transfer in enumerate(transfers):
        if outgoing.size != transfer.incoming.size:
            raise TransportError(
                f"position {position} expects {transfer.incoming.size} elements and is sent "
                f"{outgoing.size}"
            )
        transfer.incoming[...] = outgoing
        outgoing = transfer.outgoing
    for transfer in transfers:
        if transfer.meanwhile:
            transfer.meanwhile()


def simulate_all_reduce(
    values: Sequence[Array], op: str = "sum", watch: Watch | None = None
) -> list[Array]:
    """Return the result of `all_reduce` on every rank, in rank order, bit for bit as on real ranks.

    `values`: one array per rank, of the same shape and dtype; not changed.
    """
    size = len(values)
    reduce = reduction(op, values[0].dtype)
    results = [np.empty(one.shape, one.dtype) for one in values]
    segments = split_evenly(values[0].size, size)

    def close(total: Array) -> None:
        finish(op, total, size)

    ranks = [
        all_reduce_transfers(
            np.ascontiguousarray(one).reshape(-1), result.reshape(-1), segments, rank, reduce, close
        )
        for rank, (one, result) in enumerate(zip(values, results, strict=True))
    ]
    run_in_step(ranks, watch)
    return results


def simulate_broadcast(buffers: Sequence[Array], root: int, watch: Watch | None = None) -> None:
    """Copy the buffer of rank `root` into that of every rank, in place."""
    size = len(buffers)
    ranks = [
        broadcast_transfers(flatten(buffer, "buffer"), (rank - root) % size, size)
        for rank, buffer in enumerate(buffers)
    ]
    run_in_step([ranks[(root + place) % size] for place in range(size)], watch)


@dataclass(frozen=True)
class Message:
    """A segment sent at `step` (counted from 1), holding the sum over `ranks`."""

    step: int
    sender: int
    receiver: int
    segment: int
    ranks: frozenset[int]


def trace_all_reduce(size: int) -> list[Message]:
    """Return every message of one all-reduce over `size` ranks, by step and sender.

    Nothing is computed from a formula. The segment follows from the address of the message in
    memory, and the ranks summed in it from its value, as rank r contributes 2^r.
    Raises ValueError outside 1 to 62 ranks.
    """
    if not 1 <= size <= MOST_RANKS:
        raise ValueError(f"{size} ranks: a trace supports 1 to {MOST_RANKS}")
    messages: list[Message] = []

    def watch(transfers: Sequence[Transfer]) -> None:
        step = len(messages) // size + 1
        for sender, transfer in enumerate(transfers):
            (value,) = transfer.outgoing.tolist()  # one element per segment
            ranks = frozenset(rank for rank in range(size) if value >> rank & 1)
            segment = _place_of(transfer.outgoing)
            messages.append(Message(step, sender, (sender + 1) % size, segment, ranks))

    simulate_all_reduce([np.full(size, 1 << rank, np.int64) for rank in range(size)], watch=watch)
    return messages


def _place_of(view: Array) -> int:
    """Return the index of the first element of `view` in its base array."""
    whole = view.base
    assert isinstance(whole, np.ndarray)
    return int(view.ctypes.data - whole.ctypes.data) // view.itemsize


def draw_table(messages: Sequence[Message]) -> str:
    """Return a Markdown table of the messages, one row per step."""
    size = 1 + max(message.sender for message in messages)
    lines = ["| step | phase | " + " | ".join(f"rank {r} sends" for r in range(size)) + " |"]
    lines.append("|---" * (size + 2) + "|")
    for step in range(1, 1 + max(message.step for message in messages)):
        row = [message for message in messages if message.step == step]
        phase = PHASES[all(len(message.ranks) == size for message in row)]
        sent = [f"segment {m.segment} to rank {m.receiver}" for m in row]
        lines.append(f"| {step} | {phase} | " + " | ".join(sent) + " |")
    return "\n".join(lines)


def draw_picture(messages: Sequence[Message]) -> str:
    """Return a picture with the ranks summed in each segment of each rank, after each step.

    A segment that has just arrived is marked by `>`.
    """
    size = 1 + max(message.sender for message in messages)
    held = [[frozenset({rank})] * size for rank in range(size)]
    lines = [_draw_row("start", held, set())]
    for step in range(1, 1 + max(message.step for message in messages)):
        arrived = set()
        for message in (m for m in messages if m.step == step):
            held[message.receiver][message.segment] |= message.ranks
            arrived.add((message.receiver, message.segment))
        lines.append(_draw_row(f"step {step}", held, arrived))
    width = len(lines[0].split("  [")[1]) + 3
    heads = [f"rank {rank}".ljust(width) for rank in range(size)]
    return "\n".join([(" " * 9 + "".join(heads)).rstrip(), *lines])


def _draw_row(
    name: str, held: Sequence[Sequence[frozenset[int]]], arrived: set[tuple[int, int]]
) -> str:
    cells = []
    for rank, segments in enumerate(held):
        texts = [
            (">" if (rank, segment) in arrived else " ")
            + "+".join(map(str, sorted(ranks))).ljust(2 * len(held) - 1)
            for segment, ranks in enumerate(segments)
        ]
        cells.append("[" + " |".join(texts) + "]")
    return name.ljust(7) + "  " + "  ".join(cells)


def main() -> int:
    """Print the picture and the table for the number of ranks in `sys.argv`."""
    messages = trace_all_reduce(int(sys.argv[1]))
    sys.stdout.write(f"```\n{draw_picture(messages)}\n```\n\n{draw_table(messages)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
