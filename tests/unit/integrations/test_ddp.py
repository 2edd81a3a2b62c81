"""The callbacks of other trainers in one process; tests/parallel/test_trainers.py has several."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from hvdtrain.errors import AuditMismatch, UsageError
from hvdtrain.integrations import ddp
from hvdtrain.integrations.ddp import TrainingWatch
from hvdtrain.pulse import PULSE_FD, STACKS_SIGNAL


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The agent's end of the pipe of this process."""
    reading, writing = os.pipe()
    monkeypatch.setenv(PULSE_FD, str(writing))
    yield reading
    faulthandler.unregister(STACKS_SIGNAL)
    for fd in (reading, writing):
        os.close(fd)


def phases(pipe: int) -> list[str]:
    """Phase and step of each report so far."""
    lines = os.read(pipe, 1 << 16).decode().splitlines()
    return [" ".join(line[1:].split()[:2]) for line in lines if line[0] == "+"]


def test_phases_of_a_step(pipe: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Fails if a phase is not reported in which a rank may stop, an evaluation counts as a step,
    or hooks stay in the model.
    """
    model = torch.nn.Linear(3, 2)
    watch = TrainingWatch(1, 1, "none", None)
    watch.begin(model, 4, 9, exchanges=lambda: True)
    watch.begin_step()
    model(torch.ones(1, 3)).sum().backward()
    watch.end_step(5)
    with torch.no_grad():
        watch.evaluate()
        model(torch.ones(1, 3))
    watch.end()
    assert phases(pipe) == [
        *("data 5", "compute 5", "compute 5", "update 5", "data 6", "evaluate 6", "end 6")
    ]
    watch.evaluate()  # after the training
    assert phases(pipe) == ["end 6"]
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert "a single worker exchanges nothing" in capfd.readouterr().out


def test_the_end_of_a_backward_pass() -> None:
    """Fails if gradients are compared before the last of them is made and DDP has waited for it,
    more than once in a pass with several outputs, or where they are only accumulated.
    """
    model, exchanges, waited = torch.nn.Linear(3, 2), [False], [False]
    seen: list[tuple[bool, bool]] = []

    def check() -> None:
        seen.append((model.weight.grad is not None and model.bias.grad is not None, waited[0]))

    def wait_as_ddp_does(_: torch.Tensor) -> None:
        ddp._queue(lambda: waited.insert(0, True))

    watch = TrainingWatch(1, 1, "none", None)
    watch.begin(model, 0, 9, exchanges=lambda: exchanges[0])
    watch._audit = SimpleNamespace(check=check)  # type: ignore[assignment]
    model.bias.register_post_accumulate_grad_hook(wait_as_ddp_does)
    for exchanges[0], expected in ((False, []), (True, [(True, True)])):
        waited[0] = False
        (model(torch.ones(1, 3)) * model(torch.ones(1, 3))).sum().backward()
        assert seen == expected


def test_a_mismatch_ends_the_backward_pass() -> None:
    """Fails if autograd replaces the error of the comparison by one of its own."""
    model = torch.nn.Linear(3, 2)

    def check() -> None:
        raise AuditMismatch("wrong at step 1")

    watch = TrainingWatch(1, 1, "none", None)
    watch.begin(model, 0, 9, exchanges=lambda: True)
    watch._audit = SimpleNamespace(check=check)  # type: ignore[assignment]
    with pytest.raises(AuditMismatch, match="wrong at step 1"):
        model(torch.ones(1, 3)).sum().backward()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ((0, 1, "none"), "AuditCallback: every=0, parts=1: must be above 0"),
        ((1, 1, "bf16"), "AuditCallback: compression='bf16': none or fp16"),
    ],
)
def test_bad_options_are_refused(options: tuple[int, int, str], problem: str) -> None:
    """Fails if a bad option is noticed only when the training begins."""
    with pytest.raises(UsageError, match=problem):
        TrainingWatch(*options, None)


def test_workers_that_torch_does_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if each of several workers would train by itself, as under plain horovodrun."""
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("HOROVOD_SIZE", "3")
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", "0")
    with pytest.raises(UsageError, match=r"HOROVOD_SIZE=3.*`hvdtrain launch -np 3 -- python"):
        ddp.check_size(1, "")
    ddp.check_size(3, "")
