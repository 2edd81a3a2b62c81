"""`hvdtrain bench step`: what the framework costs beyond a loop written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from hvdtrain.exchange import AVERAGE, Exchange, SingleProcess
from hvdtrain.lab.bench.jobs import bare_step, describe, make_job, our_step
from hvdtrain.lab.bench.rounds import Measured, Options, ratio, run_rounds

OURS, BARE, ALONE = "hvdtrain", "bare Horovod loop", "bare single-device loop"
IN_STEP = "bare single-device loop, in step"


def bench_step(options: Options, exchange: Exchange) -> Measured:
    """Collective: seconds a step by loop and round, and our ratios to the other loops.

    The single-device loop runs on every worker at the same time, without exchange: what this
    machine can do at best. "In step": the same, and after each step all wait for the slowest, which
    any exchange makes them do.
    """
    contestants = {}
    if exchange.size > 1:
        bare = make_job(options.model, options.batch_size, exchange)
        bare = replace(bare, reduction=AVERAGE).distributed(exchange)
        contestants[BARE] = bare_step(bare, exchange)
    alone = bare_step(make_job(options.model, options.batch_size, SingleProcess()), SingleProcess())
    contestants[ALONE] = alone
    if exchange.size > 1:
        contestants[IN_STEP] = _in_step(alone, exchange)
    # Ours last: the exchange watches the parameters of the optimizer that it distributed last.
    ours = make_job(options.model, options.batch_size, exchange).distributed(exchange)
    contestants[OURS] = our_step(ours, exchange)
    seconds = run_rounds(contestants, options.rounds, options.steps, exchange)
    ratios = {name: ratio(seconds, OURS, name) for name in contestants if name != OURS}
    return Measured(describe(options), seconds, ratios)


def _in_step(step: Callable[[], None], exchange: Exchange) -> Callable[[], None]:
    nothing = torch.zeros(1)

    def step_and_wait() -> None:
        step()
        exchange.sum_later(nothing, "hvdtrain.bench.step")()

    return step_and_wait
