"""`hvdtrain bench step`: what the framework costs beyond a loop written by hand."""

from __future__ import annotations

from dataclasses import replace

from hvdtrain.bench.jobs import bare_step, describe, make_job, our_step
from hvdtrain.bench.rounds import Measured, Options, ratio, run_rounds
from hvdtrain.exchange import AVERAGE, Exchange, SingleProcess

OURS, BARE, ALONE = "hvdtrain", "bare Horovod loop", "bare single-device loop"


def bench_step(options: Options, exchange: Exchange) -> Measured:
    """Collective: seconds a step by loop and round, and our ratios to the other loops.

    The single-device loop runs on every worker at the same time, without exchange: what this
    machine can do at best.
    """
    contestants = {}
    if exchange.size > 1:
        bare = make_job(options.model, options.batch_size, exchange)
        bare = replace(bare, reduction=AVERAGE).distributed(exchange)
        contestants[BARE] = bare_step(bare, exchange)
    contestants[ALONE] = bare_step(
        make_job(options.model, options.batch_size, SingleProcess()), SingleProcess()
    )
    # Ours last: the exchange watches the parameters of the optimizer that it distributed last.
    ours = make_job(options.model, options.batch_size, exchange).distributed(exchange)
    contestants[OURS] = our_step(ours, exchange)
    seconds = run_rounds(contestants, options.rounds, options.steps, exchange)
    ratios = {name: ratio(seconds, OURS, name) for name in contestants if name != OURS}
    return Measured(describe(options), seconds, ratios)
