"""Verification of an installation: every collective against the ring reference.

cases         operations, dtypes, sizes, ways of submission, and the values
collectives   runners, which submit cases to the collectives under test; faults to inject
reference     the ring's results, the rounding bound, and the element with the largest error
running       one case after the other on all ranks: repeated, compared, reports exchanged
verification  `hvdtrain verify`: the table, the JSON, and the explanation of a mismatch

The names that the flags accept are here, as the command line must not import NumPy or torch.
"""

# Horovod 0.28.1 offers no other reductions for reducescatter.
OPERATIONS = (
    *("allreduce-sum", "allreduce-average", "allreduce-min", "allreduce-max"),
    *("reducescatter-sum", "reducescatter-average", "allgather", "broadcast"),
)
DTYPES = ("float16", "float32", "float64", "int32", "int64")
FAULTS = (  # of `hvdtrain.evidence.verify.collectives`
    *("bitflip", "drop-rank", "sum-for-mean", "mean-for-sum", "swap-results", "stale"),
    *("nan", "half-precision"),
)
