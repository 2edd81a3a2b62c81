"""Random numbers that belong to a sample or a batch, in torch, NumPy and `random`.

The global generators are seeded for each sample, so that augmentation depends on no rank, process
or earlier sample. To seed and restore them takes longer than to read a small sample: `marks` shows
cheaply whether something has drawn, so that it is done only where something does.
"""

import ctypes
import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

OF_SAMPLE, OF_BATCH, OF_EPOCH, OF_ORDER = range(4)  # purposes of random numbers

_KEY_BYTES = 4 * 624  # of the Mersenne Twister; a 32-bit position follows
NumPyState = Any  # of `np.random.get_state()`
Marks = tuple[bytes, tuple[int, int, float | None], Any]


@contextmanager
def drawing(seed: int, epoch: int, index: int, purpose: int = OF_SAMPLE) -> Iterator[None]:
    """Seed all random generators for a sample; afterwards they continue as before."""
    with kept():
        seed_for(seed, epoch, index, purpose)
        yield


def seed_for(seed: int, epoch: int, index: int, purpose: int = OF_SAMPLE) -> None:
    """Seed all random generators for a sample, within `kept`."""
    of_torch, of_numpy, of_python = _seeds(seed, epoch, index, purpose)
    torch.default_generator.manual_seed(of_torch)
    np.random.seed(of_numpy)
    random.seed(of_python)


@functools.lru_cache(maxsize=8)
def torch_state_of(seed: int, epoch: int) -> torch.Tensor:
    """Return a state of torch's generator for code that does not draw.

    Its seed can be read without drawing (`torch.initial_seed()`): so it is one of the epoch, the
    same on each rank.
    """
    return torch.Generator().manual_seed(_seeds(seed, epoch, 0, OF_EPOCH)[0]).get_state()


def _seeds(seed: int, epoch: int, index: int, purpose: int) -> tuple[int, int, int]:
    """Return the seeds of torch, with 63 bits, of NumPy and of `random`."""
    sequence = np.random.SeedSequence(seed, spawn_key=(epoch, index, purpose))
    high, low, of_numpy, of_python = sequence.generate_state(4, np.uint32).tolist()
    return high << 31 | low >> 1, of_numpy, of_python


@contextmanager
def kept() -> Iterator[None]:
    """Let all random generators continue as before once this context is left."""
    in_torch, in_python = torch.get_rng_state(), random.getstate()
    in_numpy = _numpy.get()
    if in_numpy[3]:  # whoever takes the number that was kept back draws, and moves nothing
        np.random.set_state((*in_numpy[:3], 0, 0.0))
    before = _numpy.mark()
    try:
        yield
    finally:
        torch.set_rng_state(in_torch)
        random.setstate(in_python)
        if in_numpy[3] or _numpy.mark() != before:
            np.random.set_state(in_numpy)


def marks() -> Marks:
    """Return what changes whenever a generator is used or seeded, within `kept`."""
    _, words, gauss = random.getstate()
    # A whole turn of the generator leaves its position, the last word, and changes the first.
    in_python = (words[0], words[-1], gauss)
    return torch.get_rng_state().numpy().tobytes(), in_python, _numpy.mark()


class _NumPy:
    """NumPy's global generator, whose memory is read: 50 times as fast as `get_state()`."""

    def __init__(self) -> None:
        self._without_gauss: bytes | None = None  # the memory at a state that keeps no number back

    def mark(self) -> Any:
        """Return what changes when a number is drawn, unless one is taken that was kept back."""
        memory = self._memory()
        if memory is not None:
            return memory
        name, key, *rest = np.random.get_state()
        return name, np.asarray(key).tobytes(), *rest

    def get(self) -> NumPyState:
        """Return the state, as `get_state()` does."""
        memory = self._memory()
        if memory is not None and memory == self._without_gauss:
            return _as_state(memory)
        state: NumPyState = np.random.get_state()
        self._without_gauss = None if state[3] else memory
        return state

    def _memory(self) -> bytes | None:
        """Return the memory of the generator; None if its layout is not known."""
        generator: Any = np.random.mtrand.get_bit_generator()
        if type(generator) is not np.random.MT19937 or not _layout_is_known():
            return None
        return _memory_of(generator)


def _memory_of(generator: Any) -> bytes:
    return ctypes.string_at(generator.ctypes.state_address, _KEY_BYTES + 4)


def _as_state(memory: bytes) -> NumPyState:
    key = np.frombuffer(memory, np.uint32, _KEY_BYTES // 4)
    return "MT19937", key, int.from_bytes(memory[_KEY_BYTES:], "little"), 0, 0.0


@functools.cache
def _layout_is_known() -> bool:
    """Return whether the memory of a generator is what NumPy's own state says."""
    generator = np.random.MT19937(1)
    generator.random_raw(5)
    stated: Any = generator.state["state"]
    _, key, position, *_ = _as_state(_memory_of(generator))
    return position == stated["pos"] and np.array_equal(key, stated["key"])


_numpy = _NumPy()
