"""A small causal Transformer that learns Python source text, character by character.

    hvdtrain launch -np 2 -- train --task examples.language_model:BatchFirst --opt adamw --lr 0.003

`BatchSecond` learns the same with the batch in dimension 1, as recurrent and older Transformer code
has it: only data and loss need to know. `WithDropout` is for `--virtual-workers`.
"""

from __future__ import annotations

import bisect
import heapq
import inspect
import string
import textwrap

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hvdtrain import Splits, Sums, Task

SOURCES = (bisect, heapq, string, textwrap)  # of Python's library
CONTEXT = 32  # characters that are predicted at a time, each from those before it
CHARACTERS = 128  # of ASCII; others are shown as "?"
WIDTH, HEADS, LAYERS = 32, 2, 2


class Windows:
    """A text in windows that do not overlap, as a `Split`."""

    def __init__(self, text: bytes, batch_dimension: int) -> None:
        codes = torch.tensor(list(text))
        self.windows = codes[: len(codes) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
        self.batch_dimension = batch_dimension

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, indices, epoch: int = 0) -> torch.Tensor:
        chosen = self.windows[torch.from_numpy(indices)]
        return chosen if self.batch_dimension == 0 else chosen.t().contiguous()


class CharacterModel(nn.Module):
    """The scores of the next character at each place."""

    def __init__(self, batch_dimension: int, dropout: float) -> None:
        super().__init__()
        self.batch_dimension = batch_dimension
        self.characters = nn.Embedding(CHARACTERS, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout, batch_first=batch_dimension == 0
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CHARACTERS)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        inputs = self.characters(codes) + self.places.weight.unsqueeze(self.batch_dimension)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, inputs.device, inputs.dtype)
        return self.head(self.encoder(inputs, mask=mask, is_causal=True))


class BatchFirst(Task):
    metrics = ("accuracy",)
    batch_dimension = 0  # tensors of shape (batch, place)
    dropout = 0.0

    def build_data(self) -> Splits:
        text = "".join(inspect.getsource(module) for module in SOURCES).encode("ascii", "replace")
        cut = len(text) * 9 // 10  # by position, so that no valid text is among the train text
        train, valid = (Windows(part, self.batch_dimension) for part in (text[:cut], text[cut:]))
        return Splits("python-source", train, valid, f"{CONTEXT} characters each")

    def build_model(self) -> nn.Module:
        return CharacterModel(self.batch_dimension, self.dropout)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> Sums:
        """A sequence's loss is the mean over its characters; the sum is over sequences.

        Where sequences differ in length, count characters: `counts_samples = False`, sums over
        them, and their number as `Sums.samples`.
        """
        time = 1 - self.batch_dimension
        inputs, wanted = batch.narrow(time, 0, CONTEXT), batch.narrow(time, 1, CONTEXT).flatten()
        scores = model(inputs).flatten(0, 1)
        loss = cross_entropy(scores, wanted, reduction="sum") / CONTEXT
        right = (scores.detach().argmax(dim=1) == wanted).sum() / CONTEXT
        return Sums(loss, batch.shape[self.batch_dimension], {"accuracy": right})


class BatchSecond(BatchFirst):
    batch_dimension = 1  # tensors of shape (place, batch)


class WithDropout(BatchFirst):
    dropout = 0.1
