"""Buffers that forward passes change: each rank has its own, all save those of rank 0."""

from __future__ import annotations

import copy

import torch
from torch import nn

from hvdtrain.exchange import SingleProcess
from hvdtrain.train.worker_state import differing_buffers, with_buffers_of_rank_0
from tests.unit.threads import connect, run_ranks


class Codes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("codes", torch.zeros(2, 2))
        self.register_buffer("late", None)


def of_rank(rank: int, same: bool) -> Codes:
    """A model whose statistics, codes and late buffer differ, unless all are the same."""
    model = Codes()
    if not same:
        model.norm.running_mean += rank
        model.norm.num_batches_tracked += rank
        model.codes += 10 * rank + torch.arange(4.0).view(2, 2)
        model.late = torch.full((rank + 1,), float(rank)) if rank else None
    return model


def test_all_have_the_buffers_of_rank_0_within_the_context() -> None:
    """Fails if a rank evaluates or saves other codes than rank 0, or trains on with them; or if
    statistics, which are averaged, are replaced.
    """
    for same in (False, True):
        models = [of_rank(rank, same) for rank in range(3)]
        before = copy.deepcopy(models)

        def work(exchange, models=models, before=before, same=same) -> list[str]:
            model = models[exchange.rank]
            names = differing_buffers(model, exchange)
            with with_buffers_of_rank_0(model, exchange):
                assert torch.equal(model.codes, before[0].codes) and model.late is None
                assert torch.equal(model.norm.running_mean, before[exchange.rank].norm.running_mean)
                model.codes += 0 if same else 5  # within the context alone
            return names

        for names in run_ranks(connect(3), work):
            assert names == ([] if same else ["codes", "late"])
        for model, own in zip(models, before, strict=True):
            assert torch.equal(model.codes, own.codes)
            assert (model.late is None) == (own.late is None)
            assert model.late is None or torch.equal(model.late, own.late)


def test_one_process_has_nothing_to_compare() -> None:
    """Fails if a single process hashes its buffers."""
    assert differing_buffers(of_rank(1, same=False), SingleProcess()) == []
