"""The known orders of addition of Horovod 0.28.1: its sums and averages, bit for bit.

Rounding depends on the order of addition and on nothing else. With fusion off, each tensor is
reduced alone. Three paths of Horovod are then rings of a fixed order. The ring of this package
reproduces them, given their segments, their direction and the rank where each segment's sum begins.

**Gloo** (third_party/gloo/gloo/allreduce.cc, `ring`). Messages go from rank r to r - 1. With
E bytes an element the buffer has S = max(ceil(bytes / 1 MiB), 2 N) pieces, rounded up to a multiple
of N, of ceil(bytes / S) bytes each, rounded up to a multiple of E. Block j is S / N adjacent pieces
(the last blocks may be short or empty). Its sum begins at rank j - 1 and ends at rank j.

**Gloo by host, as our Horovod adds** (hvdtrain/horovod_build/native/gloo_by_host.h), on H hosts of
L ranks each. A tensor has pieces of 4 MiB, and a piece L parts (`split_evenly`). Of each part, the
terms of a host are added in the order of its ranks, then the sums of the hosts by Gloo's ring over
H. Fewer elements than ranks are summed by Gloo's ring over all.

**MPI, as our Horovod adds** (hvdtrain/horovod_build/native/sleeping_mpi.h). This is the ring of
this package: `split_evenly`, block k summed from rank k rightwards, in memory that ranks share too.
Messages of up to 4096 bytes a rank, or fewer elements than ranks, are summed by recursive doubling
instead.

**Open MPI**, in other builds of Horovod, with its ring pinned
(ompi/mca/coll/base/coll_base_allreduce.c, algorithm 4 `ring` or 5 `segmented_ring`, which cuts
blocks further but keeps their order). This is the same ring, but only tensors of fewer elements
than ranks are summed by recursive doubling. Without pinning, Open MPI selects an algorithm by size
and number of ranks. No order is known then, except for two ranks, as a + b = b + a.

**Scaling** (horovod/common/ops/collective_operations.h). An average is the sum times 1/N, formed
after the reduction. 1/N is computed in float64, and rounded to float32 for float32 and float16 (for
float16 the product is formed in float32 and rounded to float16). Integers are multiplied in
float64, and the fraction is cut off.

**float16 under Gloo** (third_party/gloo/gloo/types.h). `float16::operator=` skips the assignment
where the values seem equal, but it compares the new bits with the old bits *read as an integer and
converted to float16*. Where the sum equals the integer that the bits of this rank's term encode,
the term of the other ranks is lost: 2^-24 + 1 is 2^-24 there, and 1 + 15360 is 1. `gloo_half_sum`
reproduces this defect; without it the results would not match bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, pairwise

import numpy as np

from hvdtrain.errors import first_problem
from hvdtrain.ring.algorithm import (
    all_reduce_transfers,
    chain_transfers,
    gather,
    run_transfers,
)
from hvdtrain.ring.operations import Array, Reduce, reduction, split_evenly
from hvdtrain.ring.transports import Transport

GLOO_LARGEST_PIECE_BYTES = 1 << 20  # gloo/allreduce.h: kMaxSegmentSize
BY_HOST_PIECE_BYTES = 4 << 20  # gloo_by_host.h: kPieceBytes
ON = ("1", "true", "yes", "on", "enabled")
# Other components could replace `tuned` in the reduction, or change its algorithm.
FOREIGN_COMPONENTS = ("OMPI_MCA_coll", "OMPI_MCA_coll_tuned_dynamic_rules_filename") + tuple(
    f"OMPI_MCA_coll_{name}_priority" for name in ("adapt", "han", "sm", "hcoll", "ucc", "tuned")
)


class UnknownOrder(ValueError):
    """The order of summation is unknown: a sum can be bounded, but not reproduced."""


@dataclass(frozen=True)
class KnownOrder:
    """The order of addition of a ring.

    `segments`: maps (length, bytes per element, ranks) to one slice per rank; the sum of
    segments[p] begins at position p. `backwards`: messages go from rank r to r - 1, and rank r has
    position -r. `half_sum`: the addition of float16 values. `few`: the summation of the values of
    all ranks, in rank order, if there are fewer elements than ranks, or up to `few_bytes` of them a
    rank; None: the ring. `per_host`: ranks of each host; from 2 on their values are added first,
    and the ring is one of hosts. Those of a host are adjacent.
    """

    name: str
    segments: Callable[[int, int, int], tuple[slice, ...]]
    backwards: bool = False
    half_sum: Reduce = np.add
    few: Callable[[Sequence[Array]], Array] | None = None
    few_bytes: int = 0
    per_host: int = 1

    def summation_of(self, values: Array, size: int) -> Callable[[Sequence[Array]], Array] | None:
        """Return the summation of the values of all ranks if they are few; None: the ring."""
        are_few = values.size < size or values.nbytes <= self.few_bytes * size
        return self.few if are_few else None

    def position(self, rank: int, size: int) -> int:
        """Return the place of a rank in the direction of the messages (and the rank of a place)."""
        return -rank % size if self.backwards else rank

    def by_host(self, per_host: int) -> KnownOrder:
        """Return the order in which so many ranks of each host are added first."""
        if per_host == 1:
            return self
        return replace(self, name=f"{self.name} over hosts of {per_host}", per_host=per_host)


def gloo_segments(length: int, itemsize: int, size: int) -> tuple[slice, ...]:
    """Return Gloo's blocks, in the order of the positions where their sums begin (backwards)."""
    total = length * itemsize
    at_least = max(_divide_up(total, GLOO_LARGEST_PIECE_BYTES), 2 * size)
    pieces = _divide_up(at_least, size)  # of a block
    block = pieces * _divide_up(_divide_up(total, pieces * size), itemsize)
    blocks = [
        slice(min(number * block, length), min((number + 1) * block, length))
        for number in range(size)
    ]
    # Block j begins at rank j - 1, whose position is 1 - j.
    return tuple(blocks[(1 - position) % size] for position in range(size))


