"""Work, places and messages for tests of strategies in one process."""

from __future__ import annotations

from pathlib import Path

from hvdtrain.lab.systems.contract import Member, Spec, Strategy
from hvdtrain.lab.systems.plain_torch import Single
from hvdtrain.lab.systems.work import Work, WorkSpec


def work_spec(**changes: object) -> WorkSpec:
    values = {
        "model": "lenet",
        "data": "synthetic:1x28x28,samples=12",  # so that the third batch of 5 has 2 samples
        "data_dir": ".",
        "global_batch_size": 5,
        "steps": 3,
        "dtype": "float64",
        "seed": 3,
        "lr": 0.05,
        "momentum": 0.9,
    }
    return WorkSpec(**values | changes)  # type: ignore[arg-type]


def make_spec(system: str = "single", workers: int = 2, **changes: object) -> Spec:
    values = {
        "servers": 2,
        "work": work_spec(),
        "towers_reduction": "gluon",
        "towers_dim": 0,
        "folder": str(Path()),
        "token": "00" * 32,
        "time_limit_s": 10.0,
    }
    return Spec(system=system, workers=workers, **values | changes)  # type: ignore[arg-type]


def run_alone(strategy_class: type[Strategy], spec: Spec) -> Strategy:
    """All steps of a system of one process."""
    strategy = strategy_class(Work(spec.work), Member(0, 1, spec))
    for batch in strategy.work.batches():
        strategy.step(batch)
    return strategy


def run_single() -> Strategy:
    """The oracle."""
    return run_alone(Single, make_spec())
