"""`hvdtrain diff --bisect`: steps of two runs, computed again to find where they part.

The runs are computed one after the other in this process: everything that a job takes from the
process (seeds, threads) it sets when it is prepared, or restores from its checkpoint. First the
records of all steps between the last agreement and the first difference are found, recorded or not.
Then the first step that differs is computed once more, with digests of all its tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.audit.digests import BatchDigest, text_of
from hvdtrain.audit.passes import PassDigests, first_tensor
from hvdtrain.audit.trace import Parting, TraceRecord, first_parting
from hvdtrain.config import TrainConfig
from hvdtrain.errors import ReplayMismatch
from hvdtrain.log import counted, say
from hvdtrain.run.replay import Replayer, place_of
from hvdtrain.run.trace_file import RecordedRun

SHOWN = 8  # samples


def bisect(
    runs: Sequence[RecordedRun], configs: Sequence[TrainConfig], agreed: int, last: int
) -> dict[str, Any]:
    """Compute the steps after `agreed`, up to `last`, of both runs, and print where they part.

    Returns the report: "wrong" lists runs whose trace is not what their replay gives.
    """
    report: dict[str, Any] = {"wrong": [], "step": None, "parting": None, "tensor": None}
    found = []
    for letter, run, config in zip("AB", runs, configs, strict=True):
        try:
            replayer = Replayer(run, config)
            start = replayer.start_before(agreed + 1)
        except ReplayMismatch as error:
            say(f"bisect: {letter} cannot be computed again: {error}")
            return report | {"wrong": [letter]}
        found.append(replayer.records(agreed + 1, last))
        wrong = _first_wrong(run, found[-1], replayer.names)
        steps = f"steps {agreed + 1} to {last}" if last > agreed + 1 else f"step {last}"
        text = f"bisect: {letter}, {steps}, computed again from {place_of(start)}: "
        say(text + (f"its trace is not what this gives: {wrong}" if wrong else "as recorded"))
        report["wrong"] += [letter] if wrong else []
    for ours, theirs in zip(*found, strict=False):
        if parting := first_parting(ours, theirs, replayer.names):
            report |= {"step": ours.step, "parting": parting}
            say(f"bisect: they part at step {ours.step}: {parting.what}: {parting.text}")
            report |= _name_first(runs, configs, ours.step, parting)
            return report
    blamed = " and ".join(report["wrong"])
    say(
        "bisect: computed again, both runs agree at every one of these steps. "
        + (
            f"So {blamed} was computed wrongly, or with other code, or its trace was changed"
            if blamed
            else "So the final parameters of one are not what it computed"
        )
    )
    return report


def _first_wrong(
    run: RecordedRun, found: Sequence[TraceRecord], names: Sequence[str]
) -> str | None:
    """Return how the first record that is not found again differs from the run's own."""
    recorded = {record.step: record for record in run.records}
    for record in found:
        own = recorded.get(record.step)
        if own and (parting := first_parting(own, record, names)):
            return f"step {record.step}: {parting.what}: {parting.text}"
    return None


def _name_first(
    runs: Sequence[RecordedRun], configs: Sequence[TrainConfig], step: int, parting: Parting
) -> dict[str, Any]:
    """Compute a step again, and print the first samples or the first tensor that differ."""
    passes, samples = [], []
    for run, config in zip(runs, configs, strict=True):
        replayer = Replayer(run, config)
        replayer.start_before(step)
        passes.append(PassDigests(replayer.job.model, step))
        replayer.advance(step, passes[-1])
        samples.append(_sample_digests(replayer, step, passes[-1].indices))
    one, other = passes
    if parting.what == "data order":
        pairs = zip(one.indices.tolist(), other.indices.tolist(), strict=False)
        place, both = next(((i, it) for i, it in enumerate(pairs) if it[0] != it[1]), (0, None))
        text = f"{len(one.indices)} and {len(other.indices)} samples"
        if both:
            text = f"at place {place} of the global batch, the samples {both[0]} and {both[1]}"
        say(f"bisect: the order differs first {text}" if both else f"bisect: batches of {text}")
        return {"samples": both}
    ours, theirs = samples
    if parting.what == "data" and parting.share is not None:
        numbers = [number for number, digest in ours.items() if theirs.get(number) != digest]
        shown = ", ".join(map(str, numbers[:SHOWN])) + ", ..." * bool(numbers[SHOWN:])
        batch = f"of the {counted(len(ours), 'sample')} of the global batch"
        say(
            f"bisect: the samples that differ are number {shown} of the data set, {len(numbers)} "
            f"{batch}"
            if numbers
            else f"bisect: read one by one, all {batch} agree: only their batch differs"
        )
        return {"samples": numbers}
    if parting.share is None:
        return {}
    tensor = first_tensor(one, other, parting.share)
    say(f"bisect: the first tensor that differs, of share {parting.share}: {tensor}")
    return {"tensor": tensor}


def _sample_digests(replayer: Replayer, step: int, indices: Any) -> dict[int, str]:
    """Return the digest of each sample of a step's batch, read one by one, by its number."""
    job, found = replayer.job, {}
    epoch = (step - 1) // job.sampler.steps_per_epoch
    for number in indices.tolist():
        digest = BatchDigest()
        digest.add(job.feed.split.batch(np.array([number]), epoch))
        found[number] = text_of(digest.words())
    return found
