"""The audit of a training run: copy local gradients, compare, record, and explain a mismatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file

from hvdtrain.audit.capture import BLOCK_ELEMENTS, LocalGradients, Parts, flattened
from hvdtrain.audit.checks import BoundCheck
from hvdtrain.audit.findings import (
    NOTHING,
    Block,
    Finding,
    digest,
    local_values,
    make_blocks,
    reduced_values,
    tell_all,
)
from hvdtrain.audit.verdict import (
    conclusion,
    describe_changed,
    describe_difference,
    describe_finding,
    first_differences,
    group,
    headline,
)
from hvdtrain.errors import AuditMismatch, UsageError
from hvdtrain.ring import Transport

DTYPES = (torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class AuditRecord:
    """The result of one audited step, over all ranks."""

    step: int
    ok: bool
    parameters: int
    elements: int
    worst_error_over_bound: float
    worst_parameter: str


class Check(Protocol):
    """A comparison of a block of reduced gradients with their reference."""

    @property
    def whole_parameters(self) -> bool:
        """Return whether a block must be exactly one complete parameter."""

    def worst(
        self, block: Block, local: torch.Tensor, reduced: torch.Tensor, whole: bool
    ) -> Finding:
        """Collective: return the worst element of this rank's part, or of the `whole` block."""


