"""The C library's memory: kept between steps instead of given back and asked for again."""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h, described in mallopt(3)
NEVER, NONE = -1, 0
CHOSEN_BY_USER = (
    *("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"),
    *("MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_"),
)


def keep_freed_memory() -> bool:
    """Let what a step frees serve the next one; returns whether that was possible.

    A step of training frees its activations and gradients, and the next allocates as much. glibc
    gives large blocks, and the free end of its heap, back to the kernel, which must then clear and
    map every page anew. The process keeps the most memory that it has needed until it ends.
    Nothing is changed where the user has set glibc's own variables, or the C library is another.
    """
    if any(name in os.environ for name in CHOSEN_BY_USER):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, NEVER) and mallopt(M_MMAP_MAX, NONE))
