"""Each check of checks.py, on 2 to 4 real workers and both controllers; three jobs in all."""

from __future__ import annotations

import functools
import json
import re
import sys

import pytest

from tests.parallel.checks import CHECKS
from tests.parallel.launching import Finished, horovodrun


@functools.cache
def results(size: int, controller: str) -> tuple[dict[str, list[str | None]], Finished]:
    try:
        finished = horovodrun(size, controller, [sys.executable, "-m", "tests.parallel.checks"])
    except AssertionError as error:  # it hung: once is enough for all checks of this job
        finished = Finished(-1, str(error), 0)
    lines = re.findall(r'\{"check": .*\}', finished.output)
    return {line["check"]: line["problems"] for line in map(json.loads, lines)}, finished


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(("size", "controller"), [(2, "mpi"), (3, "gloo"), (4, "mpi")])
def test_check(size: int, controller: str, check: object) -> None:
    """Fails if the check of this name raised on any rank, or was not reached."""
    name = check.__name__
    problems, finished = results(size, controller)
    assert finished.exit_code == 0, finished.output
    assert name in problems, finished.output
    assert problems[name] == [None] * size, "\n".join(map(str, problems[name]))


AWAITED = """\
import time, torch
from hvdtrain.exchange.horovod import HorovodExchange
exchange = HorovodExchange()
exchange.sum_later(torch.ones(3), "first")()
began_s = time.monotonic()
for number in range(8):
    assert exchange.sum_later(torch.ones(3), f"sum.{number}")().tolist() == [2.0] * 3
print(f"sums after {time.monotonic() - began_s}\\n", end="")
exchange.close()
"""


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_a_sum_that_is_waited_for_is_not_put_off(controller: str) -> None:
    """Fails if each sum waits for Horovod's next cycle, though both ranks wait for its result."""
    command, variables = [sys.executable, "-c", AWAITED], {"HOROVOD_CYCLE_TIME": "1000"}
    finished = horovodrun(2, controller, command, variables=variables)
    assert finished.exit_code == 0, finished.output
    seconds = [float(text) for text in re.findall(r"sums after ([.\d]+)", finished.output)]
    assert len(seconds) == 2 and max(seconds) < 4, seconds  # 8 cycles of a second


ALONE = """\
import torch, hvdtrain
from hvdtrain.exchange import joined
workers = hvdtrain.init()
assert joined().controller == "gloo"
for dtype in (torch.bfloat16, torch.float32):
    model = torch.nn.Linear(3, 2, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvdtrain.distribute(model, optimizer, grad_accum_steps=2)
    model(torch.tensor([[1, torch.inf, 1]], dtype=dtype)).sum().backward()
    assert joined().reduce_gradients(optimizer, look=True) is False
    optimizer.step()
print("stepped")
"""


def test_a_single_rank_knows_nothing_of_its_gradients() -> None:
    """Fails if one rank of Horovod, which sums nothing, takes its gradients for finite, or waits
    for a gradient that has not begun, as after the first of two backward passes.
    """
    finished = horovodrun(1, "gloo", [sys.executable, "-c", ALONE])
    assert finished.exit_code == 0, finished.output
    assert "stepped" in finished.output
