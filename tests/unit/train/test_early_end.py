"""Early stopping: what counts, and a run cut anywhere that ends at the same step."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.exchange import SingleProcess
from hvdtrain.run.script import NO_DATA
from hvdtrain.tasks import Settings, Task
from hvdtrain.train.evaluate import Evaluation
from hvdtrain.train.job import Job
from hvdtrain.train.progress import EarlyEnd, Patience, patience_of
from tests.unit.jobs import Ran, equal, made_up_data, make_job, run_job, with_dropout
from tests.unit.train.test_loop import stored

SINGLE = SingleProcess()
# Evaluations after the steps 3, 4, 6 and 8: an epoch has 3 steps. Only the first one improves.
LAST, QUESTIONS = 8, 12
NAN = math.nan


def new_job() -> Job:
    job = make_job(made_up_data(20), 8, SINGLE, build=with_dropout, total_steps=30)
    return replace(
        job,
        schedule=lambda step: 0.05,  # that of a shorter run too
        intervals=replace(job.intervals, evaluation_steps=4),
        patience=Patience(3, min_delta=9.0),
    )


@pytest.fixture(scope="module")
def undisturbed() -> Ran:
    ran = run_job(new_job(), SINGLE)
    assert ran.snapshot is not None and ran.outcome is not None
    assert (ran.snapshot.step, ran.asked) == (LAST, QUESTIONS)
    reason = ran.outcome.end_reason or ""
    assert reason.startswith("validation accuracy did not improve on ")
    assert reason.endswith(" by more than 9 in 3 evaluations")
    return ran


@pytest.mark.parametrize(
    ("figures", "highest", "patience", "ended_after"),
    [
        ([0.5, 0.4, 0.4, 0.3, 0.3, 0.35], False, Patience(2), 6),
        ([0.5, 0.6, 0.6, 0.7], True, Patience(1), 3),
        ([0.5, 0.45, 0.41, 0.39, 0.39], False, Patience(2, 0.1), 3),
        ([0.5, 0.45, 0.39, 0.35, 0.29], False, Patience(2, 0.1), None),
        ([0.5, 0.75, 0.875], True, Patience(1, 0.25), 2),
        ([NAN, 0.5, NAN, 0.4, NAN, NAN], False, Patience(2), 6),
        ([NAN, NAN], True, Patience(2), 2),
        ([-1.0, 0.0, 1.0], True, Patience(1), None),
    ],
)
def test_patience_counts_evaluations_without_improvement(
    figures: list[float], highest: bool, patience: Patience, ended_after: int | None
) -> None:
    """Fails when an equal figure, a change of min_delta, or NaN counts as an improvement, or a
    figure that is not the best one is compared with.
    """
    task = Task(Settings("", "", None, 0, None))  # type: ignore[arg-type]
    task.best, task.best_is_highest = "score", highest
    early_end, ended = EarlyEnd(), None
    for number, figure in enumerate(figures, 1):
        evaluation = Evaluation(9, 0.0, {"score": figure}, {})
        if early_end.count(evaluation, task, patience) and ended is None:
            ended = number
    assert ended == ended_after


def test_patience_without_evaluations_is_refused() -> None:
    """Fails when a run could never end by a patience that was asked for, silently."""
    with pytest.raises(UsageError, match=r"--patience=3: there are no samples to validate with"):
        patience_of(3, 0.0, NO_DATA)
    assert patience_of(None, 0.0, NO_DATA) is None


@pytest.mark.parametrize("cut", range(1, QUESTIONS + 1))
def test_a_run_stopped_anywhere_ends_at_the_same_step(cut: int, undisturbed: Ran) -> None:
    """Fails when a resume forgets an evaluation, counts it twice, or trains on after the end."""
    first = run_job(new_job(), SINGLE, stop_at=cut)
    state = stored(first.snapshot)
    second = run_job(new_job(), SINGLE, state=copy.deepcopy(state))
    assert first.recording.up_to(state["step"]) + second.recording.records == (
        undisturbed.recording.records
    )
    assert second.snapshot is not None and undisturbed.snapshot is not None
    assert second.outcome is not None and undisturbed.outcome is not None
    assert second.snapshot.params_sha256 == undisturbed.snapshot.params_sha256
    assert second.outcome.end_reason == undisturbed.outcome.end_reason
    assert equal(second.snapshot.state["early_end"], undisturbed.snapshot.state["early_end"])


@pytest.mark.parametrize("length", [1, 3, 5, 7])
def test_the_end_of_a_shorter_run_does_not_count(length: int, undisturbed: Ran) -> None:
    """Fails when the evaluation at the end of a run counts, which a longer one would not make."""
    shorter = run_job(replace(new_job(), total_steps=length), SINGLE)
    assert shorter.outcome is not None and shorter.outcome.end_reason is None
    longer = run_job(new_job(), SINGLE, state=stored(shorter.snapshot))
    assert longer.snapshot is not None and undisturbed.snapshot is not None
    assert longer.snapshot.params_sha256 == undisturbed.snapshot.params_sha256
    assert longer.snapshot.step == LAST


def test_a_run_killed_after_its_last_checkpoint_does_not_train_on(undisturbed: Ran) -> None:
    """Fails when it makes further steps, or loses the reason."""
    second = run_job(new_job(), SINGLE, state=stored(undisturbed.snapshot))
    assert second.snapshot is not None and undisturbed.snapshot is not None
    assert second.outcome is not None and undisturbed.outcome is not None
    assert second.snapshot.step == LAST
    assert second.outcome.end_reason == undisturbed.outcome.end_reason
    assert second.snapshot.params_sha256 == undisturbed.snapshot.params_sha256
