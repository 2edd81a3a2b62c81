"""Experiments on one batch that find why its gradient depends on how it is divided.

The gradient of the whole batch is compared with the sum over its shares. Then suspects are switched
off, to find out with which of them off the difference is gone. `python -m` runs them in a child
process of `hvdtrain verify-n`.
"""

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd

from hvdtrain.config.options import build_config
from hvdtrain.evidence.children import read_json
from hvdtrain.evidence.verify_n.causes import Cause
from hvdtrain.evidence.verify_n.parting import AGREEMENT, largest_gap
from hvdtrain.evidence.verify_n.passes import OUTSIDE, ModuleCall, Subject, digest, switched_off
from hvdtrain.exchange import SingleProcess
from hvdtrain.log import few
from hvdtrain.ring import split_evenly
from hvdtrain.run.prepare import prepare
from hvdtrain.run.tasks import find_source
from hvdtrain.tensors import params_sha256
from hvdtrain.topology import Topology
from hvdtrain.train.checkpoint import load_state

NAMES_SHOWN = 6
SEED, OTHER_SEED = 1, 1001  # of passes; shares have those that follow


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Return the report of the experiments, or only the digests of data and parameters."""
    # Gradients of shares are compared: shares of virtual workers would hide what is looked for, and
    # compiled code has no calls of modules.
    config = build_config(
        {"config": request["config_file"], "virtual_workers": None, "compile": False}
    )
    exchange, topology = SingleProcess(), Topology()
    source = find_source(config, exchange, topology.local_rank)
    batch_size = config.batch.resolve(workers=1)
    job = prepare(config, batch_size, source, exchange, topology)
    initial = params_sha256(job.model)
    if request["before"]:
        job.model.load_state_dict(load_state(Path(request["before"]))["model"])
    epoch = (request["step"] - 1) // job.sampler.steps_per_epoch
    indices = next(job.sampler.global_batches(job.sampler.cursor(request["step"] - 1)))
    part = split_evenly(len(indices), job.feed.micro_batches)[0]
    subject = Subject(job, indices[part], epoch, request["shares"])
    causes = [] if request["only_digests"] else find_causes(subject, request["exact"])
    return {
        "digests": {"data": digest(subject.whole.batch), "parameters": initial},
        "causes": [asdict(cause) for cause in causes],
    }


def find_causes(subject: Subject, exact: bool = False) -> list[Cause]:
    """Return the causes that experiments show, in the order in which they must be removed.

    `exact`: with virtual workers, so that dropout and batch norm are the same for every N.
    """
    if digest(subject.whole.batch) != digest(subject.again.batch):
        return [
            Cause(
                "data",
                "random numbers in the data: the same samples of the same epoch, read twice, have "
                "different values",
                "draw them from a generator that is seeded by the run's seed, the epoch and the "
                "sample's number",
            )
        ]
    if cause := _unrepeatable(subject, 0.0 if exact else AGREEMENT):
        return [cause]
    suspects = {"random": subject.drawing(), "batch norm": subject.normalising()}
    harmless = subject.synchronised()
    if exact:
        harmless += subject.modules(itertools.chain(*suspects.values()))
        suspects = {}
    with switched_off(harmless):
        return _causes_of_shares(subject, suspects)


def _unrepeatable(subject: Subject, limit: float) -> Cause | None:
    """Return the cause if the same pass, seeded alike, gives two gradients."""
    gradients = (subject.gradient([subject.whole], SEED) for _ in range(2))
    difference = largest_gap(*gradients).relative
    if difference <= limit:
        return None
    calls = [subject.calls(subject.whole, SEED) for _ in range(2)]
    first = next((one for one, other in zip(*calls, strict=False) if _differ(one, other)), None)
    where = f"the first module whose output differs is {first.module}" if first else OUTSIDE
    return Cause(
        "not repeatable",
        "random numbers without a seed, or a kernel that is not deterministic: the same pass, with "
        f"the same seed, gives gradients that differ by {difference:.1e}; {where}",
        "draw from torch's global generator, which is seeded; --deterministic refuses kernels that "
        "do not repeat",
        (first.module,) if first else (),
    )


def _differ(one: ModuleCall, other: ModuleCall) -> bool:
    return any(
        a is None or b is None or not torch.equal(a, b)
        for a, b in itertools.zip_longest(one.returned, other.returned)
    )


def _causes_of_shares(subject: Subject, suspects: dict[str, list[str]]) -> list[Cause]:
    """Return what makes the gradient of the whole batch differ from the sum over shares."""
    if _difference(subject) <= AGREEMENT:
        return []
    with switched_off(subject.modules(itertools.chain(*suspects.values()))):
        if (left := _difference(subject)) > AGREEMENT:
            return _further_causes(subject)
    causes = []
    for kind, names in suspects.items():
        others = [others for other, others in suspects.items() if other != kind]
        with switched_off(subject.modules(itertools.chain(*others))):
            alone = _difference(subject)
        if names and alone > AGREEMENT:
            gone = f"the difference of the gradients, {alone:.1e}, is {left:.1e}"
            causes.append(_switched_cause(kind, subject, names, gone))
    return causes


def _difference(subject: Subject) -> float:
    """Return how far the gradient of the whole batch is from the sum over its shares."""
    whole = subject.gradient([subject.whole], SEED)
    return largest_gap(whole, subject.gradient(subject.parts, OTHER_SEED)).relative


def _switched_cause(kind: str, subject: Subject, names: list[str], gone: str) -> Cause:
    where = few(names, NAMES_SHOWN)
    if kind == "batch norm":
        return Cause(
            kind,
            f"batch norm takes its statistics over one worker's samples, in {where}: with it in "
            f"evaluation mode {gone}",
            "--sync-bn, or --virtual-workers V",
            tuple(names),
        )
    dropout = all(
        isinstance(module, _DropoutNd) or isinstance(getattr(module, "dropout", None), float)
        for module in subject.modules(names)
    )
    return Cause(
        "dropout" if dropout else "random forward",
        f"{'dropout masks' if dropout else 'random numbers in the forward pass'} differ between "
        f"workers, in {where}: with {'dropout' if dropout else 'these modules'} in evaluation mode "
        f"{gone}",
        "--virtual-workers V, with V at least the largest N"
        + (", or a probability of 0" if dropout else ""),
        tuple(names),
    )


def _further_causes(subject: Subject) -> list[Cause]:
    """Return causes other than dropout and batch norm, which are switched off."""
    seeded = [subject.gradient([subject.whole], seed) for seed in (SEED, OTHER_SEED)]
    if (random := largest_gap(*seeded).relative) > AGREEMENT:
        names = subject.drawing()
        return [
            Cause(
                "random forward",
                f"random numbers in the forward pass, in {few(names or [OUTSIDE], NAMES_SHOWN)}: "
                "with another seed, as other workers have it, the same samples give a gradient "
                f"that differs by {random:.1e}",
                "--virtual-workers V, with V at least the largest N",
                tuple(name for name in names if name != OUTSIDE),
            )
        ]
    cause = _mixing(subject) or _loss_cause(subject)
    return [cause] if cause else []


def _mixing(subject: Subject) -> Cause | None:
    """Return the cause if a module computes something else for a sample in another batch."""
    passes = [subject.calls(part, SEED) for part in (subject.whole, *subject.parts)]
    for calls in zip(*passes, strict=False):
        if len({call.module for call in calls}) > 1:
            return None
        if (difference := _apart([call.returned for call in calls])) <= AGREEMENT:
            continue
        name = calls[0].module
        if _apart([call.taken for call in calls]) > AGREEMENT:
            name = name.rpartition(".")[0] or "the model"  # what calls it made the difference
        return Cause(
            "mixes samples",
            f"{name} computes over the samples of its batch: for the same samples in a smaller "
            f"batch its values differ by {difference:.1e}",
            "compute for each sample on its own, or give --virtual-workers V",
            (name,),
        )
    return None


def _apart(tensors: Sequence[list[torch.Tensor]]) -> float:
    """Return the largest relative difference between tensors of the whole batch and its shares'.

    `tensors`: the whole's, then each share's. Those that do not hold samples are left out.
    """
    whole: dict[str, torch.Tensor] = {}
    joined: dict[str, torch.Tensor] = {}
    for number, (first, *rest) in enumerate(zip(*tensors, strict=False)):
        for dim in range(first.dim()):
            shapes = [(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in (first, *rest)]
            if len(set(shapes)) == 1 and sum(part.shape[dim] for part in rest) == first.shape[dim]:
                whole[str(number)], joined[str(number)] = first, torch.cat(rest, dim)
                break
    return largest_gap(whole, joined).relative


def _loss_cause(subject: Subject) -> Cause | None:
    """Return the cause if the loss of the batch is not the sum of the losses of its shares."""
    name = f"{type(subject.job.task).__name__}.loss"
    whole, *parts = (subject.sums(part, SEED) for part in (subject.whole, *subject.parts))
    losses = [part.loss.item() for part in parts]
    total, summed = whole.loss.item(), sum(losses)
    weighted = sum(loss * part.samples for loss, part in zip(losses, subject.parts, strict=True))
    if whole.samples != sum(part.samples for part in parts):
        counts = " + ".join(str(part.samples) for part in parts)
        return Cause(
            "count of samples",
            f"{name} counts {whole.samples} samples in the whole batch, but {counts} in shares",
            "return the number that the loss is a sum over",
        )
    if _close(total, summed):
        return None
    values = f"{total:.6g} for the whole batch, {summed:.6g} as the sum over its shares"
    if _close(total, weighted / subject.whole.samples):
        return Cause(
            "mean loss",
            f"{name} returns a mean over the batch: {values}",
            'return the sum over the samples (reduction="sum"); hvdtrain divides by their number',
        )
    return Cause(
        "loss over the batch",
        f"{name} is not a sum over samples: {values}",
        "return a sum in which each sample's loss depends on that sample alone",
    )


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= AGREEMENT * max(abs(one), abs(other))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    report = run(read_json(folder / "request.json"))
    (folder / "report.json").write_text(json.dumps(report), "utf-8")
