"""Memory of a checkpoint: one copy of the state, made once the copy before is written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvdtrain.exchange import SingleProcess
from hvdtrain.lab.bench import saving
from hvdtrain.pulse import Pulse
from hvdtrain.run import hooks, training
from hvdtrain.train.job import Job
from hvdtrain.train.metering import Meter
from hvdtrain.train.progress import State
from hvdtrain.train.state import capture
from hvdtrain.train.update import Update
from tests.unit.jobs import CPU, equal, made_up_data, make_job

MEGABYTES = 64
LIBRARIES_MIB = 90  # those of hvdtrain, beside torch's: 45 were measured


def test_a_checkpoint_costs_one_copy_of_the_state(tmp_path: Path) -> None:
    """Fails if a save, or a resumed run, needs more than parameters and momentum once beside what
    torch alone needs: with a copy for each file, and one that waits, it was three times as much.
    """
    used = saving.measure(MEGABYTES, tmp_path / "x")
    assert [*used] == [*saving.CONTESTANTS]
    state_mib = 2 * MEGABYTES * 1e6 / 2**20
    for name in (saving.OURS, saving.RESUMED):
        more_mib = used[name].peak_mib - used[saving.TORCH].peak_mib
        assert more_mib < 1.15 * state_mib + LIBRARIES_MIB, used
        assert used[name].whole_s >= used[name].held_up_s > 0
    assert [len(row) for row in saving.rows(used)] == [4] * (1 + len(used))


def job_with_average() -> Job:
    job = make_job(made_up_data(8), 4, SingleProcess())
    average = Update(job.model, CPU, ema_decay=0.9)
    object.__setattr__(job, "update", average)
    return job


def saved(job: Job) -> Any:
    exchange = SingleProcess()
    found = capture(job, State(Meter(exchange, 8), 1), exchange, {})
    assert found is not None
    return found


def test_equal_parameters_are_copied_once() -> None:
    """Fails if weights to evaluate and to train, or the average and these, are two copies, or one
    of them is the model's own memory.
    """
    plain = make_job(made_up_data(8), 4, SingleProcess())
    snapshot = saved(plain)
    own = {it.data_ptr() for it in plain.model.state_dict().values()}
    for name, it in snapshot.weights.items():
        assert it.data_ptr() == snapshot.state["model"][name].data_ptr() not in own
    job = job_with_average()
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.add_(1)
    job.update.end_step()
    snapshot = saved(job)
    average = job.update.average
    assert average is not None
    kept = snapshot.state["update"]["average"]
    assert [*kept] == [*average.state_dict()] and type(kept) is type(average.state_dict())
    assert equal(kept, average.state_dict())
    assert equal(snapshot.state["model"], job.model.state_dict())
    for name, _ in average.module.named_parameters():
        copied = snapshot.weights[name].data_ptr()
        assert copied == kept[f"module.{name}"].data_ptr()
        assert copied not in (
            average.module.get_parameter(name).data_ptr(),
            snapshot.state["model"][name].data_ptr(),
        )


def test_the_copy_before_is_written_before_the_next_is_made(monkeypatch) -> None:
    """Fails if two copies of the state are in memory while the disk is slower than training."""
    calls: list[str] = []

    class Recorded:
        def __getattr__(self, name: str) -> Any:
            return lambda *given: calls.append(name)

    class Recording(Recorded):
        checkpoints = Recorded()

    monkeypatch.setattr(hooks, "capture", lambda *given: calls.append("capture"))
    ledger, signals = Recording(), SimpleNamespace(saving=lambda: None, alive=lambda: None)
    keeper = hooks.RunKeeper(SingleProcess(), ledger, signals, Pulse())  # type: ignore[arg-type]
    keeper.save(None, None, None)  # type: ignore[arg-type]
    assert calls == ["progress", "wait", "capture", "saved"]


@pytest.mark.parametrize("resumed", [True, False])
def test_a_restored_state_is_let_go(resumed: bool) -> None:
    """Fails if a resumed run keeps the state of its checkpoint in memory until it ends, or loses
    what its records continue from.
    """
    job = make_job(made_up_data(8), 4, SingleProcess())
    state = saved(job).state if resumed else None
    session: Any = SimpleNamespace(exchange=SingleProcess(), pulse=Pulse())
    at = training._restored(state, job, session)
    assert at.step == int(resumed)
    assert state is None or state == {"step": 1, "progress": {}}
