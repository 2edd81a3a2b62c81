"""The training loop, stopped anywhere and resumed: the same numbers as if it had not been."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hvdtrain.audit import Audits
from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.exchange import SingleProcess
from hvdtrain.run.hooks import StepProfiler
from hvdtrain.train import metering
from hvdtrain.train.checkpoint import Snapshot
from hvdtrain.train.job import Job
from hvdtrain.train.loop import Hooks, TrainingLoop
from hvdtrain.train.metering import Meter
from hvdtrain.train.progress import State
from hvdtrain.train.state import capture, restore
from hvdtrain.train.step import compute
from hvdtrain.train.worker_state import check_model
from tests.unit.jobs import (
    MemoryKeeper,
    Ran,
    Recording,
    equal,
    made_up_data,
    make_job,
    run_job,
    with_batch_norm,
    with_dropout,
)
from tests.unit.jobs import timeless as without_times
from tests.unit.threads import ThreadExchange, connect, run_ranks

SINGLE = SingleProcess()
NEVER = 10**9
# 7 steps of batches of 8, 8 and 4 samples, an evaluation after the steps 3, 4, 6 and 7.
QUESTIONS = 11
IN_EVALUATION = {4, 6, 9, 11}
CUTS = [
    pytest.param(n, id=f"{n}, in evaluation" if n in IN_EVALUATION else str(n))
    for n in range(1, QUESTIONS + 1)
]


def new_job() -> Job:
    job = make_job(
        *(made_up_data(20), 8, SINGLE),
        build=with_dropout,
        total_steps=7,
        accum=2,
        ema_decay=0.8,
        clip_grad=0.5,
    )
    return replace(job, intervals=replace(job.intervals, evaluation_steps=4))


def stored(snapshot: Snapshot | None) -> dict[str, Any]:
    """The state as it comes back from the disk."""
    assert snapshot is not None
    stream = io.BytesIO()
    torch.save(snapshot.state, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


@pytest.fixture(scope="module")
def undisturbed() -> Ran:
    ran = run_job(new_job(), SINGLE)
    assert ran.outcome is not None and ran.asked == QUESTIONS
    return ran


def timeless(snapshot: Snapshot | None) -> dict[str, Any]:
    """All of the state that must be the same."""
    assert snapshot is not None
    meter = {
        name: value | {"seconds": 0.0, "samples_per_s": 0.0, "phases_s": None}
        if isinstance(value, dict)
        else value
        for name, value in snapshot.state["meter"].items()
    }
    return snapshot.state | {"meter": meter, "weights": snapshot.weights}


@pytest.fixture(scope="module", params=CUTS)
def stopped(request: pytest.FixtureRequest) -> tuple[Ran, dict[str, Any], Ran]:
    """Return a run that was stopped, its state from the disk, and the run resumed from it."""
    first = run_job(new_job(), SINGLE, stop_at=request.param)
    state = stored(first.snapshot)
    return first, state, run_job(new_job(), SINGLE, state=copy.deepcopy(state))


def test_a_run_stopped_anywhere_ends_with_the_same_bits(undisturbed: Ran, stopped) -> None:
    """Fails when parameters, momentum, average, buffers, random numbers or sums differ."""
    first, _, second = stopped
    assert first.outcome is None
    assert second.snapshot is not None and undisturbed.snapshot is not None
    assert second.snapshot.params_sha256 == undisturbed.snapshot.params_sha256
    same = equal(timeless(second.snapshot), timeless(undisturbed.snapshot))
    assert same


def test_a_run_stopped_anywhere_reports_the_same(undisturbed: Ran, stopped) -> None:
    """Fails when a record or an evaluation of a resumed run is another, missing or there twice."""
    first, state, second = stopped
    reported = first.recording.up_to(state["step"]) + second.recording.records
    assert reported == undisturbed.recording.records


def test_a_run_stopped_anywhere_has_the_same_outcome(undisturbed: Ran, stopped) -> None:
    """Fails when the summary of a resumed run has another loss, accuracy or length."""
    _, _, second = stopped
    assert second.outcome is not None and undisturbed.outcome is not None
    assert second.outcome.evaluation == undisturbed.outcome.evaluation
    ends = [without_times(ran.outcome.totals) for ran in (second, undisturbed)]
    assert ends[0] == ends[1]


def test_a_run_killed_after_its_last_checkpoint_has_the_same_outcome(undisturbed: Ran) -> None:
    """Fails when a run with nothing left to train loses its loss, or reports an epoch again."""
    second = run_job(new_job(), SINGLE, state=stored(undisturbed.snapshot))
    assert second.recording.records == []
    assert second.outcome is not None and undisturbed.outcome is not None
    assert second.outcome.evaluation == undisturbed.outcome.evaluation
    ends = [without_times(ran.outcome.totals) for ran in (second, undisturbed)]
    assert ends[0] == ends[1]


def test_a_request_is_answered_within_two_steps() -> None:
    """Fails when a run goes on for longer after it was asked to stop."""
    for cut in (1, 2, 5):
        snapshot = run_job(new_job(), SINGLE, stop_at=cut).snapshot
        asked_at = cut - (cut > 4)  # the fourth question is that of an evaluation
        assert snapshot is not None and asked_at <= snapshot.step <= asked_at + 1


def test_a_request_in_a_long_step_is_answered_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when a run whose steps take long makes another one before it stops."""
    monkeypatch.setattr(metering, "LONG_STEP_S", 0.0)
    snapshot = run_job(new_job(), SINGLE, stop_at=2).snapshot
    assert snapshot is not None and snapshot.step == 2


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_all_ranks_stop_at_one_step_whoever_is_asked(asked: int) -> None:
    """Fails when a rank goes on alone, or they stop apart."""
    data = made_up_data(20)
    exchanges = connect(3)
    jobs = [make_job(data, 8, ex, total_steps=7) for ex in exchanges]

    def work(exchange: ThreadExchange) -> tuple[Ran, int]:
        stop_at = 3 if exchange.rank == asked else NEVER
        return run_job(jobs[exchange.rank], exchange, stop_at=stop_at), exchange.rank

    results = run_ranks(exchanges, work)
    assert [ran.outcome for ran, _ in results] == [None] * 3
    assert [ran.snapshot is not None for ran, _ in results] == [True, False, False]
    hidden = {tuple(job.model[1].weight.flatten().tolist()) for job in jobs}
    assert len(hidden) == 1 and results[0][0].asked == 4


