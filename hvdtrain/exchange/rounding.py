"""Conversions of canonical sums, by torch's operations, or on a CPU by those of Horovod's build.

Values are rows of BLOCK elements, (rows, BLOCK), of float32 or float64. The bits are the same with
both. `horovod_build/native/canonical_sums.h` registers its operations when Horovod is loaded.
Torch's serve other devices, processes without Horovod, and other builds of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

BLOCK = 256  # elements of a parameter that share an exponent
ROWS_AT_A_TIME = 256  # rows that torch converts at a time, so that they stay in a core's cache


@dataclass(frozen=True)
class Format:
    """A floating-point type, and the integers in which its values are added."""

    bits: int  # of a sum of all shares, without its sign
    integer: torch.dtype
    mantissa_bits: int
    bias: int  # the exponent field of 1.0
    infinite: int  # the exponent field of infinities and NaNs

    def fields(self, magnitudes: torch.Tensor) -> torch.Tensor:
        """Return the exponent fields of values that are not negative, as int32."""
        return (magnitudes.view(self.integer) >> self.mantissa_bits).to(torch.int32)

    def shifts(self, fields: torch.Tensor, top: int) -> torch.Tensor:
        """Return the exponent of each row's scale; `fields`, `top`: those of `Rounding`."""
        return (top - fields[:-1]).clamp_(max=self.bias - 1)

    def powers(self, exponents: torch.Tensor) -> torch.Tensor:
        """Return 2^exponents, exactly; they must be those of normal numbers."""
        fields = (exponents.to(self.integer) + self.bias) << self.mantissa_bits
        return fields.view(torch.float32 if self.integer == torch.int32 else torch.float64)


FORMATS = {
    torch.float32: Format(30, torch.int32, 23, 127, 255),
    torch.float64: Format(62, torch.int64, 52, 1023, 2047),
}


class Rounding:
    """The conversions, by torch's operations.

    `fields`: (rows + 1,), int32: the exponent field of each row's largest finite magnitude, over
    all shares; the last one, of no row, is that of infinities if an element is infinite or NaN, and
    0 otherwise. `top`: a row's values times 2^(top - field) are rounded to integers (a field that
    is too low counts as the lowest for which that is a normal number), and must fit into them.
    """

    def raise_fields(self, values: torch.Tensor, fields: torch.Tensor) -> None:
        """Raise the fields to those of `values`, a share."""
        form = FORMATS[values.dtype]
        largest = form.fields(_largest(values))
        marked = (largest == form.infinite).any()
        # On a device the host would wait for all that it has started, so it does not ask.
        if values.device.type != "cpu" or bool(marked):
            fields[-1] = torch.maximum(fields[-1], marked * form.infinite)
            largest = form.fields(_largest(finite(values)))
        torch.maximum(fields[:-1], largest, out=fields[:-1])

    def add_rounded(
        self, shares: Sequence[torch.Tensor], fields: torch.Tensor, top: int, integers: torch.Tensor
    ) -> None:
        """Set `integers` to the sum of one share or more, each rounded, ties to even."""
        form = FORMATS[shares[0].dtype]
        scales = form.powers(form.shifts(fields, top))[:, None]
        # Memory is read and written once: a part stays in a core's cache through all passes.
        for rows in _parts_of(integers):
            total = integers[rows]
            for number, share in enumerate(shares):
                rounded = (share[rows] * scales[rows]).round_()
                if number == 0:
                    total.copy_(rounded)
                else:
                    total += rounded.to(integers.dtype)

    def convert(
        self, integers: torch.Tensor, fields: torch.Tensor, top: int, values: torch.Tensor
    ) -> None:
        """Set `values` to the integers as floats of as many bits, rounded, over 2^(top - field)."""
        form = FORMATS[values.dtype]
        quanta = form.powers(-form.shifts(fields, top))[:, None]
        for rows in _parts_of(values):
            values[rows].copy_(integers[rows]).mul_(quanta[rows])


class NativeRounding(Rounding):
    """The conversions, each in one pass over memory, where Horovod's build has them."""

    def __init__(self, operations: Any) -> None:
        self._operations = operations

    def raise_fields(self, values: torch.Tensor, fields: torch.Tensor) -> None:
        self._operations.raise_fields(values, fields)

    def add_rounded(
        self, shares: Sequence[torch.Tensor], fields: torch.Tensor, top: int, integers: torch.Tensor
    ) -> None:
        for number, share in enumerate(shares):
            self._operations.round_to(integers, share, fields, top, number > 0)

    def convert(
        self, integers: torch.Tensor, fields: torch.Tensor, top: int, values: torch.Tensor
    ) -> None:
        self._operations.convert_to(values, integers, fields, top)


def rounding_on(device: torch.device) -> Rounding:
    """Return the conversions for values on `device`."""
    operations = torch.ops.hvdtrain
    is_native = device.type == "cpu" and hasattr(operations, "convert_to")
    return NativeRounding(operations) if is_native else Rounding()


def finite(rows: torch.Tensor) -> torch.Tensor:
    """Return the values with zeros in place of infinities and NaNs."""
    return rows.masked_fill(~rows.isfinite(), 0)


def _largest(rows: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each row; NaN if it has one."""
    return torch.maximum(rows.amax(dim=1), rows.amin(dim=1).neg()).abs()


def _parts_of(rows: torch.Tensor) -> Iterator[slice]:
    """Yield the parts of rows that are converted at a time: all of them on a device, on which each
    operation is a kernel to start. The bits do not depend on it.
    """
    step = ROWS_AT_A_TIME if rows.device.type == "cpu" else max(len(rows), 1)
    return (slice(start, start + step) for start in range(0, len(rows), step))
