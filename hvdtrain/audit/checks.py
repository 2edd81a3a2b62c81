"""The two comparisons of an audit: within the proven rounding bound, and equal in every bit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from hvdtrain.audit.capture import Block
from hvdtrain.audit.mismatch import NO_ERROR, WorstError
from hvdtrain.exchange import AVERAGE, Reduction
from hvdtrain.exchange.gradients import added_dtype, exactly
from hvdtrain.ring import Transport, all_gather, reduce_scatter, split_evenly
from hvdtrain.ring.bound import (
    ERROR_BOUNDS,
    Floats,
    error_over_bound,
    finite_magnitudes,
    may_overflow,
)
from hvdtrain.ring.canonical import BLOCK, canonical_all_reduce
from hvdtrain.ring.orders import KnownOrder, differing_bits, reproduce

BFLOAT16_ROUNDOFF = 2.0**-8  # half a unit of the last of 8 bits
BFLOAT16_UNDERFLOW = 2.0**-134  # half of the smallest number
Shares = Sequence[torch.Tensor]  # local gradients, of each share of this rank that has any


@dataclass(frozen=True)
class BoundCheck:
    """The check against the rounding bound of `hvdtrain.ring.bound`, in float64.

    The local gradients of all ranks are summed again, and so are their magnitudes, to which the
    bound is proportional. Reduce-scatter completes one segment of these sums on each rank, and the
    rank compares only that segment. This covers every element, since digests show whether all ranks
    hold the same reduced gradients.
    """

    transport: Transport
    reduction: Reduction = AVERAGE
    whole, joins = False, True  # parameters may be compared in pieces, and several together

    def compare(
        self, block: Block, local: Shares, reduced: torch.Tensor, all_segments: bool
    ) -> WorstError:
        """Collective: return the worst error of this rank's segment, or of `all_segments`.

        `local`, `reduced`: all elements of the block, in its dtype.
        """
        segment, sums, magnitudes = self._summed(
            _only(local, reduced).double().numpy(), all_segments
        )
        if segment.start == segment.stop:
            return NO_ERROR
        size, op = self.transport.size, self.reduction.op
        casts = int(self.reduction.compression == "fp16")
        added = torch.float16 if casts else added_dtype(block.dtype)
        dtype = torch.empty(0, dtype=added).numpy().dtype
        bound = ERROR_BOUNDS[op](magnitudes, size, dtype, further_scalings=casts)
        reference = sums / size if op == "average" else sums
        if block.dtype == torch.bfloat16:  # the sum is rounded to it
            bound += (np.abs(reference) + bound) * BFLOAT16_ROUNDOFF + BFLOAT16_UNDERFLOW
        actual = reduced[segment].to(torch.float64).numpy()
        ratios = _finite_ratios(actual, reference, bound)
        if ratios is None:
            overflow = may_overflow(magnitudes, size, dtype, further_scalings=casts)
            ratios = error_over_bound(actual, reference, bound, overflow)
        worst = int(np.argmax(ratios))
        parameter, index = block.locate(segment.start + worst)
        return WorstError(
            ratio=float(ratios[worst]),
            block=block.number,
            parameter=parameter,
            index=index,
            reduced=float(actual[worst]),
            reference=float(reference[worst]),
            bound=float(bound[worst]),
        )

    def _summed(self, values: Floats, all_segments: bool) -> tuple[slice, Floats, Floats]:
        """Collective: return a slice of elements, their sums, and the sums of finite magnitudes.
        Values and magnitudes are interleaved by segment, so that one reduction carries both.
        """
        size = self.transport.size
        parts = split_evenly(values.size, size)
        both = np.empty(2 * values.size)
        doubled = [slice(2 * part.start, 2 * part.stop) for part in parts]
        for part, span in zip(parts, doubled, strict=True):
            half = both[span].reshape(2, -1)
            half[0] = values[part]
            finite_magnitudes(values[part], out=half[1])
        held = reduce_scatter(both, doubled, self.transport)
        if not all_segments:
            sums, magnitudes = both[held].reshape(2, -1)
            return slice(held.start // 2, held.stop // 2), sums, magnitudes
        all_gather(both, doubled, self.transport)
        halves = [both[span].reshape(2, -1) for span in doubled]
        sums, magnitudes = np.concatenate(halves, axis=1)
        return slice(0, values.size), sums, magnitudes


def _finite_ratios(reduced: Floats, reference: Floats, bound: Floats) -> Floats | None:
    """Return |reduced - reference| / bound in few passes; None if any of it is not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        ratios = np.subtract(reduced, reference)
        np.abs(ratios, out=ratios)
        np.divide(ratios, bound, out=ratios)  # for N > 1 the bound is above zero
        return ratios if math.isfinite(ratios.sum()) else None


