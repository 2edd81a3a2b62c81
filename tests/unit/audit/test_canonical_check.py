"""The exact audit of canonical sums: parameters are compared together, and told apart."""

from __future__ import annotations

import pytest
import torch

from hvdtrain.audit import Auditor, AuditRecord
from hvdtrain.audit.checks import CanonicalCheck
from hvdtrain.errors import AuditMismatch
from hvdtrain.ring import Transport, canonical_sum
from tests.rings import Counting, run_in_process

LENGTHS = {"a": 300, "b": 1, "c": 70_000, "d": 257, "e": 5}
SHARES = {0: [0], 1: [], 2: [1, 2, 3]}  # by rank; one has none


def gradient(share: int, name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * share + ord(name))
    return torch.randn(LENGTHS[name], generator=generator) * 10.0 ** (share - ord(name) % 5)


def audited(wrong: tuple[int, str, int] | None, parts: int) -> list[tuple[str, int]]:
    """Each rank's result and number of messages; `wrong`: a rank's element with one other bit."""

    def work(transport: Transport) -> tuple[str, int]:
        counting, records = Counting(transport), list[AuditRecord]()
        model = torch.nn.ParameterDict({n: torch.zeros(k) for n, k in LENGTHS.items()})
        check = CanonicalCheck(counting, 4)
        audit = Auditor(model, counting, 1, records.append, check, parts)
        for step in range(1, parts + 1):
            audit.begin(step)
            for share in SHARES[transport.rank]:
                audit.begin_pass(share)
                for name, parameter in model.items():
                    parameter.grad = None
                    (parameter * gradient(share, name)).sum().backward()
            for name, parameter in model.items():
                shares = [gradient(share, name).numpy() for share in range(4)]
                parameter.grad = torch.from_numpy(canonical_sum(shares, 4))
                if wrong and wrong[:2] == (transport.rank, name):
                    parameter.grad.view(torch.int32)[wrong[2]] ^= 1
            try:
                audit.reduced(step)
            except AuditMismatch as error:
                return str(error), 0
            audit.updated(step, None)
        assert [record.ok for record in records] == [True] * parts
        return "", sum(map(bool, counting.sent))

    return run_in_process(3, work)


@pytest.mark.parametrize("parts", [1, 2])
def test_honest_sums_pass(parts: int) -> None:
    """Fails if a reference differs in a bit where parameters are compared together, or if each
    parameter is an exchange of its own.
    """
    results = audited(None, parts)
    assert {text for text, _ in results} == {""}
    if parts == 1:  # exponents and integers of (a, b), (c) and (d, e), in turn; then the errors
        assert max(count for _, count in results) == 3 * 2 * 2 * (3 - 1) + (3 - 1)


@pytest.mark.parametrize("wrong", [(1, "b", 0), (0, "c", 69_999), (2, "e", 4), (2, "d", 256)])
def test_one_bit_is_found_and_named(wrong: tuple[int, str, int]) -> None:
    """Fails if a wrong element is missed, or taken for one of another parameter."""
    for text, _ in audited(wrong, 1):
        for part in (f"rank {wrong[0]}", f"parameter {wrong[1]}, index [{wrong[2]}]"):
            assert part in text, text
