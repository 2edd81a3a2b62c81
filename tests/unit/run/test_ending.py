"""The end of a script's loop before its last step, and its hook on evaluations, on one worker.

tests/parallel/test_own_loop.py has them on several.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hvdtrain
from hvdtrain.errors import AgreedFailure, Stopped, UsageError
from hvdtrain.train.evaluate import Evaluation
from tests.unit.commands import run_code
from tests.unit.run.test_own_loop import SAMPLES, evaluate, make, parts, passes, summary

pytestmark = pytest.mark.usefixtures("script")
EVALUATED = {"valid": SAMPLES, "evaluate": evaluate}
Call = Callable[[hvdtrain.Loop, str, int], None]  # where it is made, and the number of the step


def train(call: Call = lambda *_: None, **options: Any) -> tuple[torch.nn.Module, hvdtrain.Loop]:
    """Train with calls before and after each update, and with each evaluation."""

    def hook(evaluation: Evaluation) -> None:
        call(loop, "hook", evaluation.step)

    model, loop = make(**EVALUATED, on_evaluation=hook, **options)
    with loop:
        for step in loop:
            call(loop, "before", step.number)
            passes(step, model)
            step.update()
            call(loop, "after", step.number)
    return model, loop


def stop_at(position: str, number: int) -> Call:
    def call(loop: hvdtrain.Loop, here: str, step: int) -> None:
        if (here, step) == (position, number):
            loop.stop(f"{here} {step}")

    return call


@pytest.mark.parametrize(
    ("position", "number", "last"),
    [
        ("before", 7, 7),
        ("after", 7, 8),
        ("after", 6, 7),  # of which the evaluation within the epoch is no earlier end
        ("hook", 6, 6),
        ("hook", 5, 5),
        ("before", 10, 10),
    ],
)
def test_stop_ends_the_run_for_good(
    position: str, number: int, last: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if the run ends at another step, is not evaluated and saved there, does not state why,
    or is trained on by a resume, also of a longer run.
    """
    model, loop = train(stop_at(position, number), eval_every=6, epochs=3)
    reason = f"{position} {number}"
    found = summary()
    assert (found["status"], found["steps"], found["end_reason"]) == ("finished", last, reason)
    assert loop.evaluation is not None and loop.evaluation.step == last
    assert f"\nended early: {reason}\n" in capsys.readouterr().out
    for epochs in (3, 5):
        called: list[str] = []
        again, loop = train(
            lambda *where, called=called: called.append(str(where)),  # type: ignore[misc]
            eval_every=6,
            epochs=epochs,
            resume="auto",
        )
        assert called == [] and torch.equal(again.weight, model.weight)  # type: ignore[arg-type]
        assert (summary()["steps"], summary()["end_reason"]) == (last, reason)
        assert loop.evaluation is not None and loop.evaluation.step == last


def test_break_beside_stop_keeps_the_reason() -> None:
    """Fails if a script that stops and leaves at once trains on after a resume."""
    for epochs, expected in ((2, [1, 2, 3]), (4, [])):
        model, loop = make(**EVALUATED, epochs=epochs, resume="auto")
        made = []
        with loop:
            for step in loop:
                made.append(step.number)
                passes(step, model)
                step.update()
                if step.number == 3:
                    loop.stop("enough")
                    break
        assert made == expected
        assert (summary()["steps"], summary()["end_reason"]) == (3, "enough")


def test_a_request_outlives_a_signal() -> None:
    """Fails if a run that a signal stops, before a request is agreed on, forgets the request."""

    def call(loop: hvdtrain.Loop, here: str, step: int) -> None:
        if (here, step) == ("before", 6) and is_cut:  # sent with step 7, read with step 8
            signal.raise_signal(signal.SIGTERM)
        if (here, step) == ("after", 8):
            loop.stop("enough")

    weights = []
    for name, is_cut in (("mine", False), ("cut", True)):
        if is_cut:
            with pytest.raises(Stopped):
                train(call, experiment=name)
        model, loop = train(call, experiment=name, resume="auto")
        assert loop.evaluation is not None and loop.evaluation.step == 9
        weights.append(model.weight)
    assert torch.equal(*weights)  # type: ignore[arg-type]


