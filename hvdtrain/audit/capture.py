"""The elements that an audit covers, in blocks, and the copies of their local gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch

# Elements compared at a time: their float64 arrays fit in a core's cache.
BLOCK_ELEMENTS = 1 << 16
PIECES_PER_PART = 4  # at least, if there are enough elements


class Piece(NamedTuple):
    """Adjacent elements of one parameter, counted in its flattened form."""

    parameter: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


class Parts:
    """A random division of the parameters into `parts` parts, different in every cycle of audits.

    It is the same on every rank: it depends only on the lengths, the seed and the audit's number.
    """

    def __init__(self, lengths: Sequence[int], parts: int, seed: int, uncut: bool) -> None:
        """Cut the parameters into pieces that cover every element once.

        `lengths`: number of elements of each parameter. `uncut`: never cut a parameter.
        """
        self._parts = parts
        self._seed = seed
        wanted = -(-sum(lengths) // (PIECES_PER_PART * parts)) if parts > 1 else BLOCK_ELEMENTS
        longest = max(1, max(lengths, default=1) if uncut else min(wanted, BLOCK_ELEMENTS))
        self._pieces = [
            Piece(parameter, start, min(start + longest, length))
            for parameter, length in enumerate(lengths)
            for start in range(0, length, longest)
        ]

    def of_audit(self, number: int) -> list[Piece]:
        """Return the pieces of one audit (counted from 0), in the order of the parameters."""
        if self._parts == 1:
            return self._pieces
        cycle, part = divmod(number, self._parts)
        generator = np.random.Generator(np.random.PCG64([self._seed, cycle]))
        dealt = generator.permutation(len(self._pieces))[part :: self._parts]
        return [self._pieces[place] for place in np.sort(dealt)]


class LocalGradients:
    """Copies of local gradients, taken during the backward pass, before the exchange."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._copies: dict[tuple[int, Piece], torch.Tensor] = {}
        self._share = 0
        self._copied_from: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}
        self._hooks: list[Any] = []

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Copy these pieces, in the order of the parameters, from now on until `end`.

        With accumulation over several backward passes the last copy holds the accumulated gradient.
        Horovod's hook is on the node that accumulates the gradient, and so runs after this one.
        """
        self.end()
        self._copies.clear()
        self._copied_from.clear()
        self._share = 0
        for number, own in groupby(pieces, lambda piece: piece.parameter):
            copier = self._copier(list(own))
            hook = self._parameters[number].register_post_accumulate_grad_hook(copier)
            self._hooks.append(hook)

    def begin_share(self, share: int) -> None:
        """Store the copies that follow as those of `share`."""
        self._share = share

    def end(self) -> None:
        """Stop copying; the copies are kept."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def found_any(self) -> bool:
        """Return whether there was a gradient since `begin`."""
        return bool(self._copies)

    def first_changed(self) -> int | None:
        """Return the number of the first parameter whose .grad changed since its copy, or None.

        Either .grad is another tensor, or a torch operation has written to it. (Writes through
        `.data` are not detected, nor are those of Horovod before it is waited for.)
        """
        for number, parameter in enumerate(self._parameters):
            gradient, version = self._copied_from.get(parameter, (parameter.grad, None))
            if parameter.grad is not gradient:
                return number
            if gradient is not None and version not in (None, gradient._version):
                return number
        return None

    @property
    def shares(self) -> list[int]:
        """Return the shares with a gradient since `begin`; without shares, 0."""
        return sorted({share for share, _ in self._copies})

    def get(self, share: int, piece: Piece) -> torch.Tensor | None:
        """Return the copy, of shape (piece.length,); None if the share had no gradient."""
        return self._copies.get((share, piece))

    def _copier(self, pieces: list[Piece]) -> Callable[[torch.Tensor], None]:
        def copy(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            self._copied_from[parameter] = parameter.grad, parameter.grad._version
            flat = flattened(parameter.grad)
            for piece in pieces:
                self._copies[self._share, piece] = flat[piece.start : piece.stop].clone()

        return copy


@dataclass(frozen=True)
class Block:
    """Pieces of one dtype that are compared together."""

    number: int
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    def local_values(self, local: LocalGradients) -> list[torch.Tensor]:
        """Return the local gradients of each share that has any, in the block's dtype, on the CPU;
        zero if missing.
        """
        return [
            self._join([local.get(share, piece) for piece in self.pieces]) for share in local.shares
        ]

    def reduced_values(self, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        """Return the reduced gradients, in the block's dtype, on the CPU; zero if missing."""
        gradients = [(piece, parameters[piece.parameter].grad) for piece in self.pieces]
        return self._join(
            [
                None if gradient is None else flattened(gradient)[piece.start : piece.stop]
                for piece, gradient in gradients
            ]
        )

    def _join(self, values: Sequence[torch.Tensor | None]) -> torch.Tensor:
        parts = [
            torch.zeros(piece.length, dtype=self.dtype) if part is None else part.cpu()
            for piece, part in zip(self.pieces, values, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def locate(self, position: int) -> tuple[int, int]:
        """Return parameter number and flattened index of an element. Raises IndexError."""
        for piece in self.pieces:
            if position < piece.length:
                return piece.parameter, piece.start + position
            position -= piece.length
        raise IndexError(position)


def make_blocks(
    pieces: Iterable[Piece], parameters: Sequence[torch.nn.Parameter], uncut: bool
) -> list[Block]:
    """Group adjacent pieces of one dtype into blocks; with `uncut`, each piece is a block."""
    groups: list[tuple[torch.dtype, list[Piece]]] = []
    room = 0
    for piece in pieces:
        dtype = parameters[piece.parameter].dtype
        if groups and groups[-1][0] == dtype and piece.length <= room:
            groups[-1][1].append(piece)
        else:
            groups.append((dtype, [piece]))
            room = 0 if uncut else BLOCK_ELEMENTS
        room -= piece.length
    return [Block(number, dtype, tuple(own)) for number, (dtype, own) in enumerate(groups)]


def flattened(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a dense one-dimensional tensor, in the order of its indices."""
    dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
    return dense.reshape(-1)