@dataclass(frozen=True)
class ExactCheck:
    """The check for equal bits: sums are formed again in the exchange's own order of addition."""

    transport: Transport
    order: KnownOrder
    reduction: Reduction = AVERAGE
    whole, joins = True, False  # the order of addition depends on where a message begins and ends

    def compare(
        self, block: Block, local: Shares, reduced: torch.Tensor, all_segments: bool
    ) -> WorstError:
        """Collective: return the largest error among this rank's elements that differ in any bit.

        `local`, `reduced`: all elements of one message, in its dtype.
        """
        gradients = _only(local, reduced)
        is_compressed = self.reduction.compression == "fp16"
        terms = gradients.to(torch.float16) if is_compressed else exactly(gradients)
        values = reproduce(terms.numpy(), self.transport, self.order, self.reduction.op)
        return _worst_of_bits(block, reduced, torch.from_numpy(values).to(block.dtype))


@dataclass(frozen=True)
class CanonicalCheck:
    """The check of canonical sums: the reference has the same bits in any order of addition."""

    transport: Transport
    shares: int  # over all ranks
    whole, joins = True, True  # blocks with a common exponent begin anew with each parameter

    def compare(
        self, block: Block, local: Shares, reduced: torch.Tensor, all_segments: bool
    ) -> WorstError:
        """Collective: return the largest error among this rank's elements that differ in any bit.

        `local`: those of each share of this rank. `reduced`: all elements of some parameters.
        """
        lengths = [piece.length for piece in block.pieces]
        *starts, total = accumulate((-(-n // BLOCK) * BLOCK for n in lengths), initial=0)
        places = np.concatenate(
            [np.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)]
        )
        dtype = exactly(reduced).numpy().dtype
        shares = [np.zeros(total, dtype) for _ in local]
        for share, values in zip(shares, local, strict=True):
            share[places] = exactly(values).numpy()
        sums = canonical_all_reduce(shares, self.shares, self.transport, length=total, dtype=dtype)
        expected = torch.from_numpy(sums[places]).to(block.dtype)
        return _worst_of_bits(block, reduced, expected)


def _only(local: Shares, reduced: torch.Tensor) -> torch.Tensor:
    """Return the gradients of this rank's only share; zero if it had none."""
    (gradients,) = local or [torch.zeros_like(reduced)]
    return gradients


def _worst_of_bits(block: Block, reduced: torch.Tensor, expected: torch.Tensor) -> WorstError:
    """Return the largest error among the elements that differ in any bit."""
    pair = [exactly(tensor).contiguous().numpy() for tensor in (reduced, expected)]
    wrong = np.flatnonzero(differing_bits(*pair))
    if wrong.size == 0:
        return NO_ERROR
    actual = reduced.to(torch.float64).numpy()[wrong]
    reference = expected.to(torch.float64).numpy()[wrong]
    with np.errstate(invalid="ignore"):
        errors = np.abs(actual - reference)
    worst = int(np.argmax(np.where(np.isnan(errors), math.inf, errors)))
    parameter, index = block.locate(int(wrong[worst]))
    return WorstError(
        ratio=math.inf,
        block=block.number,
        parameter=parameter,
        index=index,
        reduced=float(actual[worst]),
        reference=float(reference[worst]),
        bound=0.0,
    )