def test_another_number_of_ranks_repeats_and_loses_no_sample() -> None:
    """Fails when going on with 3, then 1, after 2 ranks sees a sample twice or learns otherwise."""
    data, seen = made_up_data(20), []
    state, cuts = None, {2: 2, 3: 2, 1: NEVER}
    for size, stop_at in cuts.items():
        exchanges = connect(size)
        jobs = [make_job(data, 8, ex, total_steps=9, accum=2) for ex in exchanges]
        data.train.log.clear()

        def work(exchange: ThreadExchange, jobs=jobs, state=state, stop_at=stop_at) -> Ran:
            return run_job(jobs[exchange.rank], exchange, copy.deepcopy(state), stop_at)

        ran = run_ranks(exchanges, work)[0]
        state = stored(ran.snapshot)
        seen += [sample for batch in data.train.log for sample in batch]
    assert len(seen) == 60 and ran.outcome is not None
    for epoch in range(3):
        assert sorted(seen[epoch * 20 : epoch * 20 + 20]) == list(range(20)), epoch
    alone = make_job(data, 8, SINGLE, total_steps=9, accum=2)
    run_job(alone, SINGLE)
    for name, tensor in alone.model.state_dict().items():
        torch.testing.assert_close(state["model"][name], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("cut", [3, 8, 10])
def test_each_rank_gets_its_own_statistics_back(cut: int) -> None:
    """Fails when ranks with batch norm of their own go on with those of rank 0, or the average."""
    data = made_up_data(20)

    def run(state: dict[str, Any] | None, stop_at: int) -> tuple[Ran, list[Job]]:
        exchanges = connect(2)
        settings = {"build": with_batch_norm, "ema_decay": 0.5}
        jobs = [make_job(data, 8, ex, total_steps=7, **settings) for ex in exchanges]
        own = [copy.deepcopy(state) for _ in exchanges]  # as from a broadcast
        ranks = run_ranks(exchanges, lambda ex: run_job(jobs[ex.rank], ex, own[ex.rank], stop_at))
        return ranks[0], jobs

    whole, jobs = run(None, NEVER)
    part, _ = run(None, cut)
    rest, again = run(stored(part.snapshot), NEVER)
    same = equal(timeless(rest.snapshot), timeless(whole.snapshot))
    assert same
    for one, other in zip(jobs, again, strict=True):
        assert equal(dict(one.model.named_buffers()), dict(other.model.named_buffers()))
    own = [job.model[1].running_mean for job in jobs]
    assert not torch.equal(*own)  # else the test could not fail
    assert whole.snapshot is not None
    saved = whole.snapshot.weights["1.running_mean"]
    torch.testing.assert_close(saved, (own[0] + own[1]) / 2)


def test_another_number_of_ranks_gets_the_statistics_of_all() -> None:
    """Fails when ranks start from one old rank's batch-norm statistics."""
    data = made_up_data(20)
    exchanges = connect(2)
    jobs = [make_job(data, 8, ex, total_steps=4, build=with_batch_norm) for ex in exchanges]
    ran = run_ranks(exchanges, lambda ex: run_job(jobs[ex.rank], ex))[0]
    own = [job.model[1].running_var for job in jobs]
    alone = make_job(data, 8, SINGLE, total_steps=4, build=with_batch_norm)
    run_job(alone, SINGLE, stored(ran.snapshot))
    torch.testing.assert_close(alone.model[1].running_var, (own[0] + own[1]) / 2)


@pytest.mark.parametrize(
    ("size", "rank", "kept", "expected"),
    [
        (1, 0, 0, "1 worker instead of 2: the random numbers of rank 1 are dropped"),
        (4, 1, 1, "4 workers instead of 2: the random numbers of ranks 2, 3 start at the seed"),
        (3, 2, None, "3 workers instead of 2: the random numbers of rank 2 start at the seed"),
        (2, 1, 1, None),
    ],
)
def test_random_numbers_go_on_at_another_number_of_ranks(
    size: int, rank: int, kept: int | None, expected: str | None
) -> None:
    """Fails if a rank that was there before starts its random numbers again, gets those of another
    rank, or what is lost is not reported.
    """
    data = made_up_data(20)
    exchanges = connect(2)
    jobs = [make_job(data, 8, ex, total_steps=2) for ex in exchanges]
    ran = run_ranks(exchanges, lambda ex: run_job(jobs[ex.rank], ex))[0]
    state = stored(ran.snapshot)
    for number, own in enumerate(state["ranks"]):
        own["rng"]["torch"] = torch.Generator().manual_seed(1000 + number).get_state()
    exchange = connect(size)[rank]
    job = make_job(data, 8, exchange, total_steps=2)
    torch.manual_seed(77)
    before = torch.get_rng_state()
    reported = restore(state, job, State(Meter(exchange, 20)))
    assert reported == expected
    now = before if kept is None else state["ranks"][kept]["rng"]["torch"]
    assert torch.equal(torch.get_rng_state(), now)


@pytest.mark.parametrize("rank", [1, 2])
def test_ranks_that_drifted_apart_are_never_saved(rank: int) -> None:
    """Fails when a checkpoint is made of parameters that differ by a bit, or no rank is named."""
    exchanges = connect(3)
    jobs = [make_job(made_up_data(20), 8, ex) for ex in exchanges]
    bias = jobs[rank].model[1].bias
    with torch.no_grad():
        bias[0] = np.nextafter(float(bias[0]), 10)

    def work(exchange: ThreadExchange) -> str:
        meter = Meter(exchange, 20)
        with pytest.raises(TrainingError, match="before the checkpoint of step 5") as caught:
            capture(jobs[exchange.rank], State(meter, 5, 40), exchange, {})
        return str(caught.value)

    assert all(f"rank {rank} held" in text for text in run_ranks(exchanges, work))


def test_statistics_of_their_own_are_no_drift() -> None:
    """Fails when batch norm without --sync-bn is taken for ranks that have drifted apart."""
    exchanges = connect(2)
    jobs = [make_job(made_up_data(20), 8, ex, build=with_batch_norm) for ex in exchanges]
    jobs[1].model[1].running_mean += 1

    def work(exchange: ThreadExchange) -> None:
        capture(jobs[exchange.rank], State(Meter(exchange, 20), 5, 40), exchange, {})

    run_ranks(exchanges, work)


def test_ranks_that_drift_apart_are_found_on_the_way() -> None:
    """Fails when --hash-every looks at another step, or not at all."""
    exchanges = connect(2)
    jobs = [make_job(made_up_data(20), 8, ex) for ex in exchanges]
    with torch.no_grad():
        jobs[1].model[1].bias[0] += 1

    def work(exchange: ThreadExchange) -> None:
        with pytest.raises(TrainingError, match="rank 1 held") as caught:
            run_job(jobs[exchange.rank], exchange)
        assert "after step 3" in str(caught.value)

    run_ranks(exchanges, work)


class Teacher(nn.Module):
    """Moves a frozen copy towards its own layer in each forward pass."""

    def __init__(self, through_data: bool) -> None:
        super().__init__()
        self.layer, self.copy = nn.Linear(16, 7), nn.Linear(16, 7).requires_grad_(False)
        self.through_data = through_data

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for own, other in zip(self.layer.parameters(), self.copy.parameters(), strict=True):
            if self.through_data:
                own.data.mul_(0.99)
            else:
                other.lerp_(own.detach(), 0.01)
        return self.layer(images.flatten(1)) + self.copy(images.flatten(1))


@pytest.mark.parametrize("through_data", [False, True])
def test_parameters_that_a_pass_changes_are_refused(through_data: bool) -> None:
    """Fails if virtual workers go on although the values that they see depend on N."""
    data, build = made_up_data(20), partial(Teacher, through_data)
    job = make_job(data, 8, SINGLE, build=build)
    run_job(job, SINGLE)
    job = make_job(data, 8, SINGLE, build=build, virtual=3)
    with pytest.raises(TrainingError, match=r"a forward pass has changed .* parameter"):
        run_job(job, SINGLE)


def test_a_buffer_that_is_part_of_a_parameter_is_refused() -> None:
    """Fails if the buffers of one virtual worker would undo updates of a parameter."""
    model = nn.Linear(3, 3)
    check_model(model)
    model.register_buffer("diagonal", model.weight.detach().diagonal())
    with pytest.raises(UsageError, match=r"the buffer diagonal shares memory .* weight: .* Clone"):
        check_model(model)


def test_ranks_leave_at_either_end_of_a_logged_step() -> None:
    """Fails if a rank that leaves the loop before a logged step lets another, which leaves at its
    top, wait for what they gather of all ranks.
    """
    exchanges = connect(2)
    jobs = [make_job(made_up_data(20), 8, exchange, total_steps=7) for exchange in exchanges]

    def work(exchange: ThreadExchange) -> tuple[int, int]:
        job = jobs[exchange.rank]
        job = replace(job, intervals=replace(job.intervals, log=3))
        state, keeper = State(Meter(exchange, 20, job.task.metrics)), MemoryKeeper(exchange)
        profiler = StepProfiler(None, Path(), SINGLE)
        loop = TrainingLoop(job, state, exchange, Hooks(Audits(), Recording(), keeper, profiler))
        for step in loop.steps():
            if step.number == 3:  # only rank 1 is here
                break
            compute(step)
            if step.number == 2 and exchange.rank == 0:
                break
        loop.end()
        return state.step, exchange._uses["hvdtrain.own_times"]

    assert run_ranks(exchanges, work) == [(2, 1), (2, 1)]
