"""Collective: every kind of reduction that hvdtrain makes, on a device, against known results."""

from __future__ import annotations

import sys

import torch

from hvdtrain.exchange.horovod import HorovodExchange

LENGTHS = (1, 3, 1000, 3_000_001)
TYPES = (torch.int32, torch.int64, torch.float32, torch.float64, torch.float16)


def expect(name: str, found: torch.Tensor, wanted: torch.Tensor, device: torch.device) -> None:
    """Exit with the name where a result lies on another device, or is wrong."""
    if found.device.type != device.type or not torch.equal(found.cpu(), wanted.cpu()):
        sys.exit(f"{name}: found {found}, expected {wanted}")


def main() -> None:
    """Collective: reduce, on the device of the first argument; exit with 1 at a wrong result."""
    device = torch.device(sys.argv[1])
    exchange = HorovodExchange()
    rank, size = exchange.rank, exchange.size
    for length in LENGTHS:
        for dtype in TYPES:
            # float16 has 11 bits: these sums are exact.
            base = torch.arange(length) % (16 if dtype == torch.float16 else 1000)
            own = (base + rank).to(device, dtype)
            name = f"{dtype}.{length}"
            total = exchange.sum_later(own, f"sum.{name}")()
            expect(f"sum {name}", total, (base * size + sum(range(size))).to(dtype), device)
            if not dtype.is_floating_point:
                most = exchange.begin_reduction(own.clone(), "max", f"max.{name}").wait()
                expect(f"max {name}", most, (base + size - 1).to(dtype), device)
    edge = torch.full((7,), (2**30 - 1) // size, dtype=torch.int32, device=device)
    expect("int32 near its limit", exchange.sum_later(edge, "edge")(), edge * size, device)
    if device.type == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):
            late = torch.zeros(1 << 24, device=device)
            for _ in range(50):
                late += 1
            wanted = torch.full((1 << 24,), 50.0 * size)
            expect("another stream", exchange.sum_later(late, "stream")(), wanted, device)
    exchange.close()
    print(f"done on rank {rank}", flush=True)


if __name__ == "__main__":
    main()
