"""The audit of a training run: copy local gradients, compare, record, and explain a mismatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from hvdtrain.audit.capture import (
    Block,
    Groups,
    LocalGradients,
    Parts,
    Piece,
    block_elements,
    flattened,
    make_blocks,
    values_of,
)
from hvdtrain.audit.checks import BoundCheck, CanonicalCheck, ExactCheck
from hvdtrain.audit.mismatch import (
    NO_ERROR,
    WorstError,
    describe_mismatch,
    digest,
    first_differences,
    gather_errors,
    trusted_ranks,
)
from hvdtrain.errors import AuditMismatch, UsageError
from hvdtrain.exchange.buckets import Message
from hvdtrain.exchange.gradients import ADDED_AS, parameters_of, real_length
from hvdtrain.files import obey_umask
from hvdtrain.log import counted
from hvdtrain.ring import Transport

if TYPE_CHECKING:
    from hvdtrain.data.feeding import StepData
    from hvdtrain.train.interfaces import Audit
    from hvdtrain.train.metering import StepSums

DTYPES = (torch.float16, torch.float32, torch.float64, *ADDED_AS)


@dataclass(frozen=True)
class AuditRecord:
    """The result of one audited step, over all ranks."""

    step: int
    ok: bool
    parameters: int
    elements: int
    worst_error_over_bound: float
    worst_parameter: str


class Auditor:
    """An audit of the gradients of `model` every `every` steps."""

    def __init__(
        self,
        model: torch.nn.Module,
        transport: Transport,
        every: int,
        on_record: Callable[[AuditRecord], None] = lambda record: None,
        check: BoundCheck | ExactCheck | CanonicalCheck | None = None,
        parts: int = 1,
        seed: int = 0,
        evidence: Path | None = None,
        messages: Callable[[], Sequence[Message]] | None = None,
    ) -> None:
        """Prepare the audit; raises UsageError for a parameter of a type without a known bound.

        `on_record` is called on every rank with each result, before a mismatch is raised. `check`:
        by default the rounding bound. `parts`: one audit covers one of so many parts of the
        gradients, drawn by `seed`. `evidence`: the folder for the gradients of a mismatch, if any.
        `messages`: returns the parameters that are reduced together, for an exact check; by default
        none.
        """
        self._model, self._transport, self._every = model, transport, every
        self._on_record, self._check = on_record, check or BoundCheck(transport)
        self._messages, self._part_count, self._seed = messages, parts, seed
        self._evidence = evidence
        self._due: list[list[Piece]] = []  # of this step, in groups
        self._pieces: list[Piece] = []  # those of the optimizers
        self._changed: int | None = None  # first parameter whose .grad was modified by code
        self._prepare()

    def _prepare(self) -> None:
        """Prepare for the trainable parameters. Raises UsageError for one without a known bound."""
        self._named = [(n, p) for n, p in self._model.named_parameters() if p.requires_grad]
        self._parameters = [parameter for _, parameter in self._named]
        others = [f"{name} ({p.dtype})" for name, p in self._named if p.dtype not in DTYPES]
        if others:
            raise UsageError(
                f"audit: no bound is known for {len(others)} parameters, such as {others[0]}: "
                "supported types are float16, bfloat16, float32, float64 and complex ones"
            )
        lengths = [real_length(parameter) for parameter in self._parameters]
        whole: Groups | None = None
        if self._check.whole:
            numbers = {name: number for number, (name, _) in enumerate(self._named)}
            whole = [[number] for number in numbers.values()]
            if self._messages is not None:
                whole = [[numbers[name] for name in message] for message in self._messages()]
        self._most = block_elements(self._transport.size)
        self._parts = Parts(lengths, self._part_count, self._seed, whole, self._most)
        self._local = LocalGradients(self._parameters)

    def begin(self, step: int, data: StepData | None = None) -> None:
        """Start copying gradients if `step` (from 1) is audited; call before the backward pass."""
        if step % self._every:
            return
        self._changed = None
        trainable = [p for p in self._model.parameters() if p.requires_grad]
        if list(map(id, trainable)) != list(map(id, self._parameters)):
            self._prepare()
        self._due = self._parts.of_audit(step // self._every - 1)
        self._local.begin(list(chain.from_iterable(self._due)))

    def begin_pass(self, share: int, batch: Any = None) -> None:
        """Copy the gradients of each share on its own; has no effect unless the step is audited."""
        self._local.begin_share(share)

    def reduced(self, step: int, optimizers: Sequence[torch.optim.Optimizer] | None = None) -> None:
        """Collective: compare the gradients, after the reduction: all, or those of optimizers.

        Has no effect at a step that is not audited, or if no rank has run a backward pass since
        `begin`. Raises AuditMismatch on every rank if a gradient on any rank is beyond its bound,
        or if ranks hold different bits.
        """
        if step % self._every:
            return
        groups = self._due
        if optimizers is not None:
            owned = set(map(id, parameters_of(*optimizers)))
            groups = [
                group for group in groups if id(self._parameters[group[0].parameter]) in owned
            ]
        self._pieces = list(chain.from_iterable(groups))
        blocks = make_blocks(groups, self._parameters, self._most if self._check.joins else 0)
        local_worst, digests = NO_ERROR, []
        for block, local, reduced in values_of(blocks, self._local, self._parameters):
            digests.append(digest(reduced))
            block_worst = self._check.compare(block, local, reduced, all_segments=False)
            local_worst = max(local_worst, block_worst, key=lambda error: error.ratio)
        # The last column: whether there was a backward pass since `begin`. A loop that synchronizes
        # twice per step reduces reduced gradients again: there is nothing to compare them with.
        errors, table = gather_errors(
            local_worst, [*digests, bool(self._local.shares)], self._transport
        )
        table, saw_gradients = table[:, :-1], table[:, -1]
        if not saw_gradients.any():
            return
        worst = max(errors, key=lambda error: error.ratio)
        different = (table != table[0]).any(axis=0)
        if worst.ratio <= 1 and not different.any():
            self._on_record(self._record(step, True, worst))
            return
        focus = blocks[worst.block if worst.ratio > 1 else int(different.argmax())]
        self._explain(step, focus, list(table[:, focus.number]))

    def updated(self, step: int, sums: StepSums) -> None:
        """Stop copying gradients."""
        self._local.end()

    def look(self) -> None:
        """Check whether code has changed a gradient since the backward pass.

        Call it before waiting for the reduction. A mismatch is then attributed to such a change.
        """
        self._changed = self._local.first_changed()

    def close(self) -> None:
        """Collective: close the transport."""
        self._local.end()
        self._transport.close()

    def _explain(self, step: int, block: Block, digests: list[float]) -> None:
        """Collective: compare all of one block on every rank, and raise AuditMismatch."""
        ((_, local, reduced),) = values_of([block], self._local, self._parameters)
        local_worst = self._check.compare(block, local, reduced, all_segments=True)
        changed = -1 if self._changed is None else self._changed
        errors, table = gather_errors(local_worst, [changed], self._transport)
        trusted = trusted_ranks(digests, errors)
        differences = first_differences(block, reduced, trusted[0], self._transport)
        numbers = [int(number) for number in table[:, 0]]
        lines = describe_mismatch(step, errors, differences, numbers, trusted, self._named)
        worst = max(errors, key=lambda error: error.ratio)
        if worst.ratio <= 1:
            for difference in filter(None, differences):
                worst = replace(worst, parameter=difference.parameter)
        lines += self._leave_evidence(step, worst.parameter)
        lines.append(
            "This is more than rounding can explain. The optimizer has not used these gradients"
        )
        self._on_record(self._record(step, False, worst))
        raise AuditMismatch("\n".join(lines))

    def _record(self, step: int, ok: bool, worst: WorstError) -> AuditRecord:
        return AuditRecord(
            step=step,
            ok=ok,
            parameters=len({piece.parameter for piece in self._pieces}),
            elements=sum(piece.length for piece in self._pieces),
            worst_error_over_bound=worst.ratio,
            worst_parameter=self._named[worst.parameter][0] if self._named else "",
        )

    def _leave_evidence(self, step: int, parameter: int) -> list[str]:
        """Save this rank's local and reduced gradients of one parameter; return a line on where."""
        if self._evidence is None:
            return []
        folder = self._evidence / f"step-{step:08d}"
        tensors = {
            f"local_of_share_{share}_from_{piece.start}": copy
            for share in self._local.shares
            for piece in self._pieces
            if piece.parameter == parameter and (copy := self._local.get(share, piece)) is not None
        }
        gradient = self._parameters[parameter].grad
        if gradient is not None:
            tensors["reduced"] = flattened(gradient).contiguous().clone()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"rank-{self._transport.rank}.safetensors"
            save_file(tensors, path, metadata={"parameter": self._named[parameter][0]})
            obey_umask(path)
        except Exception as error:  # a full disk must not hide the mismatch
            return [f"Its gradients could not be saved in {folder} ({error})"]
        return [f"Each rank's local and reduced gradients of that parameter are in {folder}"]


class Audits:
    """The audits and traces of a run, one after another, or none."""

    def __init__(self, *each: Audit) -> None:
        self._each = each

    def begin(self, step: int, data: StepData) -> None:
        for audit in self._each:
            audit.begin(step, data)

    def begin_pass(self, share: int, batch: Any) -> None:
        for audit in self._each:
            audit.begin_pass(share, batch)

    def reduced(self, step: int, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for audit in self._each:
            audit.reduced(step, optimizers)

    def updated(self, step: int, sums: StepSums) -> None:
        for audit in self._each:
            audit.updated(step, sums)

    def close(self) -> None:
        for audit in self._each:
            audit.close()


def audit_line(checked: int, failed: int, worst: float) -> str:
    """Return a line about all audits so far; `worst`: the largest error, in units of its bound."""
    return (
        f"audit: {counted(checked, 'step')} compared with the ring reference, {failed} failed; "
        f"worst error {worst:.2f} of the rounding bound"
    )