def gloo_half_sum(local: Array, arrived: Array, /, *, out: Array) -> None:
    """Add float16 values with Gloo's defect (see the module). All three: float16, equal lengths."""
    total = local + arrived
    encoded = local.view(np.uint16).astype(np.float32).astype(np.float16)
    lost = total.view(np.uint16) == encoded.view(np.uint16)
    np.copyto(out, np.where(lost, local, total))


def recursive_doubling(terms: Sequence[Array]) -> Array:
    """Return Open MPI's sum for few elements: of adjacent ranks, then of adjacent pairs, and so on.

    If N exceeds a power of two by m, the first 2 m ranks are summed in pairs first.
    """
    size = len(terms)
    extra = size - (1 << (size.bit_length() - 1))
    sums = [terms[2 * pair] + terms[2 * pair + 1] for pair in range(extra)]
    sums += terms[2 * extra :]
    while len(sums) > 1:
        sums = [sums[index] + sums[index + 1] for index in range(0, len(sums), 2)]
    return sums[0]


GLOO_RING = KnownOrder("Gloo's ring", gloo_segments, backwards=True, half_sum=gloo_half_sum)
OPEN_MPI_RING = KnownOrder(
    "Open MPI's ring",
    lambda length, itemsize, size: split_evenly(length, size),
    few=recursive_doubling,
)
MPI_RING = replace(OPEN_MPI_RING, name="the ring over MPI", few_bytes=4096)
KNOWN_ORDERS = {order.name: order for order in (GLOO_RING, OPEN_MPI_RING, MPI_RING)}


def order_named(name: str) -> KnownOrder | None:
    """Return the order of a name; None if it is unknown."""
    match = re.fullmatch(r"(.+) over hosts of ([2-9]|[1-9]\d+)", name)
    order = KNOWN_ORDERS.get(match[1] if match else name)
    return order.by_host(int(match[2])) if order and match else order


