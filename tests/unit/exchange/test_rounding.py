"""The conversions of canonical sums, torch's and those of our Horovod, against the reference."""

import horovod.torch  # noqa: F401  (registers the operations of its build)
import numpy as np
import pytest
import torch

from hvdtrain.exchange.rounding import BLOCK, FORMATS, NativeRounding, Rounding, rounding_on
from hvdtrain.ring.canonical import exponents, from_integers, to_integers

WORKERS = 6
BOTH = [Rounding(), NativeRounding(torch.ops.hvdtrain)]
FLOATS = [torch.float32, torch.float64]


def rows_of(dtype: torch.dtype, rows: int, seed: int) -> torch.Tensor:
    """Return values of all magnitudes of the type: subnormal, zeros of both signs, ties."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((rows, BLOCK), generator=generator, dtype=dtype)
    lowest = -149 if dtype == torch.float32 else -1074
    powers = torch.randint(lowest, -lowest // 2, (rows, 1), generator=generator, dtype=dtype)
    values = torch.ldexp(values, powers)
    values[:, ::7] = torch.ldexp(torch.ones(rows, 1, dtype=dtype), powers - 3)  # exact powers
    values[:, ::31], values[:, 3::31] = 0.0, -0.0
    values[1::5] = 0.0
    return values


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [0, 1, 2, 257])
@pytest.mark.parametrize("rounding", BOTH)
def test_both_convert_as_the_reference_does(
    rounding: Rounding, rows: int, dtype: torch.dtype
) -> None:
    """Fails if an exponent, an integer or a float has another bit than in the reference."""
    form = FORMATS[dtype]
    shares = [rows_of(dtype, rows, seed) for seed in range(3)]
    flat = [share.numpy().reshape(-1) for share in shares]
    agreed = np.zeros(rows, np.int32) - 2000
    for values in flat:
        np.maximum(agreed, exponents(values, WORKERS), out=agreed)
    fields = torch.zeros(rows + 1, dtype=torch.int32)
    for share in shares:
        rounding.raise_fields(share, fields)
    lowest = form.bits - 3 - (form.bias - 1)
    assert fields[-1] == 0
    assert torch.equal((fields[:-1] - form.bias + 1).clamp(min=lowest), torch.from_numpy(agreed))
    top = form.bits - 3 + form.bias - 1
    integers = torch.full((rows, BLOCK), 77, dtype=form.integer)  # of the step before
    rounding.add_rounded(shares, fields, top, integers)
    expected = sum(to_integers(values, agreed, WORKERS) for values in flat)
    assert np.array_equal(integers.numpy().reshape(-1), expected)
    assert rows < 2 or integers.any()
    result = torch.full((rows, BLOCK), torch.nan, dtype=dtype)
    rounding.convert(integers, fields, top, result)
    reference = from_integers(expected, agreed, flat[0].dtype, WORKERS)
    assert result.numpy().tobytes() == reference.tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rounding", BOTH)
def test_ties_are_rounded_to_even(rounding: Rounding, dtype: torch.dtype) -> None:
    """Fails if a half is rounded up, away from zero or by truncation."""
    values = (torch.arange(BLOCK, dtype=dtype)[None] - 128) / 2
    integers = torch.zeros((1, BLOCK), dtype=FORMATS[dtype].integer)
    rounding.add_rounded([values], torch.zeros(2, dtype=torch.int32), 0, integers)
    assert torch.equal(integers.to(dtype), values.round())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan, -torch.nan])
@pytest.mark.parametrize("rounding", BOTH)
def test_what_is_not_finite_is_marked_and_counts_as_zero(
    rounding: Rounding, odd: float, dtype: torch.dtype
) -> None:
    """Fails if an infinity or a NaN is taken for a number, is not marked, or hides its row."""
    values = rows_of(dtype, 4, 1)
    expected, fields = torch.zeros(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    values[2, 200] = 0
    rounding.raise_fields(values, expected)
    values[2, 200] = odd
    rounding.raise_fields(values, fields)
    assert expected[2] > 0 and expected[-1] == 0
    assert fields.tolist() == [*expected[:-1].tolist(), FORMATS[dtype].infinite]


def test_rows_of_another_shape_are_refused() -> None:
    """Fails if an operation reads or writes beyond its rows, or takes rows of another layout."""
    operations, values = torch.ops.hvdtrain, rows_of(torch.float32, 4, 1)
    fields = torch.zeros(5, dtype=torch.int32)
    integers = torch.zeros((4, BLOCK), dtype=torch.int32)
    for rows, others, of_rows in (
        (integers, values, fields[:4]),
        (integers[:3], values, fields),
        (integers, values.t().contiguous().t(), fields),
        (integers.long(), values, fields),
        (integers, values, fields.long()),
    ):
        with pytest.raises(RuntimeError):
            operations.round_to(rows, others, of_rows, 0, False)
        with pytest.raises(RuntimeError):
            operations.convert_to(others, rows, of_rows, 0)
    for rows, of_rows in ((values[:, 1:], fields), (values, fields[:4]), (values, fields.long())):
        with pytest.raises(RuntimeError):
            operations.raise_fields(rows, of_rows)


def test_a_cpu_has_the_conversions_of_the_build() -> None:
    """Fails if they are built, and not used on a CPU, or used on another device."""
    assert isinstance(rounding_on(torch.device("cpu")), NativeRounding)
    assert type(rounding_on(torch.device("meta"))) is Rounding
