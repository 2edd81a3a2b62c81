"""Sums over ranks whose derivatives, of any order, are sums over ranks too."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.exchange import Exchange


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks, collective in both passes: y = sum_r x_r, so dL/dx_r = sum_s dL_s/dy."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, exchange: Exchange, name: str) -> torch.Tensor:
        ctx.exchange, ctx.name = exchange, name
        return exchange.sum_later(values.clone(), name)()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return summed(gradient.contiguous(), ctx.exchange, f"{ctx.name}.backward"), None, None


def summed(
    values: torch.Tensor, exchange: Exchange, name: str, counts: bool = True
) -> torch.Tensor:
    """Collective: return the sum over ranks. Each derivative of it is a collective as well.

    `counts`: False: this rank computes with a sample that stands in for none, so its derivatives
    are zero for all ranks; it takes part in their sums, as the others wait for it.
    """
    total: torch.Tensor = _SumOverRanks.apply(values, exchange, name)  # type: ignore[no-untyped-call]
    return total if counts else total.detach() + total * 0.0
