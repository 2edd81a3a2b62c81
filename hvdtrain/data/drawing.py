"""Random numbers that belong to a sample or a batch, in torch, NumPy and `random`.

The global generators are seeded for each sample, so that augmentation depends on no rank, process
or earlier sample. To seed and restore them takes longer than to read a small sample: `marks` shows
cheaply whether something has drawn, so that it is done only where something does.
"""

import ctypes
import functools
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

OF_SAMPLE, OF_BATCH, OF_EPOCH, OF_ORDER = range(4)  # purposes of random numbers

_KEY_BYTES = 4 * 624  # of the Mersenne Twister; a 32-bit position follows
Marks = tuple[bytes, Any, Any]


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
    in_torch, in_python, in_numpy = torch.get_rng_state(), _python.get(), _numpy.get()
    if in_numpy[3]:  # whoever takes the number that was kept back draws, and moves nothing
        np.random.set_state((*in_numpy[:3], 0, 0.0))
    before = _python.mark(), _numpy.mark()
    try:
        yield
    finally:
        torch.set_rng_state(in_torch)
        if _python.mark() != before[0]:
            random.setstate(in_python)
        if in_numpy[3] or _numpy.mark() != before[1]:
            np.random.set_state(in_numpy)


def marks() -> Marks:
    """Return what changes whenever a generator is used or seeded, within `kept`."""
    return torch.get_rng_state().numpy().tobytes(), _python.mark(), _numpy.mark()


class _Watched:
    """A global generator, whose memory is read: 5 to 50 times as fast as its state."""

    def __init__(
        self,
        get_state: Callable[[], Any],
        memory: Callable[[], Any],
        hidden: Callable[[Any], Any] = lambda state: None,
    ) -> None:
        """`memory`: returns what changes with the state; None if its layout is not known.
        `hidden`: returns what of a state its memory does not show.
        """
        self._get_state, self._memory, self._hidden = get_state, memory, hidden
        self._known: tuple[Any, Any] = (None, None)  # memory, and the state that it stands for

    def mark(self) -> Any:
        """Return what changes when a number is drawn (but for one that NumPy has kept back)."""
        memory = self._memory()
        return pickle.dumps(self._get_state()) if memory is None else memory

    def get(self) -> Any:
        """Return the state."""
        memory = self._memory()
        if memory is None or memory != self._known[0]:
            state = self._get_state()
            if self._hidden(state):
                return state
            self._known = memory, state
        return self._known[1]


def _numpy_memory() -> bytes | None:
    generator: Any = np.random.mtrand.get_bit_generator()
    if type(generator) is not np.random.MT19937 or not _numpy_layout_is_known():
        return None
    return _memory_of_numpy(generator)


def _memory_of_numpy(generator: Any) -> bytes:
    return ctypes.string_at(generator.ctypes.state_address, _KEY_BYTES + 4)


@functools.cache
def _numpy_layout_is_known() -> bool:
    """Return whether the memory of a generator is what NumPy's own state says."""
    generator = np.random.MT19937(1)
    generator.random_raw(5)
    stated: Any = generator.state["state"]
    expected = np.append(stated["key"], stated["pos"]).astype(np.uint32)
    return _memory_of_numpy(generator) == expected.tobytes()


def _python_memory() -> tuple[bytes, float | None] | None:
    generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
    if not _python_layout_is_known():
        return None
    return _memory_of_python(generator), generator.gauss_next


def _memory_of_python(generator: random.Random) -> bytes:
    return ctypes.string_at(id(generator) + object.__basicsize__, 4 + _KEY_BYTES)


@functools.cache
def _python_layout_is_known() -> bool:
    """Return whether the memory of a generator is what its own state says (CPython's position comes
    before its key: Modules/_randommodule.c).
    """
    generator = random.Random(1)
    if type(generator).__basicsize__ < object.__basicsize__ + 4 + _KEY_BYTES:
        return False
    generator.random()
    *key, position = generator.getstate()[1]
    return _memory_of_python(generator) == np.array([position, *key], np.uint32).tobytes()


_numpy = _Watched(lambda: np.random.get_state(), _numpy_memory, lambda state: state[3])
_python = _Watched(random.getstate, _python_memory)
