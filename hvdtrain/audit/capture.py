"""The elements that an audit covers, in blocks, and the copies of their local gradients."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from typing import NamedTuple

import numpy as np
import torch

from hvdtrain.exchange.gradients import as_real, dense, real_dtype

# Elements compared at a time, at least: their float64 arrays fit in a core's cache.
BLOCK_ELEMENTS = 1 << 16
BLOCK_ELEMENTS_PER_RANK = 1 << 12
COPIED_BLOCKS = 256  # from a device at a time: 64 MiB of float32
PIECES_PER_PART = 4  # at least, if there are enough elements

Groups = Sequence[Sequence[int]]  # of parameters, by number


def block_elements(ranks: int) -> int:
    """Return how many elements to compare at a time.

    For each block a ring of N ranks sends N - 1 messages or more, one after another. Blocks of one
    size would be ever smaller messages of ever more ranks, and their latency would count alone.
    """
    return max(BLOCK_ELEMENTS, BLOCK_ELEMENTS_PER_RANK * ranks)


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

    def __init__(
        self,
        lengths: Sequence[int],
        parts: int,
        seed: int,
        whole: Groups | None = None,
        most: int = BLOCK_ELEMENTS,
    ) -> None:
        """Cut the parameters into pieces that cover every element once.

        `lengths`: number of elements of each parameter. `whole`: groups of parameters that are
        neither cut nor parted; None: every parameter may be cut. `most`: elements of a piece.
        """
        self._parts = parts
        self._seed = seed
        if whole is not None:
            groups = [[Piece(n, 0, lengths[n]) for n in group if lengths[n]] for group in whole]
            self._groups = [group for group in groups if group]
            return
        wanted = -(-sum(lengths) // (PIECES_PER_PART * parts)) if parts > 1 else most
        longest = max(1, min(wanted, most))
        self._groups = [
            [Piece(parameter, start, min(start + longest, length))]
            for parameter, length in enumerate(lengths)
            for start in range(0, length, longest)
        ]

    def of_audit(self, number: int) -> list[list[Piece]]:
        """Return the pieces of one audit (counted from 0), in groups that are whole."""
        if self._parts == 1:
            return self._groups
        cycle, part = divmod(number, self._parts)
        generator = np.random.Generator(np.random.PCG64([self._seed, cycle]))
        dealt = generator.permutation(len(self._groups))[part :: self._parts]
        return [self._groups[index] for index in np.sort(dealt)]


class LocalGradients:
    """Copies of local gradients, taken during the backward pass, before the exchange."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._copies: dict[tuple[int, Piece], torch.Tensor] = {}
        self._share = 0
        self._copied_from: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}
        self._hooks = ExitStack()

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Copy these pieces, those of a parameter side by side, from now on until `end`.

        With accumulation over several backward passes the last copy holds the accumulated gradient.
        Horovod's hook is on the node that accumulates the gradient, and so runs after this one.
        """
        self.end()
        self._copies.clear()
        self._copied_from.clear()
        self._share = 0
        for number, group in groupby(pieces, lambda piece: piece.parameter):
            copy = partial(self._copy, list(group))
            hook = self._parameters[number].register_post_accumulate_grad_hook(copy)
            self._hooks.callback(hook.remove)

    def begin_share(self, share: int) -> None:
        """Store the copies that follow as those of `share`."""
        self._share = share

    def end(self) -> None:
        """Stop copying; the copies are kept."""
        self._hooks.close()

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

    def _copy(self, pieces: list[Piece], parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._copied_from[parameter] = parameter.grad, parameter.grad._version
        flat = flattened(parameter.grad)
        for piece in pieces:
            self._copies[self._share, piece] = flat[piece.start : piece.stop].clone()


@dataclass(frozen=True)
class Block:
    """Pieces of one dtype that are compared together; that of the parts of complex numbers."""

    number: int
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    def joined(self, values: Iterable[torch.Tensor | None]) -> torch.Tensor:
        """Return the values of all pieces as one tensor, in the block's dtype; zero if missing."""
        parts = [
            torch.zeros(piece.length, dtype=self.dtype) if part is None else part
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


def values_of(
    blocks: Sequence[Block], local: LocalGradients, parameters: Sequence[torch.nn.Parameter]
) -> Iterator[tuple[Block, list[torch.Tensor], torch.Tensor]]:
    """Yield each block with its local gradients, of each share that has any, and its reduced ones.

    They are on the CPU, in the block's dtype; zero if missing. Those on a device are copied
    COPIED_BLOCKS blocks at a time: the host waits for each copy.
    """
    shares = local.shares
    for start in range(0, len(blocks), COPIED_BLOCKS):
        chunk = blocks[start : start + COPIED_BLOCKS]
        held: list[torch.Tensor | None] = []
        for block in chunk:
            for share in shares:
                held += [local.get(share, piece) for piece in block.pieces]
            held += [_reduced(piece, parameters) for piece in block.pieces]
        on_cpu = iter(_on_cpu(held))
        for block in chunk:
            count = len(block.pieces)
            *of_shares, reduced = (
                block.joined(islice(on_cpu, count)) for _ in range(len(shares) + 1)
            )
            yield block, of_shares, reduced


def _reduced(piece: Piece, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor | None:
    gradient = parameters[piece.parameter].grad
    return None if gradient is None else flattened(gradient)[piece.start : piece.stop]


def _on_cpu(values: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return the values on the CPU; those of one type on a device are copied together."""
    on_cpu = list(values)
    together: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(values):
        if tensor is not None and tensor.device.type != "cpu":
            together.setdefault(tensor.dtype, []).append(index)
    for indices in together.values():
        parts = [tensor for index in indices if (tensor := values[index]) is not None]
        copied = torch.cat(parts).cpu().split([len(part) for part in parts])
        for index, part in zip(indices, copied, strict=True):
            on_cpu[index] = part
    return on_cpu


def make_blocks(
    groups: Iterable[Sequence[Piece]], parameters: Sequence[torch.nn.Parameter], most: int
) -> list[Block]:
    """Join adjacent groups of pieces of one dtype to blocks, of `most` elements if several groups
    share one; 0: each group is one.
    """
    blocks: list[tuple[torch.dtype, list[Piece]]] = []
    room = 0
    for group in groups:
        dtype = real_dtype(parameters[group[0].parameter].dtype)
        length = sum(piece.length for piece in group)
        if blocks and blocks[-1][0] == dtype and length <= room:
            blocks[-1][1].extend(group)
        else:
            blocks.append((dtype, list(group)))
            room = most
        room -= length
    return [Block(number, dtype, tuple(pieces)) for number, (dtype, pieces) in enumerate(blocks)]


def flattened(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a dense one-dimensional tensor, in the order of its indices; complex
    numbers as pairs of reals.
    """
    return as_real(dense(gradient).resolve_conj()).reshape(-1)
