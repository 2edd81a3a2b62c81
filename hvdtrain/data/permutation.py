"""Orders of samples that are computed, not stored: any stretch of an epoch, in constant memory.

A seeded permutation of n numbers is an unbalanced Feistel network over pairs of digits, with cycle
walking. A number i is written as (left, right) = divmod(i, b), with left < a and right < b. Each
round adds a pseudorandom function of one digit to the other, modulo a or b, and so can be undone:

    left  <- left  + F_1(right)   mod a
    right <- right + F_2(left)    mod b
    ...

So it permutes the a b pairs. With a = ceil(sqrt(n)) and b = ceil(n / a) that is fewer than a more
than n; a result that is not below n is put in again, until one is. This visits the cycle of the
permutation that it is on, which leads back below n at the latest at its start, and leaves a
permutation of the n numbers. Only one in sqrt(n) results is put in again.

M. Luby, C. Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", SIAM
J. Comput. 17(2), 1988: the network. J. Black, P. Rogaway, "Ciphers with arbitrary finite domains",
CT-RSA 2002: two digits modulo a and b, and cycle walking. R. Mitchell, D. Stokes, E. Frank, G.
Holmes, "Bandwidth-optimal random shuffling for GPUs", ACM Trans. Parallel Comput. 9(1), 2022: such
a network as a shuffle, with a multiplication as the round function, and 24 rounds.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Words = NDArray[np.uint64]

ROUNDS = 24
# At a time, so that all intermediate arrays stay in a core's own cache.
BLOCK = 16_384
MOST = 2**62  # digits then have at most 32 bits, and their products with 32 bits fit in 64
# Odd multipliers of SplitMix64: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number
# generators", OOPSLA 2014.
MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)


class Permutation:
    """A permutation of 0 .. length - 1, a pure function of `length`, `seed` and `key`."""

    def __init__(self, length: int, seed: int, key: tuple[int, ...]) -> None:
        """Raise ValueError for a length above 2^62."""
        if not 0 <= length <= MOST:
            raise ValueError(f"{length=}: must be at most 2^62")
        self.length = length
        self._a = math.isqrt(max(length - 1, 0)) + 1
        self._b = max(-(-length // self._a), 1)
        self._keys = np.random.SeedSequence(seed, spawn_key=key).generate_state(ROUNDS, np.uint64)

    def between(self, start: int, stop: int) -> Indices:
        """Return the numbers at the positions start .. stop - 1."""
        numbers = np.empty(max(stop - start, 0), dtype=np.int64)
        for begin in range(0, len(numbers), BLOCK):
            part = numbers[begin : begin + BLOCK]
            first = start + begin
            part[:] = self._of(np.arange(first, first + len(part), dtype=np.uint64))
        return numbers

    def _of(self, numbers: Words) -> Words:
        results = self._once(numbers)
        length = np.uint64(self.length)
        while len(outside := np.flatnonzero(results >= length)):
            results[outside] = self._once(results[outside])
        return results

    def _once(self, numbers: Words) -> Words:
        """Return the results of the network, which may be `length` or more."""
        b = np.uint64(self._b)
        left = numbers // b
        right = numbers - left * b
        mixed, other = np.empty_like(left), np.empty_like(left)
        sides = [(left, right, np.uint64(self._a)), (right, left, b)]
        for key, (changed, read, modulus) in zip(self._keys, itertools.cycle(sides), strict=False):
            np.add(read, key, out=mixed)
            np.multiply(mixed, MULTIPLIERS[0], out=mixed)
            np.right_shift(mixed, _HALF, out=other)
            np.bitwise_xor(mixed, other, out=mixed)
            np.multiply(mixed, MULTIPLIERS[1], out=mixed)
            np.right_shift(mixed, _HALF, out=mixed)
            # From 32 bits to 0 .. modulus - 1.
            np.multiply(mixed, modulus, out=mixed)
            np.right_shift(mixed, _HALF, out=mixed)
            np.add(changed, mixed, out=changed)
            # The sum is below twice the modulus; a difference below zero becomes a huge number.
            np.subtract(changed, modulus, out=other)
            np.minimum(changed, other, out=changed)
        results: Words = left * b + right
        return results


class MergedOrder:
    """The permutations of several parts of an epoch, merged in proportion.

    Sample j of the order of a part of n samples is placed at the time (j + 1/2) / n of the epoch;
    of equal times, the earlier part comes first. By a time t a part has t n samples, give or take a
    half. So the samples at given positions lie in a stretch of each part that is known beforehand,
    give or take the number of parts, and only these stretches are sorted. (Times differ as float64
    up to 2^51 samples in a part.)
    """

    def __init__(self, orders: Sequence[Permutation]) -> None:
        """`orders`: of each part, whose samples are numbered after those of the parts before."""
        self._orders = [order for order in orders if order.length]
        lengths = [order.length for order in self._orders]
        self._starts = list(itertools.accumulate(lengths[:-1], initial=0))
        self.length = sum(lengths)

    def between(self, start: int, stop: int) -> Indices:
        """Return the numbers at the positions start .. stop - 1."""
        if len(self._orders) == 1:
            return self._orders[0].between(start, stop)
        margin, before = len(self._orders), 0
        samples, times = [], []
        for order, first in zip(self._orders, self._starts, strict=True):
            # In integers, as the ends must not depend on rounding.
            low = max((start - margin) * order.length // self.length - 1, 0)
            high = min((stop + margin) * order.length // self.length + 2, order.length)
            before += low
            samples.append(order.between(low, high) + first)
            # Each time is rounded alike in every call, so all calls agree on the order.
            times.append((np.arange(low, high) + 0.5) / order.length)
        merged = np.argsort(np.concatenate(times), kind="stable")[start - before : stop - before]
        return np.concatenate(samples)[merged]