def known_order(
    controller: str,
    size: int,
    environment: Mapping[str, str],
    mpi_library: str = "",
    built_in: str = "",
    per_host: int = 1,
) -> KnownOrder:
    """Return the order in which Horovod sums over `size` ranks.

    `controller`: gloo or mpi. `environment`: as it was when Horovod was initialised. `built_in`:
    the name of the order in which this build of Horovod sums over MPI, if it has one of its own.
    `mpi_library`: else, the version string of MPI (`library_version` of the MPI transport); only
    the order of Open MPI is known. `per_host`: ranks of each host if Gloo adds these first, else 1;
    0: it does, and they are not adjacent. Raises UnknownOrder, with the setting required, for all
    others.
    """
    _require_fixed_order(controller, environment, per_host)
    if controller == "gloo":
        return GLOO_RING.by_host(per_host)
    if built_in:
        return KNOWN_ORDERS[built_in]
    if size > 2:
        _require_pinned_ring(environment, mpi_library)
    return OPEN_MPI_RING


def _require_fixed_order(controller: str, environment: Mapping[str, str], per_host: int) -> None:
    operations = environment.get("HOROVOD_CPU_OPERATIONS", controller).lower()
    _require(
        (
            controller not in ("gloo", "mpi") or operations != controller,
            f"{controller} with HOROVOD_CPU_OPERATIONS={operations}: not known",
        ),
        (
            environment.get("HOROVOD_FUSION_THRESHOLD") != "0",
            "with fusion the order of summation changes: HOROVOD_FUSION_THRESHOLD=0",
        ),
        (
            environment.get("HOROVOD_AUTOTUNE", "0").lower() in ON,
            "autotuning turns fusion on: unset HOROVOD_AUTOTUNE",
        ),
        (
            controller == "gloo" and per_host == 0,
            "the ranks of a host are not adjacent: start them host by host, or set "
            "HOROVOD_GLOO_HIERARCHICAL_ALLREDUCE=0",
        ),
    )


def _require_pinned_ring(environment: Mapping[str, str], mpi_library: str) -> None:
    rules = environment.get("OMPI_MCA_coll_tuned_use_dynamic_rules", "0").lower()
    algorithm = environment.get("OMPI_MCA_coll_tuned_allreduce_algorithm", "")
    foreign = [name for name in FOREIGN_COMPONENTS if name in environment]
    library = mpi_library.partition("\n")[0] or "an unnamed MPI"
    _require(
        (
            rules not in ON or algorithm not in ("4", "5", "ring", "segmented_ring"),
            "Open MPI chooses how it sums: set OMPI_MCA_coll_tuned_use_dynamic_rules=1 and "
            "OMPI_MCA_coll_tuned_allreduce_algorithm=4 (ring)",
        ),
        (foreign, f"{', '.join(foreign)}: Open MPI's algorithm is then not known"),
        (
            not mpi_library.startswith("Open MPI"),
            f"the order of summation of {library} is not known, only that of Open MPI",
        ),
    )


def _require(*checks: tuple[object, str]) -> None:
    """Raise UnknownOrder with the problem of the first check that holds, if any."""
    if reason := first_problem(*checks):
        raise UnknownOrder(reason)


def reproduce(values: Array, transport: Transport, order: KnownOrder, op: str = "average") -> Array:
    """Collective: return Horovod's reduction of `values`, as a new array, on every rank.

    `values`: any shape, the same shape and dtype on every rank. Each rank sends as much as in an
    all-reduce, or 1.5 times as much in an order by host. A NaN is also NaN in Horovod's result,
    but may have other bits there (see `differing_bits`). Raises ValueError for an op other than sum
    and average.
    """
    if op not in ("sum", "average"):
        raise ValueError(f"op={op!r}: an order is known for sum and average")
    rank, size = transport.rank, transport.size
    source = np.ascontiguousarray(values).reshape(-1)
    result = np.empty_like(source)
    scale = partial(scale_as_horovod, size=size if op == "average" else 1)
    add = order.half_sum if source.dtype == np.float16 else reduction(op, source.dtype)
    with np.errstate(all="ignore"):
        if few := order.summation_of(source, size):
            result[:] = few(list(gather(source, transport)))
            scale(result)
        elif order.per_host > 1 and source.size >= size:
            _add_by_host(source, result, transport, order, add, scale)
        else:
            segments = order.segments(source.size, source.itemsize, size)
            position = order.position(rank, size)
            transfers = all_reduce_transfers(source, result, segments, position, add, scale)
            run_transfers(transfers, transport, order.backwards)
    return result.reshape(values.shape)


