"""Horovod's results against their reproduction, bit for bit, on real workers."""

from __future__ import annotations

import json
import re
import sys

import pytest

from hvdtrain.ring.orders import GLOO_RING, MPI_RING, KnownOrder
from tests.parallel.exact_checks import DTYPES
from tests.parallel.launching import TWO_HOSTS, horovodrun


@pytest.mark.parametrize(
    ("size", "controller", "hosts", "memory", "order"),
    [
        (3, "gloo", "", "", GLOO_RING),
        (4, "gloo", TWO_HOSTS, "", GLOO_RING.by_host(2)),
        (4, "mpi", "", "1", MPI_RING),
        (3, "mpi", "", "0", MPI_RING),
    ],
)
def test_horovods_sums_and_averages_in_every_bit(
    size: int,
    controller: str,
    hosts: str,
    memory: str,
    order: KnownOrder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fails if any element of any case differs in a bit, or a wrong order passes for the right; if
    ranks of two hosts are not added by host; or if those of one do not share memory over MPI, or do
    although they shall not.
    """
    if memory:
        monkeypatch.setenv("HOROVOD_MPI_SHARED_MEMORY", memory)
    command = [sys.executable, "-m", "tests.parallel.exact_checks"]
    finished = horovodrun(size, controller, command, hosts, timeout_s=250)
    assert finished.exit_code == 0, finished.output
    lines = [json.loads(line) for line in re.findall(r'\{"order": .*\}', finished.output)]
    right = [line for line in lines if not line["wrong_order"]]
    wrong = [line for line in lines if line["wrong_order"]]
    assert [line for line in right if line["differing"]] == []
    assert {line["order"] for line in right} == {order.name}
    assert {line["dtype"] for line in right} == set(DTYPES)
    assert right[-1]["in_memory"] == (memory == "1")
    assert 3_000_001 in {line["length"] for line in right}
    assert len(right) > 80
    assert wrong
    assert all(line["differing"] for line in wrong)
