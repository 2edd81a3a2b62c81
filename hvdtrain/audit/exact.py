"""Equal in every bit? Where the exchange's order of summation is known (`hvdtrain.ring.orders`)."""

from __future__ import annotations

import math

import numpy as np
import torch

from hvdtrain.audit.findings import NOTHING, Block, Finding
from hvdtrain.exchange import AVERAGE, Reduction
from hvdtrain.ring import Transport
from hvdtrain.ring.orders import KnownOrder, differing_bits, reproduce


class ExactCheck:
    """Forms each sum or average again in the exchange's own order, so that no bit may differ."""

    whole_parameters = True  # the order of summation depends on where one begins and ends

    def __init__(
        self, transport: Transport, order: KnownOrder, reduction: Reduction = AVERAGE
    ) -> None:
        self._transport = transport
        self._order = order
        self._op = reduction.op
        self._compressed = reduction.compression == "fp16"

    def worst(
        self, block: Block, local: torch.Tensor, reduced: torch.Tensor, whole: bool
    ) -> Finding:
        """Collective: the differing element with the largest error, on this rank.

        `local`, `reduced`: of one parameter, in its dtype.
        """
        terms = local.to(torch.float16) if self._compressed else local
        values = reproduce(terms.numpy(), self._transport, self._order, self._op)
        expected = torch.from_numpy(values).to(block.dtype)
        wrong = np.flatnonzero(differing_bits(reduced.contiguous().numpy(), expected.numpy()))
        if wrong.size == 0:
            return NOTHING
        found = reduced.to(torch.float64).numpy()[wrong]
        reference = expected.to(torch.float64).numpy()[wrong]
        with np.errstate(invalid="ignore"):
            errors = np.abs(found - reference)
        errors[np.isnan(errors)] = math.inf
        place = int(np.argmax(errors))
        parameter, index = block.locate(int(wrong[place]))
        return Finding(
            *(math.inf, block.number, parameter, index),
            *(float(found[place]), float(reference[place]), 0.0),
        )
