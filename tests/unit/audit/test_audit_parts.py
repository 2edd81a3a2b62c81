"""Which elements an audit looks at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain

import pytest

from hvdtrain.audit.capture import BLOCK_ELEMENTS, Groups, Parts, Piece

LENGTHS = {
    "usual": [150, 6, 0, 2400, 16, 1],
    "none": [],
    "empty": [0, 0],
    "one": [1],
    "long": [BLOCK_ELEMENTS + 5, 7],
}


GROUPS: dict[str, Callable[[int], Groups | None]] = {
    "cut": lambda count: None,
    "whole": lambda count: [[it] for it in range(count)],
    "pairs": lambda count: [list(range(count))[it::2] for it in range(2)],
}


def elements(groups: list[list[Piece]]) -> Counter[tuple[int, int]]:
    return Counter(
        (it.parameter, index)
        for it in chain.from_iterable(groups)
        for index in range(it.start, it.stop)
    )


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("parts", [1, 2, 7, 100])
@pytest.mark.parametrize("kind", GROUPS)
def test_all_elements_come_once_in_a_cycle(lengths: list[int], parts: int, kind: str) -> None:
    """Fails if an element is never audited, or twice in a cycle, a piece crosses a border, or
    parameters that are reduced together are audited apart.
    """
    whole = GROUPS[kind](len(lengths))
    dealt = Parts(lengths, parts, 5, whole)
    everything = {(p, i): 1 for p, length in enumerate(lengths) for i in range(length)}
    for cycle in (0, 3):
        groups = [it for part in range(parts) for it in dealt.of_audit(cycle * parts + part)]
        assert elements(groups) == everything
        for group in groups:
            assert group == sorted(group)
            assert all(0 <= it.start < it.stop <= lengths[it.parameter] for it in group)
            if whole:
                own = [it for it in whole if group[0].parameter in it]
                assert [[it.parameter for it in group]] == [[n for n in own[0] if lengths[n]]]
                assert all(it.stop - it.start == lengths[it.parameter] for it in group)
            else:
                assert len(group) == 1 and group[0].length <= BLOCK_ELEMENTS


def test_parts_are_even() -> None:
    """Fails if one audit costs several times another."""
    dealt = Parts([150, 6, 2400, 16, 48_000, 120, 10_080, 84, 840, 10], 20, 1)
    sizes = [elements(dealt.of_audit(number)).total() for number in range(20)]
    assert max(sizes) < 2 * sum(sizes) / len(sizes)


def test_cycles_and_seeds_deal_differently() -> None:
    """Fails if the same elements always meet, so that a fault with a rhythm hides."""
    first = Parts([1000, 3000], 10, 1)
    again = Parts([1000, 3000], 10, 1)
    other = Parts([1000, 3000], 10, 2)
    assert [first.of_audit(n) for n in range(20)] == [again.of_audit(n) for n in range(20)]
    assert first.of_audit(0) != first.of_audit(10)
    assert first.of_audit(0) != other.of_audit(0)
