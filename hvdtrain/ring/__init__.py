"""The ring all-reduce in plain Python: the reference that gradients are checked against.

N ranks form a ring. Each rank sends only to its right neighbour (rank + 1) and receives only from
its left neighbour (rank - 1). The buffer is cut into N segments, whose lengths may differ.

                     +------+      +------+      +------+
                +--> | rank0| ---> | rank1| ---> | rank2| ---+
                |    +------+      +------+      +------+    |
                +--------------------------------------------+

Phase 1, reduce-scatter (N - 1 steps): a received segment is added to the local one.
Phase 2, all-gather     (N - 1 steps): a received segment replaces the local one.

At step s = 0 .. N - 2, indices modulo N:

    phase            rank r sends      rank r receives     after the last step rank r holds
    reduce-scatter   segment r - s     segment r - s - 1   the complete sum of segment r + 1
    all-gather       segment r + 1 - s segment r - s       the complete sum of every segment

For N = 3 (one row per step; "a>b:k" means "rank a sends segment k to rank b"):

    step 1  reduce-scatter   0>1:0   1>2:1   2>0:2
    step 2  reduce-scatter   0>1:2   1>2:0   2>0:1
    step 3  all-gather       0>1:1   1>2:2   2>0:0
    step 4  all-gather       0>1:0   1>2:1   2>0:2

Cost: each rank sends 2 (N - 1) / N of the buffer's bytes, in 2 (N - 1) messages, and receives as
many. The bytes per rank are nearly independent of N: this is why rings scale.

Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", J. Parallel Distrib. Comput. 69 (2009) 117-124.

This package depends on NumPy only, not on torch or Horovod: a reference must be independent of what
it checks.
"""

from hvdtrain.ring.algorithm import all_gather, all_reduce, broadcast, gather, reduce_scatter
from hvdtrain.ring.bound import average_error_bound, gamma
from hvdtrain.ring.operations import split_evenly
from hvdtrain.ring.transports import Transport

__all__ = [
    "Transport",
    "all_gather",
    "all_reduce",
    "average_error_bound",
    "broadcast",
    "gamma",
    "gather",
    "reduce_scatter",
    "split_evenly",
]
