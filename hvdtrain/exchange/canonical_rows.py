"""The memory of canonical sums: shares as rows of blocks, integers and exponents.

`hvdtrain.exchange.canonical` says what they are, and exchanges them.
"""

import itertools
from collections.abc import Sequence

import torch

from hvdtrain.exchange import Exchange, Pending, SingleProcess
from hvdtrain.exchange.gradients import (
    added_dtype,
    as_complex,
    as_real,
    laid_out_as,
    parts_of,
    real_length,
)
from hvdtrain.exchange.rounding import BLOCK, FORMATS, rounding_on

GATHERED_BYTES = 1 << 18  # all shares of a bucket, if they are gathered to be added
_Copy = tuple[torch.Tensor, list[torch.Tensor]]  # (rows, BLOCK); each parameter's part, if copied


class CanonicalRows:
    """Parameters that are summed together, as rows of BLOCK elements; each begins a new row."""

    def __init__(
        self,
        number: int,
        parameters: Sequence[torch.nn.Parameter],
        shares: int,
        exchange: Exchange,
    ) -> None:
        """Prepare the sums of these parameters, `number` of all that are summed together.

        `shares`: number of shares over all ranks.
        """
        self.number, self.parameters = number, parameters
        lengths = [-(-real_length(parameter) // BLOCK) * BLOCK for parameter in parameters]
        *self._starts, total = itertools.accumulate(lengths, initial=0)
        self.dtype = added_dtype(parameters[0].dtype)
        form = FORMATS[self.dtype]
        # The integers of `Rounding`: ceil(log2(shares)) bits less than there are, to add in.
        headroom = (shares - 1).bit_length()
        self.top = form.bits - headroom + form.bias - 1
        # Below this field of the largest magnitude, a sum of all shares cannot overflow.
        self._safe, self._infinite = form.infinite - 1 - headroom, form.infinite
        # (rows, BLOCK): the sum, first of this rank, then of all ranks.
        shape, device = (total // BLOCK, BLOCK), parameters[0].device
        self.integers = torch.zeros(shape, dtype=form.integer, device=device)
        # Of each row, as `Rounding` has them: first of this rank's shares, then of all.
        self.fields = torch.zeros(shape[0] + 1, dtype=torch.int32, device=device)
        self.rounding = rounding_on(device)
        self.is_gathered = exchange.size > 1 and shares * self.integers.nbytes <= GATHERED_BYTES
        # With whom exponents and integers are exchanged; with none, once all shares are here.
        self.exchange = SingleProcess() if self.is_gathered else exchange
        # A parameter whose gradient has the form of rows: it is not copied.
        self._is_whole = len(parameters) == 1 and real_length(parameters[0]) % BLOCK == 0
        # (shares, rows, BLOCK), if gathered.
        number_of_places = shares if self.is_gathered else 0
        self.places = torch.zeros((number_of_places, *shape), dtype=self.dtype, device=device)
        self._copies: dict[int, _Copy] = {}
        self.shares: list[torch.Tensor] = []  # this rank's, (rows, BLOCK) each
        self.clear()

    def clear(self) -> None:
        """Forget the last step."""
        self.missing = len(self.parameters)  # without a gradient of the last share yet
        self.shares.clear()
        self._last: _Copy | None = None  # of this rank's shares
        self.places.zero_()
        self.gathered: Pending | None = None  # the exchange of all shares, (shares, rows, BLOCK)
        self.agreed: Pending | None = None  # the exchange of exponents
        self.largest = self._infinite  # of the agreed fields
        self.added: Pending | None = None  # the exchange of integers
        self.marked: Pending | None = None  # the exchange of the sums of infinities and NaNs

    @property
    def is_sent(self) -> bool:
        """Return whether the last share of this rank is complete, and its exchange has begun."""
        return self.gathered is not None or self.agreed is not None

    @property
    def is_marked(self) -> bool:
        """Return whether an element of any share is infinite or NaN."""
        return self.largest == self._infinite

    @property
    def is_finite(self) -> bool:
        """Return whether the sums are known to be finite."""
        return self.largest < self._safe

    def add_share(self, number: int) -> None:
        """Add the parameters' present gradients as a share, unless all are missing.

        `number`: of the share, over all ranks.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        if all(gradient is None for gradient in gradients):
            return
        first = gradients[0]
        if self._is_whole and first is not None and not self.is_gathered:
            # A hook may have left an expanded one.
            share = as_real(first.detach()).reshape(-1, BLOCK).to(self.dtype).contiguous()
            self.shares.append(share)
            self._last = share, []
            return
        rows, parts = self._copy(number if self.is_gathered else len(self.shares))
        placed = [*zip(gradients, parts, strict=True)]
        torch._foreach_copy_(
            [part for gradient, part in placed if gradient is not None],
            [as_real(gradient.detach()) for gradient, _ in placed if gradient is not None],
        )
        for part in (part for gradient, part in placed if gradient is None):
            part.zero_()
        self.shares.append(rows)
        self._last = rows, parts

    def _copy(self, number: int) -> _Copy:
        """Return rows to copy a share into, and each parameter's part of them, as `as_real`.

        They are kept: views of many small parameters take longer to make than to copy. The rest of
        a parameter's last row is zero.
        """
        if number not in self._copies:
            if self.is_gathered:
                rows = self.places[number]
            else:
                rows = torch.zeros_like(self.integers, dtype=self.dtype)
            self._copies[number] = rows, self._parts(rows)
        return self._copies[number]

    def _parts(self, rows: torch.Tensor) -> list[torch.Tensor]:
        return parts_of(rows.view(-1), self._starts, self.parameters)

    def receive(self) -> None:
        """Collective: wait for the sums, and make them the parameters' gradients."""
        assert self.added is not None
        self.added.wait()
        # The memory of a share is free by now.
        rows, parts = self._last or (torch.empty_like(self.integers, dtype=self.dtype), [])
        self.rounding.convert(self.integers, self.fields, self.top, rows)
        if self.marked is not None:
            rows += self.marked.wait()
            rows.masked_fill_(rows.isnan(), torch.nan)  # NaNs have many bit patterns
        if not parts:
            for parameter, values in zip(self.parameters, self._parts(rows), strict=True):
                parameter.grad = laid_out_as(as_complex(values, parameter.dtype), parameter)
            return
        for parameter in self.parameters:
            if parameter.grad is None or parameter.grad.stride() != parameter.stride():
                parameter.grad = torch.empty_like(parameter)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        torch._foreach_copy_([as_real(gradient.detach()) for gradient in gradients], parts)
