"""Which elements an audit looks at: all of them, or one of K parts that cover all in K audits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

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
