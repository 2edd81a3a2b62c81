"""Tasks for `--task tests.parallel.tasks:NAME`."""

from __future__ import annotations

import torch

from hvdtrain import Splits, Sums, Task, TensorSplit


class Noisy(TensorSplit):
    """Replaces one token of each sequence at random, by torch's own generator."""

    def batch(self, indices, epoch=0):
        tokens = super().batch(indices, epoch)[0].clone()
        tokens[:, 0] = torch.randint(0, 8, (len(tokens),))
        return tokens, tokens


class Tokens(Task):
    """Sequences of 1 to 9 tokens, padded with -1: the loss is the mean over all tokens."""

    metrics = ("right",)
    counts_samples = False

    def build_data(self) -> Splits:
        generator = torch.Generator().manual_seed(4)
        tokens = torch.randint(0, 8, (170, 9), generator=generator)
        lengths = torch.randint(1, 10, (170, 1), generator=generator)
        tokens[torch.arange(9) >= lengths] = -1
        train, valid = (Noisy(part, part) for part in (tokens[:133], tokens[133:]))
        return Splits("tokens", train, valid)

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Embedding(8, 6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 8)
        )

    def loss(self, model, batch) -> Sums:
        tokens = batch[0]
        known, wanted = tokens[:, :-1].clamp(min=0), tokens[:, 1:]
        is_token = wanted >= 0
        scores, wanted = model(known)[is_token], wanted[is_token]
        loss = torch.nn.functional.cross_entropy(scores, wanted, reduction="sum")
        return Sums(loss, len(wanted), {"right": (scores.argmax(-1) == wanted).sum()})
