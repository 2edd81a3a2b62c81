"""The results of comparing one block of elements, and their exchange between ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hvdtrain.audit.capture import LocalGradients, Piece, flattened
from hvdtrain.ring import Transport, gather


@dataclass(frozen=True)
class Finding:
    """The element of one rank's gradients with the largest error in units of its bound."""

    ratio: float  # error / bound
    block: int
    parameter: int
    index: int  # in the flattened parameter
    reduced: float
    reference: float
    bound: float


NOTHING = Finding(0.0, 0, 0, 0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Block:
    """Pieces of one dtype that are compared together."""

    number: int
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def length(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)

    def locate(self, position: int) -> tuple[int, int]:
        """Return parameter number and flattened index of an element. Raises IndexError."""
        for piece in self.pieces:
            if position < piece.stop - piece.start:
                return piece.parameter, piece.start + position
            position -= piece.stop - piece.start
        raise IndexError(position)


def make_blocks(
    pieces: Iterable[Piece], parameters: list[torch.nn.Parameter], longest: int
) -> list[Block]:
    """Group adjacent pieces of one dtype into blocks of at most `longest` elements.

    A single piece may be longer.
    """
    groups: list[list[Piece]] = []
    length = 0
    for piece in pieces:
        own = piece.stop - piece.start
        same = groups and parameters[groups[-1][0].parameter].dtype == (
            parameters[piece.parameter].dtype
        )
        if same and length + own <= longest:
            groups[-1].append(piece)
            length += own
        else:
            groups.append([piece])
            length = own
    return [
        Block(number, parameters[group[0].parameter].dtype, tuple(group))
        for number, group in enumerate(groups)
    ]


def local_values(block: Block, local: LocalGradients) -> torch.Tensor:
    """Return this rank's local gradients of a block, in its dtype, on the CPU; zero if missing."""
    values = torch.zeros(block.length, dtype=block.dtype)
    start = 0
    for piece in block.pieces:
        stop = start + piece.stop - piece.start
        copy = local.get(piece)
        if copy is not None:
            values[start:stop] = copy
        start = stop
    return values


def reduced_values(block: Block, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """Return the reduced gradients of a block, in its dtype, on the CPU; zero if missing."""
    parts = []
    for piece in block.pieces:
        gradient = parameters[piece.parameter].grad
        if gradient is None:
            parts.append(torch.zeros(piece.stop - piece.start, dtype=block.dtype))
        else:
            parts.append(flattened(gradient)[piece.start : piece.stop].cpu())
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def bits(values: torch.Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a tensor, shape (elements, bytes per element)."""
    contiguous = values.contiguous()
    result: NDArray[np.uint8] = contiguous.view(torch.uint8).numpy()
    return result.reshape(len(contiguous), contiguous.element_size())


def digest(values: torch.Tensor) -> int:
    """Return the CRC-32 of the bytes: equal bits give equal digests on every rank."""
    return zlib.crc32(bits(values).data)


def tell_all(
    own: Finding, further: Sequence[float], transport: Transport
) -> tuple[list[Finding], NDArray[np.float64]]:
    """Collective: return every rank's finding, and its `further` numbers, shape (ranks, numbers).

    They travel over the ring as float64, in which a CRC-32 is exact.
    """
    table = gather(np.array([*astuple(own), *further], np.float64), transport)
    width = len(astuple(NOTHING))
    findings = [
        Finding(row[0], int(row[1]), int(row[2]), int(row[3]), *row[4:])
        for row in table[:, :width].tolist()
    ]
    return findings, table[:, width:]
