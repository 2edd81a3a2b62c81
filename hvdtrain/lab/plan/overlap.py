"""One step: gradients become ready during the backward pass, and travel as soon as they may.

    forward | backward ---------------------------|        | update
                  ^ready  ^ready ^ready           ^ready
            |     |  exchange  | exchange ...  | exchange |   one at a time

As in Horovod (`BackgroundThreadLoop` and `RunLoopOnce` in its operations.cc, `FuseResponses` in
its controller.cc): a thread wakes up at most once a cycle, agrees with the other ranks on the
tensors that are ready on all of them, and reduces these, in their order, neighbours together in a
buffer as long as they fit. What becomes ready meanwhile waits for the next cycle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hvdtrain.lab.plan.profiles import Gradient


@dataclass(frozen=True)
class Queue:
    """How gradients are taken together."""

    cycle_s: float = 0.001  # HOROVOD_CYCLE_TIME's default
    fusion_bytes: int = 0  # 0: each tensor by itself, as hvdtrain trains


@dataclass(frozen=True)
class Exchanged:
    """What became of a step's gradients."""

    end_s: float  # from the beginning of the backward pass
    busy_s: float  # spent on exchanges and agreements
    exchanges: int


def exchange(
    gradients: Sequence[Gradient],
    cost: Callable[[float], float],
    queue: Queue,
    negotiation_s: float,
) -> Exchanged:
    """`gradients`: in the order in which they become ready. `cost`: bytes to seconds."""
    now, end, busy, exchanges, done = 0.0, 0.0, 0.0, 0, 0
    while done < len(gradients):
        now = _next_wake_up(now, gradients[done].ready_s, queue.cycle_s)
        ready = [g for g in gradients[done:] if g.ready_s <= now]
        buffers = [cost(size) for size in fuse([g.size_bytes for g in ready], queue.fusion_bytes)]
        spent = negotiation_s + math.fsum(buffers)
        end, busy = now + spent, busy + spent
        now = max(end, now + queue.cycle_s)
        done, exchanges = done + len(ready), exchanges + len(buffers)
    return Exchanged(end, busy, exchanges)


def _next_wake_up(now: float, ready_s: float, cycle_s: float) -> float:
    """The first of now, now + cycle, now + 2 cycles, ... at which something is ready."""
    if ready_s <= now:
        return now
    if cycle_s == 0:
        return ready_s
    wake_up = now + math.ceil((ready_s - now) / cycle_s) * cycle_s
    return max(wake_up, ready_s)  # rounding must not leave it asleep


def fuse(sizes: Sequence[float], limit_bytes: int) -> Iterator[float]:
    """Sizes of the buffers: neighbours share one up to the limit; what is larger goes alone."""
    filled = 0.0
    for size in sizes:
        if filled and filled + size > limit_bytes:
            yield filled
            filled = 0.0
        filled += size
    if filled:
        yield filled
