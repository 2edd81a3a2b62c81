"""The elements that an audit covers, and the copies of their local gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class Parts:
    """A random division of the parameters into `parts` parts, different in every cycle of audits.

    It is the same on every rank: it depends only on the lengths, the seed and the audit's number.
    """

    def __init__(self, lengths: Sequence[int], parts: int, seed: int, whole: bool) -> None:
        """Cut the parameters into pieces.

        `lengths`: number of elements of each parameter. `whole`: never cut a parameter.
        Raises ValueError for fewer than one part.
        """
        if parts < 1:
            raise ValueError(f"{parts} parts")
        self.parts = parts
        self._seed = seed
        wanted = -(-sum(lengths) // (PIECES_PER_PART * parts)) if parts > 1 else BLOCK_ELEMENTS
        longest = max(lengths, default=1) if whole else min(wanted, BLOCK_ELEMENTS)
        self._pieces = cut(lengths, max(longest, 1))

    def of_audit(self, number: int) -> list[Piece]:
        """Return the pieces of one audit (counted from 0), in the order of the parameters."""
        if self.parts == 1:
            return self._pieces
        cycle, part = divmod(number, self.parts)
        generator = np.random.Generator(np.random.PCG64([self._seed, cycle]))
        dealt = generator.permutation(len(self._pieces))[part :: self.parts]
        return [self._pieces[place] for place in np.sort(dealt)]


def cut(lengths: Sequence[int], longest: int) -> list[Piece]:
    """Return pieces of at most `longest` elements that cover every element once."""
    return [
        Piece(parameter, start, min(start + longest, length))
        for parameter, length in enumerate(lengths)
        for start in range(0, length, longest)
    ]


class LocalGradients:
    """Copies of local gradients, taken during the backward pass, before the exchange."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._copies: dict[Piece, torch.Tensor] = {}
        self._copied_from: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}
        self._hooks: list[Any] = []

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Copy these pieces from now on until `end`.

        With accumulation over several backward passes the last copy holds the accumulated gradient.
        """
        self.end()
        self._copies.clear()
        self._copied_from.clear()
        wanted: dict[int, list[Piece]] = {}
        for piece in pieces:
            wanted.setdefault(piece.parameter, []).append(piece)
        for number, own in wanted.items():
            hook = self._parameters[number].register_post_accumulate_grad_hook(self._copier(own))
            self._hooks.append(hook)

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

    def get(self, piece: Piece) -> torch.Tensor | None:
        """Return the copy, of shape (stop - start,); None if this rank had no gradient."""
        return self._copies.get(piece)

    def _copier(self, pieces: list[Piece]) -> Callable[[torch.Tensor], None]:
        def copy(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            self._copied_from[parameter] = parameter.grad, parameter.grad._version
            flat = flattened(parameter.grad)
            for piece in pieces:
                self._copies[piece] = flat[piece.start : piece.stop].clone()

        return copy


def flattened(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a dense one-dimensional tensor, in the order of its indices."""
    dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
    return dense.reshape(-1)
