"""Reuse of freed memory between steps, instead of returning it to the kernel."""

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
    """Make glibc keep freed memory for the next step; return whether that was possible.

    A training step frees its activations and gradients, and the next allocates as much. glibc
    returns large blocks, and the free end of its heap, to the kernel, which must then clear and map
    every page again. With this setting the process keeps its peak memory until it ends. Nothing is
    changed if the user has set glibc's own variables, or with another C library.
    """
    if any(name in os.environ for name in CHOSEN_BY_USER):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, NEVER) and mallopt(M_MMAP_MAX, NONE))
