"""Copies of local gradients, taken as the backward pass produces them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch


class LocalGradients:
    """Hears of each gradient before the exchange does, and copies the pieces that are wanted."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._copies: dict[Piece, torch.Tensor] = {}
        self._copied_from: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}
        self._hooks: list[Any] = []

    def begin(self, pieces: Sequence[Piece]) -> None:
        """From here on, until `end`, copy these pieces.

        With accumulation over several backward passes the last copy holds the accumulated one.
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
        """Copy no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def found_any(self) -> bool:
        """Whether there was a gradient since `begin`."""
        return bool(self._copies)

    def first_changed(self) -> int | None:
        """Return the number of a parameter whose .grad is not what was copied, or None.

        Either it is another tensor, or an operation of torch has written into it. (Writes by way
        of `.data` leave no trace, and none of Horovod's until it has been waited for.)
        """
        for number, parameter in enumerate(self._parameters):
            gradient, version = self._copied_from.get(parameter, (parameter.grad, None))
            if parameter.grad is not gradient:
                return number
            if gradient is not None and version not in (None, gradient._version):
                return number
        return None

    def get(self, piece: Piece) -> torch.Tensor | None:
        """The copy, of shape (stop - start,); None where this rank had no gradient."""
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
    """A gradient as one dimension; dense, and in the order of its indices."""
    dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
    return dense.reshape(-1)


# Elements compared at a time: their float64 arrays stay in a core's cache.
BLOCK_ELEMENTS = 1 << 16
PIECES_PER_PART = 4  # at least, where there are as many elements


class Piece(NamedTuple):
    """Neighbouring elements of one parameter, counted in its flattened form."""

    parameter: int
    start: int
    stop: int


class Parts:
    """Cuts parameters into pieces, and deals these into `parts` parts, anew in every cycle.

    The same on every rank: it depends on lengths, seed and the audit's number alone.
    """

    def __init__(self, lengths: Sequence[int], parts: int, seed: int, whole: bool) -> None:
        """`lengths`: elements of each parameter. `whole`: never cut a parameter.

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
        """The pieces of one audit (counted from 0), in the parameters' order."""
        if self.parts == 1:
            return self._pieces
        cycle, part = divmod(number, self.parts)
        generator = np.random.Generator(np.random.PCG64([self._seed, cycle]))
        dealt = generator.permutation(len(self._pieces))[part :: self.parts]
        return [self._pieces[place] for place in np.sort(dealt)]


def cut(lengths: Sequence[int], longest: int) -> list[Piece]:
    """Every element once, in pieces of at most `longest`."""
    return [
        Piece(parameter, start, min(start + longest, length))
        for parameter, length in enumerate(lengths)
        for start in range(0, length, longest)
    ]
