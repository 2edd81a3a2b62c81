"""`hvdtrain diff --bisect`: steps of two runs, computed again to find where they part.

The runs are computed one after the other in this process: everything that a job takes from the
process (seeds, threads) it sets when it is prepared, or restores from its checkpoint. First the
records of all steps between the last agreement and the first difference are found, recorded or not.
Then the first step that differs is computed once more, with digests of all its tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from hvdtrain.audit.digests import BatchDigest, PassDigests, first_tensor, text_of
from hvdtrain.audit.trace import RecordDifference, TraceRecord, first_difference
from hvdtrain.config import TrainConfig
from hvdtrain.data.sampler import Indices
from hvdtrain.errors import ReplayMismatch
from hvdtrain.evidence.replay import Replayer, place_of
from hvdtrain.log import say
from hvdtrain.records.trace_file import RecordedRun, segment_of
from hvdtrain.train.job import Job
from hvdtrain.train.step import compute_all

SHOWN = 8  # samples


def bisect(
    runs: Sequence[RecordedRun], configs: Sequence[TrainConfig], agreed: int, last: int
) -> dict[str, Any]:
    """Compute the steps after `agreed`, up to `last`, of both runs, and print where they part.

    Returns the report: "wrong" lists the runs whose trace is not what their replay gives.
    """
    wrong: list[str] = []
    replayed = []
    for letter, run, config in zip("AB", runs, configs, strict=True):
        try:
            replayer, start = _replayer(run, config, agreed + 1, last)
        except ReplayMismatch as error:
            say(f"bisect: {letter} cannot be computed again: {error}")
            return {"wrong": [letter]}
        replayed.append(compute_all(replayer.records(agreed + 1, last)))
        reason = _first_wrong(run, replayed[-1], replayer.names)
        steps = f"steps {agreed + 1} to {last}" if last > agreed + 1 else f"step {last}"
        outcome = f"its trace is not what this gives: {reason}" if reason else "as recorded"
        say(f"bisect: {letter}, {steps}, computed again from {place_of(start)}: {outcome}")
        wrong += [letter] if reason else []
    for ours, theirs in zip(*replayed, strict=False):
        if parting := first_difference(ours, theirs, replayer.names):
            say(f"bisect: they part at step {ours.step}: {parting.what}: {parting.text}")
            if first := _name_first(runs, configs, ours.step, parting):
                say(f"bisect: {first}")
            return {"wrong": wrong, "step": ours.step, **asdict(parting), "first": first}
    cause = (
        f"So {' and '.join(wrong)}: computed wrongly, or with other code, or with a changed trace"
        if wrong
        else "So the final parameters of one run are not those that it computed"
    )
    say(f"bisect: computed again, both runs agree at every one of these steps. {cause}")
    return {"wrong": wrong}


def _replayer(run: RecordedRun, config: TrainConfig, first: int, last: int) -> tuple[Replayer, int]:
    """Return what computes steps of a run again, and from which step on.

    A run with --deterministic leaves that mode on.
    """
    torch.use_deterministic_algorithms(False)
    replayer = Replayer(run, config, segment_of(run, first, last))
    return replayer, replayer.start_before(first)


def _first_wrong(
    run: RecordedRun, replayed: Sequence[TraceRecord], names: Sequence[str]
) -> str | None:
    """Return how the first record that is not found again differs from the run's own."""
    for record in replayed:
        expected = run.by_step.get(record.step)
        if expected and (parting := first_difference(expected, record, names)):
            return f"step {record.step}: {parting.what}: {parting.text}"
    return None


def _name_first(
    runs: Sequence[RecordedRun],
    configs: Sequence[TrainConfig],
    step: int,
    parting: RecordDifference,
) -> str | None:
    """Compute a step again, and return the first samples or the first tensor that differ."""
    passes, samples = [], []
    for run, config in zip(runs, configs, strict=True):
        replayer, _ = _replayer(run, config, step, step)
        passes.append(PassDigests(replayer.job.model, step))
        compute_all(replayer.advance(step, passes[-1]))
        samples.append(_sample_digests(replayer.job, step, passes[-1].indices))
    if parting.what == "data order":
        return _first_place(*(digests.indices.tolist() for digests in passes))
    if parting.share is None:
        return None
    if parting.what == "data":
        return _other_samples(*samples)
    tensor = first_tensor(passes[0], passes[1], parting.share)
    return f"the first tensor that differs, of share {parting.share}: {tensor}"


def _first_place(one: Sequence[int], other: Sequence[int]) -> str:
    """Return where two global batches first have different samples."""
    for index, (ours, theirs) in enumerate(zip(one, other, strict=False)):
        if ours != theirs:
            return (
                f"the order differs first at place {index} of the global batch: samples {ours} and "
                f"{theirs}"
            )
    return f"global batches of {len(one)} and {len(other)} samples"


def _other_samples(one: Mapping[int, str], other: Mapping[int, str]) -> str:
    """Return which samples of a global batch differ; `one`, `other`: their digests by number."""
    numbers = [number for number, digest in one.items() if other.get(number) != digest]
    if not numbers:
        return "its samples, read one by one, agree: what is made of them differs"
    shown = ", ".join(map(str, numbers[:SHOWN])) + ", ..." * bool(numbers[SHOWN:])
    return f"the samples that differ: number {shown} of the data set, {len(numbers)} of {len(one)}"


def _sample_digests(job: Job, step: int, indices: Indices) -> dict[int, str]:
    """Return the digest of each sample of a step's batch, read one by one, by its number."""
    digests = {}
    epoch = (step - 1) // job.sampler.steps_per_epoch
    for number in indices.tolist():
        digest = BatchDigest()
        digest.add(job.feed.split.batch(np.array([number]), epoch))
        digests[number] = text_of(digest.words())
    return digests
