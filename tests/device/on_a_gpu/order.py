"""Collective: whether a reduction reads, or returns, values before the GPU has computed them."""

from __future__ import annotations

import sys

import torch

from hvdtrain.exchange.horovod import HorovodExchange

TURNS = 60


def main() -> None:
    """Collective: reduce values at once that take tens of milliseconds; exit with 1 if wrong."""
    device = torch.device(sys.argv[1])
    exchange = HorovodExchange()
    on_gpu = device.type == "cuda"
    load = torch.randn(*(2 * [4096 if on_gpu else 64]), device=device)
    wrong = 0
    for turn in range(TURNS):
        length = (1 << 10, 1 << 20, 1 << 25)[turn % 3] if on_gpu else 1 << 10
        values = torch.zeros(length, device=device)
        for _ in range(20):  # tens of milliseconds of work before the values exist
            load = (load @ load).clamp(-1, 1)
        values += 0 * load.sum().nan_to_num()
        values += turn + 1
        pending = exchange.begin_reduction(values, "sum", f"order.{turn % 3}")
        load = (load @ load).clamp(-1, 1)  # goes on meanwhile
        total = pending.wait()
        seen = total.clone()  # on the stream of this thread, without a synchronisation
        total.zero_()  # the next work may use the memory at once
        wrong += int((seen != (turn + 1) * exchange.size).sum())
    exchange.close()
    if wrong:
        sys.exit(f"{wrong} elements were wrong")
    print("no element was wrong", flush=True)


if __name__ == "__main__":
    main()
