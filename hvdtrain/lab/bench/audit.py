"""`hvdtrain bench audit`: what audits cost training, a part at every step and whole ones."""

from __future__ import annotations

from dataclasses import astuple

from hvdtrain.audit import Auditor
from hvdtrain.audit.bound import BoundCheck
from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange
from hvdtrain.lab.bench.jobs import describe, make_job, our_step
from hvdtrain.lab.bench.rounds import Measured, Options, Ratio, ratio, run_rounds

PARTS = 100
RARELY = 100  # steps from one whole audit to the next
NEVER, PART, WHOLE = "no audit", f"1/{PARTS} at every step", "all at every step"


def bench_audit(options: Options, exchange: Exchange) -> Measured:
    """Collective: seconds a step without audits, with a part and with all at every step, and the
    ratios. Raises UsageError for a single process, which has nothing to audit.
    """
    if exchange.size < 2:
        raise UsageError("bench audit: one worker exchanges nothing (horovodrun -np 2 ...)")
    job = make_job(options.model, options.batch_size, exchange).distributed(exchange)
    ring = exchange.ring()

    def audit(parts: int) -> Auditor:
        return Auditor(job.model, ring, every=1, check=BoundCheck(ring, job.reduction), parts=parts)

    contestants = {
        NEVER: our_step(job, exchange),
        PART: our_step(job, exchange, audit(PARTS)),
        WHOLE: our_step(job, exchange, audit(1)),
    }
    seconds = run_rounds(contestants, options.rounds, options.steps, exchange)
    ring.close()
    ratios = {name: ratio(seconds, name, NEVER) for name in (PART, WHOLE)}
    ratios[f"all at every {RARELY}th step"] = _spread_out(ratios[WHOLE])
    return Measured(describe(options), seconds, ratios)


def _spread_out(every_step: Ratio) -> Ratio:
    """The ratio if only one step in RARELY bears the cost: better known so than measured."""
    return Ratio(*(1 + (value - 1) / RARELY for value in astuple(every_step)))
