"""Which elements an audit looks at."""

from __future__ import annotations

from collections import Counter

import pytest

from hvdtrain.audit.capture import BLOCK_ELEMENTS, Parts, Piece

LENGTHS = {
    "usual": [150, 6, 0, 2400, 16, 1],
    "none": [],
    "empty": [0, 0],
    "one": [1],
    "long": [BLOCK_ELEMENTS + 5, 7],
}


def elements(pieces: list[Piece]) -> Counter[tuple[int, int]]:
    return Counter(
        (piece.parameter, index) for piece in pieces for index in range(piece.start, piece.stop)
    )


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("parts", [1, 2, 7, 100])
@pytest.mark.parametrize("whole", [False, True])
def test_all_elements_come_once_in_a_cycle(lengths: list[int], parts: int, whole: bool) -> None:
    """Fails if an element is never audited, or twice in a cycle, or a piece crosses a border."""
    dealt = Parts(lengths, parts, 5, whole)
    everything = {(p, i): 1 for p, length in enumerate(lengths) for i in range(length)}
    for cycle in (0, 3):
        pieces = [dealt.of_audit(cycle * parts + part) for part in range(parts)]
        assert elements([piece for part in pieces for piece in part]) == everything
        for part in pieces:
            assert part == sorted(part)
            for piece in part:
                assert 0 <= piece.start < piece.stop <= lengths[piece.parameter]
                if whole:
                    assert piece.stop - piece.start == lengths[piece.parameter]
                else:
                    assert piece.stop - piece.start <= BLOCK_ELEMENTS


def test_parts_are_even() -> None:
    """Fails if one audit costs several times another."""
    dealt = Parts([150, 6, 2400, 16, 48_000, 120, 10_080, 84, 840, 10], 20, 1, uncut=False)
    sizes = [elements(dealt.of_audit(number)).total() for number in range(20)]
    assert max(sizes) < 2 * sum(sizes) / len(sizes)


def test_cycles_and_seeds_deal_differently() -> None:
    """Fails if the same elements always meet, so that a fault with a rhythm hides."""
    first = Parts([1000, 3000], 10, 1, uncut=False)
    again = Parts([1000, 3000], 10, 1, uncut=False)
    other = Parts([1000, 3000], 10, 2, uncut=False)
    assert [first.of_audit(n) for n in range(20)] == [again.of_audit(n) for n in range(20)]
    assert first.of_audit(0) != first.of_audit(10)
    assert first.of_audit(0) != other.of_audit(0)