class Auditor:
    """An audit of the gradients of `model` every `every` steps (0: never)."""

    def __init__(
        self,
        model: torch.nn.Module,
        transport: Transport,
        every: int,
        on_record: Callable[[AuditRecord], None] = lambda record: None,
        check: Check | None = None,
        parts: int = 1,
        seed: int = 0,
        evidence: Path | None = None,
    ) -> None:
        """Prepare the audit; raises UsageError for a parameter of a type without a known bound.

        `on_record` is called on every rank with each result, before a mismatch is raised. `check`:
        by default the rounding bound. `parts`: one audit covers one of so many parts of the
        gradients, drawn by `seed`. `evidence`: the folder for the gradients of a mismatch, if any.
        """
        self._named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._parameters = [parameter for _, parameter in self._named]
        _refuse_other_types(self._named)
        self._transport = transport
        self._every = every
        self._on_record = on_record
        self._check = check or BoundCheck(transport)
        lengths = [parameter.numel() for parameter in self._parameters]
        self._parts = Parts(lengths, parts, seed, self._check.whole_parameters)
        self._block_elements = 0 if self._check.whole_parameters else BLOCK_ELEMENTS
        self._evidence = evidence
        self._local = LocalGradients(self._parameters)
        self._blocks: list[Block] = []
        self._changed: int | None = None  # first parameter whose .grad was modified by code

    def begin(self, step: int) -> None:
        """Start copying gradients if `step` is audited; call before the backward pass."""
        if not self.is_due(step):
            return
        self._changed = None
        pieces = self._parts.of_audit(step // self._every - 1)
        self._blocks = make_blocks(pieces, self._parameters, self._block_elements)
        self._local.begin(pieces)

    def end(self, step: int) -> None:
        """Collective: compare the gradients, after the reduction.

        Does nothing at a step that is not audited, or without a backward pass on any rank. Raises
        AuditMismatch on every rank if a gradient on any rank is beyond its bound, or if ranks hold
        different bits.
        """
        if not self.is_due(step):
            return
        self._local.end()
        own, digests = NOTHING, []
        for block in self._blocks:
            reduced = reduced_values(block, self._parameters)
            digests.append(digest(reduced))
            found = self._check.worst(block, local_values(block, self._local), reduced, whole=False)
            own = max(own, found, key=lambda finding: finding.ratio)
        # The last column: whether there was a backward pass since `begin`. A loop that synchronizes
        # twice per step reduces reduced gradients again: there is nothing to compare them with.
        findings, table = tell_all(own, [*digests, self._local.found_any], self._transport)
        table, saw_gradients = table[:, :-1], table[:, -1]
        if not saw_gradients.any():
            return
        worst = max(findings, key=lambda finding: finding.ratio)
        different = (table != table[0]).any(axis=0)
        if worst.ratio <= 1 and not different.any():
            self._on_record(self._record(step, True, worst))
            return
        focus = self._blocks[worst.block if worst.ratio > 1 else int(different.argmax())]
        self._explain(step, focus, list(table[:, focus.number]))

    def look(self) -> None:
        """Check whether code has changed a gradient since the backward pass.

        Call it before waiting for the reduction. A mismatch at this step is attributed to such a
        change.
        """
        self._changed = self._local.first_changed()

    def is_due(self, step: int) -> bool:
        """Return whether a step (counted from 1) is audited."""
        return self._every > 0 and step % self._every == 0

    def close(self) -> None:
        """Collective: close the transport."""
        self._local.end()
        self._transport.close()

    def _explain(self, step: int, block: Block, digests: list[float]) -> None:
        """Collective: compare one whole block on every rank, and raise AuditMismatch."""
        reduced = reduced_values(block, self._parameters)
        own = self._check.worst(block, local_values(block, self._local), reduced, whole=True)
        changed = -1 if self._changed is None else self._changed
        findings, table = tell_all(own, [changed], self._transport)
        groups = group(digests, findings)
        differences = first_differences(reduced, groups, self._transport)
        worst = max(findings, key=lambda finding: finding.ratio)
        touched = describe_changed([int(number) for number in table[:, 0]], self._named)
        lines = [headline(step, findings), *touched]
        for rank, (finding, difference) in enumerate(zip(findings, differences, strict=True)):
            if finding.ratio > 1:
                lines.append(describe_finding(rank, finding, self._named))
            elif difference:
                place, own_value, theirs = difference
                where = block.locate(place)
                if worst.ratio <= 1:
                    worst = replace(worst, parameter=where[0])
                lines.append(
                    describe_difference(rank, where, own_value, theirs, groups, self._named)
                )
        if not touched:
            lines.append(conclusion(groups, findings[groups.trusted[0]].ratio > 1))
        lines += self._leave_evidence(step, worst.parameter)
        lines.append("The optimizer has not used these gradients. Rounding cannot explain this")
        self._on_record(self._record(step, False, worst))
        raise AuditMismatch("\n".join(lines))

    def _record(self, step: int, ok: bool, worst: Finding) -> AuditRecord:
        pieces = [piece for block in self._blocks for piece in block.pieces]
        return AuditRecord(
            step=step,
            ok=ok,
            parameters=len({piece.parameter for piece in pieces}),
            elements=sum(piece.stop - piece.start for piece in pieces),
            worst_error_over_bound=worst.ratio,
            worst_parameter=self._named[worst.parameter][0] if self._named else "",
        )

    def _leave_evidence(self, step: int, parameter: int) -> list[str]:
        """Save this rank's local and reduced gradients of one parameter; return a line on where."""
        if self._evidence is None:
            return []
        folder = self._evidence / f"step-{step:08d}"
        copies = [
            (piece.start, copy)
            for block in self._blocks
            for piece in block.pieces
            if piece.parameter == parameter and (copy := self._local.get(piece)) is not None
        ]
        gradient = self._parameters[parameter].grad
        tensors = {f"local_from_{start}": copy.cpu() for start, copy in copies}
        if gradient is not None:
            tensors["reduced"] = flattened(gradient).cpu().contiguous().clone()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"rank-{self._transport.rank}.safetensors"
            save_file(tensors, path, metadata={"parameter": self._named[parameter][0]})
        except Exception as error:  # a full disk must not hide the mismatch
            return [f"Its gradients could not be saved in {folder} ({error})"]
        return [f"Each rank's local and reduced gradients of that parameter are in {folder}"]


def _refuse_other_types(named: list[tuple[str, torch.nn.Parameter]]) -> None:
    others = [f"{name} ({p.dtype})" for name, p in named if p.dtype not in DTYPES]
    if others:
        raise UsageError(
            f"audit: no bound is known for {len(others)} parameters, such as {others[0]}: "
            "supported types are float16, float32 and float64"
        )


class NoAudit:
    """The audit of runs without audits, and of a single process, which exchanges nothing."""

    def begin(self, step: int) -> None: ...

    def end(self, step: int) -> None: ...

    def close(self) -> None: ...