def test_the_hook_is_called_with_each_evaluation_once() -> None:
    """Fails if an evaluation is missing, the last one too, or repeated after a resume; or if what
    the hook changes is not saved with it.
    """
    called: dict[str, list[Any]] = {}
    rates = {}
    for name, lengths in (("whole", [3]), ("resumed", [1, 3, 3])):
        for epochs in lengths:
            model, optimizer = parts()
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

            def hook(one: Evaluation, name: str = name, schedule: Any = schedule) -> None:
                called.setdefault(name, []).append((one.step, one.epoch, one.loss))
                schedule.step()

            loop = hvdtrain.Loop(
                *(model, optimizer, SAMPLES, SAMPLES, evaluate),
                state=[schedule],
                on_evaluation=hook,
                experiment=name,
                global_batch_size=5,
                epochs=epochs,
                eval_every=2,
                resume="auto",
            )
            with loop:
                for step in loop:
                    passes(step, model)
                    step.update()
            assert loop.evaluation is not None
            assert (loop.evaluation.step, loop.evaluation.loss) == called[name][-1][::2]
        rates[name] = optimizer.param_groups[0]["lr"]
    steps = [2, 4, 5, 6, 8, 10, 12, 14, 15]
    assert [one[:2] for one in called["whole"]] == [(step, (step - 1) // 5) for step in steps]
    assert called["whole"] == called["resumed"]
    assert rates["whole"] == rates["resumed"] == 0.1 * 0.5**9


def test_patience_ends_a_loop_and_belongs_to_the_run() -> None:
    """Fails if a loop with patience goes on, or a resume counts evaluations of another interval."""
    options = {"patience": 2, "min_delta": 9.0}
    train(**options, epochs=9)
    assert summary()["steps"] == 15
    assert summary()["end_reason"].endswith("by more than 9 in 2 evaluations")
    for other in ({"patience": 3}, {"min_delta": 8.0}, {"eval_interval": 2}, {"eval_every": 2}):
        (name,) = other
        with pytest.raises(AgreedFailure, match=rf"^{name}=\d.*: the run in runs/mine was started"):
            train(**options | other, epochs=9, resume="auto")
    with pytest.raises(AgreedFailure, match=r"^patience=2: there are no samples to"):
        make(patience=2, experiment="other")[1].__enter__()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({**EVALUATED, "on_evaluation": 3}, "on_evaluation=3: is not callable"),
        ({"on_evaluation": print}, "on_evaluation: is never called without evaluations"),
        ({**EVALUATED, "patience": 0}, "patience=0: must be above 0"),
        ({**EVALUATED, "min_delta": 0.1}, "min_delta=0.1: has no effect without patience"),
        ({**EVALUATED, "early_stopping_patience": 3}, "did you mean patience?"),
    ],
)
def test_what_could_end_no_run_is_refused(options: dict[str, Any], expected: str) -> None:
    """Fails if a mistake is found after the start, or when the first evaluation is made."""
    with pytest.raises(UsageError) as caught:
        make(**options)
    assert expected in str(caught.value)


def test_stop_outside_of_the_context_is_refused() -> None:
    """Fails if a request that nothing reads is taken."""
    with pytest.raises(UsageError, match="use it as `with"):
        make()[1].stop()


FAILS = """
import sys, time
import torch
import hvdtrain
from hvdtrain.records import ledger, uploader
ledger.ALONE_CLOSE_S = 1.0
uploader.Uploader._upload = lambda self: time.sleep(80)  # as storage that does not answer
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples = [(torch.tensor([float(n)]), torch.tensor([2.0])) for n in range(8)]
options = {"max_steps": 3, "output": sys.argv[1], "experiment": "x"}
with hvdtrain.Loop(model, optimizer, samples, global_batch_size=4, **options) as loop:
    for step in loop:
        raise ValueError("a mistake of the script")
"""


def test_a_failure_is_shown_though_the_storage_does_not_answer(tmp_path: Path) -> None:
    """Fails when the error of a single worker is held back until its last upload has ended."""
    began_s = time.monotonic()
    done = run_code(FAILS, tmp_path, f"file://{tmp_path}/far")
    assert time.monotonic() - began_s < 60
    assert done.returncode == 1 and "a mistake of the script" in done.stderr
    assert "lacks the last records of the run: no time was left after 1 s" in done.stderr
