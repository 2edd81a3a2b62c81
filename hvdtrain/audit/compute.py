"""The audit of the computation: another rank computes a share again, and every bit must agree.

The audit of the exchange proves that gradients were added correctly. It cannot see that a gradient
was wrong before, by a defective core or kernel. Here, at a due step, the rank of one share sends
its batches, buffers and random generators; another rank, on another host if there is one, computes
the share's gradients from them, with its own copy of the parameters. If a bit differs, further
ranks compute it too, and both ranks again: the verdict names the rank, and whether it errs again.

With two ranks there is no third opinion. If each repeats its own result, the slope of the loss
decides, in the direction in which the two gradients differ: it takes forward passes alone.

A rank can be blamed only if the computation repeats, so this is tested first: a model may keep a
state outside of its parameters and buffers, which nobody else has.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hvdtrain.audit.digests import ShareDigests, Words, digest_of
from hvdtrain.audit.trace import refuse_others
from hvdtrain.data.feeding import StepData, to_device
from hvdtrain.errors import ComputeMismatch, TrainingError, UsageError
from hvdtrain.exchange import Exchange
from hvdtrain.models.execution import copied
from hvdtrain.tensors import changed, copied_to_cpu
from hvdtrain.train.job import Job
from hvdtrain.train.metering import StepSums
from hvdtrain.train.worker_state import buffers_of, load_buffers, rng_state, set_rng_state

CLEARLY = 4.0  # times as far from the slope: more than rounding can explain
SLOPE_STEP = 1e-6  # in the space of the parameters
Gradients = list[torch.Tensor | None]  # by trainable parameter


@dataclass(frozen=True)
class ShareWork:
    """All that a rank needs to compute the gradients of a share as its own rank did."""

    weight: float  # of each loss
    buffers: Mapping[str, torch.Tensor | None]  # before the first pass
    passes: Sequence[tuple[dict[str, Any], Any]]  # random generators, and the batch
    gradients: Words  # digests of what the share's rank has computed


class ComputeAudit:
    """An audit of one share's gradients at every K-th step."""

    def __init__(
        self,
        job: Job,
        exchange: Exchange,
        hosts: Sequence[str],
        every: int,
        seed: int,
        on_record: Callable[[int, bool], None],
    ) -> None:
        """Raise UsageError for a model that cannot be copied.

        `hosts`: the name of each rank's host. `seed`: of the choice of shares. `on_record`: called
        on every rank with each audited step, and whether all agreed.
        """
        self._job, self._exchange, self._hosts = job, exchange, hosts
        self._every, self._seed, self._on_record = every, seed, on_record
        self._of_rank = job.feed.shares.of_rank  # virtual workers may move between steps
        named = [(name, p) for name, p in job.model.named_parameters() if p.requires_grad]
        self._names = [name for name, _ in named]
        self._parameters = [p for _, p in named]
        self._local = ShareDigests(self._parameters)
        self._share = -1  # the one that this rank records
        self._weight = 0.0
        self._buffers: Mapping[str, torch.Tensor | None] = {}
        self._passes: list[tuple[dict[str, Any], Any]] = []
        try:
            # Made once: later the model may hold tensors of a graph, which cannot be copied.
            self._twin = copied(job.model)
        except Exception as error:
            raise UsageError(
                f"--audit-compute: the model cannot be copied by copy.deepcopy ({error}): another "
                "rank computes with a copy. Leave --audit-compute out, or make the model copyable"
            ) from error

    def begin(self, step: int, data: StepData) -> None:
        """Choose a share by seed and step, if the step is due."""
        self._share = -1
        self._passes.clear()
        if step % self._every == 0:
            refuse_others(self._parameters, self._job.model, "--audit-compute")
            self._share, _ = self._chosen(step)
            self._weight = self._job.reduction.weight(self._exchange.size) / data.samples

    def begin_pass(self, share: int, batch: Any) -> None:
        """Keep what the chosen share is computed from."""
        if share != self._share or share not in self._of_rank(self._exchange.rank):
            self._local.end()
            return
        if not self._passes:
            # On the CPU: a sent tensor keeps its device, which belongs to another rank.
            self._buffers = copied_to_cpu(buffers_of(self._job.model))
            self._local.begin()
        self._local.begin_pass(share, None)
        # With its strides, on which the choice of kernels depends.
        kept = copy.deepcopy(to_device(batch, torch.device("cpu")))
        self._passes.append((rng_state(self._job.device), kept))

    def reduced(self, step: int, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Collective: compute the chosen share again. Raises ComputeMismatch on a difference."""
        if step % self._every:
            return
        self._local.end()
        share, order = self._chosen(step)
        local_work = None
        if self._passes:
            gradients = self._local.table(share + 1)[share, 1:]
            local_work = ShareWork(self._weight, self._buffers, list(self._passes), gradients)
        works = self._exchange.all_gather_object(local_work, "hvdtrain.compute_audit.work")
        work = next((work for work in works if work is not None), None)
        if work is None:  # the share has no samples in this step
            return
        (opinion,) = self._opinions(work, order[1:2])
        agree = np.array_equal(opinion, work.gradients)
        self._on_record(step, agree)
        if not agree:
            raise self._verdict(step, share, work, opinion, order)

    def updated(self, step: int, sums: StepSums) -> None: ...

    def close(self) -> None:
        self._local.end()

    def _chosen(self, step: int) -> tuple[int, list[int]]:
        """Return the share of a step, and all ranks: its own, then those asked, in order.

        Ranks on other hosts come first.
        """
        generator = np.random.Generator(np.random.PCG64([self._seed, step]))
        owners = {n: rank for rank in range(self._exchange.size) for n in self._of_rank(rank)}
        share = int(generator.choice(sorted(owners)))
        owner = owners[share]
        others = [int(rank) for rank in generator.permutation(self._exchange.size) if rank != owner]
        others.sort(key=lambda rank: self._hosts[rank] == self._hosts[owner])
        return share, [owner, *others]

    def _opinions(self, work: ShareWork, ranks: Sequence[int]) -> list[Words]:
        """Collective: return the digests that each of `ranks` computes."""
        opinion = self._digests(work) if self._exchange.rank in ranks else None
        opinions = self._exchange.all_gather_object(opinion, "hvdtrain.compute_audit.gradients")
        return [opinions[rank] for rank in ranks]

    def _verdict(
        self, step: int, share: int, work: ShareWork, opinion: Words, order: Sequence[int]
    ) -> ComputeMismatch:
        """Collective: find which rank is wrong, how often, and the first tensor that differs."""
        self._require_repetition(step, work)
        owner, checker, *further = order
        asked = [owner, checker, *further[:1]]
        again = dict(zip(asked, self._opinions(work, asked), strict=True))
        first = {owner: work.gradients, checker: opinion}
        wrong, reason = self._wrong(first, again, work)
        differing = np.flatnonzero((work.gradients != opinion).any(axis=1))
        what = (
            f"at step {step} ranks {owner} and {checker} computed different gradients of share "
            f"{share} from the same batch and parameters: {self._names[differing[0]]} "
            f"({len(differing)} of {len(self._names)} parameters)"
        )
        if wrong is None:
            return ComputeMismatch(f"{what}. {reason}", wrong)
        right = first[checker if wrong == owner else owner]
        is_right = np.array_equal(again[wrong], right)
        repeats, kind = ("right", "transient") if is_right else ("again wrong", "repeatable")
        return ComputeMismatch(
            f"{what}. Rank {wrong} on {self._hosts[wrong]} is wrong: {reason}. Computed once "
            f"more, its result is {repeats}: the fault is {kind}. The optimizer has not used these "
            "gradients. Examine that host: hvdtrain doctor --burn-in",
            wrong,
        )

    def _require_repetition(self, step: int, work: ShareWork) -> None:
        """Collective: raise TrainingError if no rank computes the same gradients twice."""
        one, other = (self._digests(work) for _ in range(2))
        repeated = self._exchange.all_gather_object(
            np.array_equal(one, other), "hvdtrain.compute_audit.repeated"
        )
        if not any(repeated):
            raise TrainingError(
                f"--audit-compute: at step {step} no rank computes the same gradients twice from "
                "the same parameters, buffers, random numbers and batch. The model, or the task, "
                "keeps a state of its own that changes (an attribute, a generator), or uses "
                "operations that do not repeat. Make the state a buffer, or leave "
                "--audit-compute out"
            )

    def _wrong(
        self, first: Mapping[int, Words], again: Mapping[int, Words], work: ShareWork
    ) -> tuple[int | None, str]:
        """Collective: return the rank that is wrong, or None, and the reason."""
        owner, checker = first
        for third in again.keys() - first.keys():
            for rank, other in ((owner, checker), (checker, owner)):
                if np.array_equal(again[third], first[other]):
                    return rank, f"rank {third} computed what rank {other} did"
            return None, f"Rank {third} computed a third result: the computation does not repeat"
        changed = [rank for rank in first if not np.array_equal(first[rank], again[rank])]
        for rank, other in ((owner, checker), (checker, owner)):
            if changed == [rank] and np.array_equal(again[rank], first[other]):
                return rank, f"once more it computed what rank {other} did"
        return self._against_slope(work, (owner, checker))

    def _against_slope(self, work: ShareWork, ranks: Sequence[int]) -> tuple[int | None, str]:
        """Collective: return which of two ranks is clearly farther from the slope of the loss, in
        the direction in which their gradients differ; None if they do not agree on it.
        """
        local_gradient = self._flat(self._compute(work))
        held = self._exchange.all_gather_object(local_gradient, "hvdtrain.compute_audit.values")
        one, other = (held[rank] for rank in ranks)
        along = (one - other) / (one - other).norm()
        errors, problem = [math.nan, math.nan], ""
        try:
            slope = self._slope(work, along)
            errors = [abs(float(gradient @ along) - slope) for gradient in (one, other)]
        except TrainingError as error:  # some models compute in their own type only
            problem = f", and its loss cannot be computed in float64 ({error})"
        judged = self._exchange.all_gather_object(errors, "hvdtrain.compute_audit.slopes")
        for wrong, right in ((0, 1), (1, 0)):
            if all(pair[wrong] > CLEARLY * pair[right] for pair in judged):
                return ranks[wrong], (
                    f"its gradient is {errors[wrong]:.1e} from the slope of the loss, measured in "
                    f"float64, and that of rank {ranks[right]} {errors[right]:.1e}"
                )
        text = "Each repeats its own result; with two ranks nobody can say which is wrong"
        return None, f"{text}{problem}"

    def _slope(self, work: ShareWork, along: torch.Tensor) -> float:
        """Return the slope of the loss in a direction of all parameters, by central differences."""
        losses = []
        for sign in (1, -1):
            model = self._prepared(work).double()  # to stay so, as the run ends
            parameters = [p for p in model.parameters() if p.requires_grad]
            parts = along.split([p.numel() for p in parameters])
            with torch.no_grad():
                for parameter, part in zip(parameters, parts, strict=True):
                    parameter.add_(
                        sign * SLOPE_STEP * part.view(parameter.shape).to(parameter.device)
                    )
                losses.append(
                    math.fsum(float(loss) for loss in self._losses(model, work, precise=True))
                )
        return (losses[0] - losses[1]) / (2 * SLOPE_STEP)

    def _digests(self, work: ShareWork) -> Words:
        return np.stack([digest_of(gradient) for gradient in self._compute(work)])

    def _compute(self, work: ShareWork) -> Gradients:
        """Return the gradients of a share. All states of the run stay as they are."""
        model = self._prepared(work)
        for loss in self._losses(model, work):
            loss.backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    def _flat(self, gradients: Gradients) -> torch.Tensor:
        """Return the gradients of all parameters as one vector, in float64, on the CPU."""
        pairs = zip(self._parameters, gradients, strict=True)
        dense = (p.detach() * 0 if g is None else g for p, g in pairs)
        return torch.cat([gradient.cpu().double().reshape(-1) for gradient in dense])

    def _prepared(self, work: ShareWork) -> torch.nn.Module:
        """Return the copy of the model with the parameters of now, and the buffers of the share."""
        model, twin = self._job.model, self._twin
        with torch.no_grad():
            for parameter, twin_parameter in zip(
                model.parameters(), twin.parameters(), strict=True
            ):
                twin_parameter.copy_(parameter)
                twin_parameter.requires_grad_(parameter.requires_grad)
        for module, twin_module in zip(model.modules(), twin.modules(), strict=True):
            twin_module.training = module.training
        load_buffers(twin, work.buffers)
        twin.zero_grad(set_to_none=True)
        return twin

    def _losses(
        self, model: torch.nn.Module, work: ShareWork, precise: bool = False
    ) -> Iterator[torch.Tensor]:
        """Yield the weighted loss of each pass, with its random numbers; `precise`: in float64."""
        job = self._job
        before = rng_state(job.device)
        try:
            for generators, kept in work.passes:
                batch = to_device(_doubled(kept) if precise else kept, job.device)
                set_rng_state(generators, job.device)
                with job.update.autocast(enabled=not precise):
                    loss = job.task.loss(model, batch).loss
                yield job.update.scale(loss * work.weight)
        except Exception as error:
            raise TrainingError(
                f"--audit-compute: a share cannot be computed again: {error}"
            ) from error
        finally:
            set_rng_state(before, job.device)


def _doubled(batch: Any) -> Any:
    """Return a batch with its floating-point tensors in float64."""
    return changed(batch, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
