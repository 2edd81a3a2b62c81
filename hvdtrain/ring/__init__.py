"""The ring all-reduce in plain Python: the reference that gradients are checked against.

algorithm    the ring: diagram, steps and cost; its transfers, and the collectives made of them
operations   sum, average, min and max: dtypes, rounding, NaN; even segments
bound        the proven rounding bound of a sum or an average
orders       the known orders of addition of Horovod's sums, reproduced bit for bit
canonical    the sum of virtual shares through integers: the same bits for any number of ranks
transports   between neighbours: in process, TCP, MPI

It depends on NumPy only, not on torch or Horovod: a reference is independent of what it checks.
"""

from hvdtrain.ring.algorithm import all_gather, all_reduce, broadcast, gather, reduce_scatter
from hvdtrain.ring.bound import average_error_bound, gamma
from hvdtrain.ring.canonical import canonical_all_reduce, canonical_error_bound, canonical_sum
from hvdtrain.ring.operations import split_evenly
from hvdtrain.ring.transports import Transport

__all__ = [
    "Transport",
    "all_gather",
    "all_reduce",
    "average_error_bound",
    "broadcast",
    "canonical_all_reduce",
    "canonical_error_bound",
    "canonical_sum",
    "gamma",
    "gather",
    "reduce_scatter",
    "split_evenly",
]
