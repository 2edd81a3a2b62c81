"""`hvdtrain bench checkpoint`: what saving costs training, in the background and waited for."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path

from hvdtrain.exchange import Exchange
from hvdtrain.lab.bench.jobs import describe, make_job, our_step
from hvdtrain.lab.bench.rounds import Measured, Options, ratio, run_rounds
from hvdtrain.train.checkpoint import Checkpoints
from hvdtrain.train.loop import Job, Position, State
from hvdtrain.train.metering import Meter
from hvdtrain.train.state import capture

NEVER, BACKGROUND, WAITED = "no checkpoints", "in the background", "waited for"
KEEP = 2


def bench_checkpoint(options: Options, exchange: Exchange) -> Measured:
    """Collective: seconds a step with one checkpoint in every round of steps, and the ratios."""
    steps = options.steps
    job = make_job(options.model, options.batch_size, exchange).distributed(exchange)
    step = our_step(job, exchange)
    with tempfile.TemporaryDirectory(prefix="hvdtrain-bench-") as folder:
        checkpoints = Checkpoints(Path(folder), KEEP)
        contestants = {
            NEVER: step,
            BACKGROUND: _saving(step, job, exchange, checkpoints, steps, wait=False),
            WAITED: _saving(step, job, exchange, checkpoints, steps, wait=True),
        }
        seconds = run_rounds(contestants, options.rounds, steps, exchange)
        checkpoints.wait()
    ratios = {name: ratio(seconds, name, NEVER) for name in (BACKGROUND, WAITED)}
    return Measured(describe(options), seconds, ratios)


def _saving(
    step: Callable[[], None],
    job: Job,
    exchange: Exchange,
    checkpoints: Checkpoints,
    interval: int,
    wait: bool,
) -> Callable[[], None]:
    numbers = itertools.count(1)
    meter = Meter(exchange, job.sampler.samples)

    def step_and_save() -> None:
        step()
        number = next(numbers)
        if number % interval != interval // 2:  # in the middle of a round
            return
        snapshot = capture(job, State(Position(number, number), meter), exchange, {})
        if snapshot is not None:
            checkpoints.save(snapshot, is_best=False)
            if wait:
                checkpoints.wait()

    return step_and_save
