"""How messages name many ranks and hosts."""

from __future__ import annotations

import pytest

from hvdtrain.errors import name_ranks
from hvdtrain.launcher.doctor import Finding, format_findings


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 1, 2], "ranks 0, 1, 2"),
        ([0, 2], "ranks 0, 2"),
        ([0, 1, 2, 3], "ranks 0 to 3"),
        ([*range(31), *range(32, 512)], "ranks 0 to 30, 32 to 511"),
        ([1, 5, 6, 7, 8, 510, 511], "ranks 1, 5 to 8, 510, 511"),
    ],
)
def test_ranks_are_named_in_one_line(ranks: list[int], text: str) -> None:
    """Fails if a message about a job of hundreds lists every rank, or leaves one out."""
    assert name_ranks(ranks) == text


def test_a_finding_of_many_hosts_is_one_line() -> None:
    """Fails if the doctor names hundreds of hosts with the same finding."""
    findings = [Finding("memory", "warn", f"host{n}", "1 GiB free") for n in range(500)]
    text = format_findings(findings)
    assert text.endswith("host14, host15, and 484 more: 1 GiB free")