def _add_by_host(
    source: Array,
    result: Array,
    transport: Transport,
    order: KnownOrder,
    add: Reduce,
    finish: Callable[[Array], object],
) -> None:
    """Collective: put the sum of every rank's `source` into `result`, all one-dimensional.

    The sum of a host is formed along its ranks, up to the last one. In the ring of all ranks these
    last ones add the sums of the hosts, and all others pass on what arrives. `finish` is called on
    complete sums.
    """
    size, local_rank = transport.size, transport.rank % order.per_host
    slices = _slices_of_hosts(source, size // order.per_host, order)
    by_host = list(chain.from_iterable(slices))
    values = np.concatenate([source[part] for part in by_host])
    ends = accumulate(sum(part.stop - part.start for part in parts) for parts in slices)
    run_transfers(chain_transfers(values, local_rank, order.per_host, add), transport)
    segments = [slice(0, 0)] * size
    for host, (start, stop) in enumerate(pairwise([0, *ends])):
        last = (host + 1) * order.per_host - 1
        segments[order.position(last, size)] = slice(start, stop)
    total, reduce = np.empty_like(values), add if local_rank == order.per_host - 1 else _pass_on
    position = order.position(transport.rank, size)
    transfers = all_reduce_transfers(values, total, segments, position, reduce, finish)
    run_transfers(transfers, transport, order.backwards)
    start = 0
    for part in by_host:
        stop = start + part.stop - part.start
        result[part], start = total[start:stop], stop


def _slices_of_hosts(source: Array, hosts: int, order: KnownOrder) -> list[list[slice]]:
    """Return, for each host, the slices of `source` whose sums over hosts begin there."""
    slices: list[list[slice]] = [[] for _ in range(hosts)]
    most = BY_HOST_PIECE_BYTES // source.itemsize
    for begin in range(0, source.size, most):
        for part in split_evenly(min(most, source.size - begin), order.per_host):
            first = begin + part.start
            segments = order.segments(part.stop - part.start, source.itemsize, hosts)
            for position, segment in enumerate(segments):
                host = order.position(position, hosts)  # its own inverse
                slices[host].append(slice(first + segment.start, first + segment.stop))
    return slices


def _pass_on(local: Array, arrived: Array, /, *, out: Array) -> None:
    np.copyto(out, arrived)


def scale_as_horovod(total: Array, size: int) -> None:
    """Turn a sum over `size` ranks into Horovod's average, in place."""
    if size == 1:
        return
    factor = 1.0 / size
    if total.dtype.kind == "i":
        total[:] = (total * factor).astype(total.dtype)  # cut off, towards zero
    else:
        wide = total.dtype == np.float64
        np.multiply(total, factor if wide else np.float32(factor), out=total)


def differing_bits(actual: Array, expected: Array) -> Array:
    """Return where two arrays of equal shape and dtype differ in any bit; NaNs count as equal.

    (Payload and sign of a NaN depend on the processor and on the order of operands.)
    """
    unsigned = f"u{expected.itemsize}"
    differ: Array = actual.view(unsigned) != expected.view(unsigned)
    if expected.dtype.kind == "f":
        differ &= ~(np.isnan(actual) & np.isnan(expected))
    return differ


def _divide_up(value: int, by: int) -> int:
    return -(-value // by)
