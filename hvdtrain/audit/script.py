"""The audit in a training loop that is not ours: Horovod's, or torch's DistributedDataParallel.

    from hvdtrain import GradientAudit
    audit = GradientAudit(model, optimizer)      # after hvd.DistributedOptimizer(...)

With a Horovod optimizer that is all: whenever it has synchronized its gradients, they are checked
before they are clipped or used. In any other loop, DDP's for one, there is one line more, between
`loss.backward()` and whatever comes next:

    audit.check()

`audit.summary()` is a line about all audits so far. A loop that was never checked is reported when
the process ends.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hvdtrain.audit.auditor import Auditor, AuditRecord
from hvdtrain.audit.checks import BoundCheck
from hvdtrain.errors import UsageError
from hvdtrain.exchange import Reduction, SingleProcess, joined
from hvdtrain.log import complain, counted, report_uncaught
from hvdtrain.ring import Transport
from hvdtrain.ring.bound import ERROR_BOUNDS
from hvdtrain.topology import Topology

DEFAULT_EVERY = 100


@dataclass
class Progress:
    """What a script's audits have come to, without its model, which may be gone by then."""

    rank: int
    ranks: int
    every: int
    follows: bool = False  # whether an optimizer calls check()
    trains: bool = False  # whether a backward pass has reached the model
    calls: int = 0  # of check()
    checked: int = 0
    failed: int = 0
    worst: float = 0.0

    def summary(self) -> str:
        """Return a line about all audits so far."""
        if self.checked:
            return (
                f"audit: {counted(self.checked, 'step')} compared with the ring reference, "
                f"{self.failed} failed; worst error {self.worst:.2f} of the rounding bound"
            )
        if self.ranks == 1:
            return "audit: nothing compared: a single worker exchanges nothing"
        return f"audit: nothing compared in {counted(self.calls, 'step')}{self._reason()}"

    def warn_if_idle(self) -> None:
        """Write a warning if nothing was checked though something should have been."""
        due = self.trains if self.calls == 0 else self.calls >= self.every
        crashed = hasattr(sys, "last_value")  # then the error says what counts
        if due and not self.checked and self.ranks > 1 and self.rank == 0 and not crashed:
            complain(f"hvdtrain: warning: {self.summary()}")

    def _reason(self) -> str:
        if 0 < self.calls < self.every:
            return f": the first audit is due at step {self.every}"
        if self.calls > 0:
            return ": no backward pass has reached the model that GradientAudit was given"
        if self.follows:
            return ": the optimizer that GradientAudit was given has reduced no gradients"
        return ": check() was never called"


class GradientAudit:
    """Compares reduced gradients with the ring reference, every so many steps."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        every: int = DEFAULT_EVERY,
        parts: int = 1,
        compression: str = "none",
        on_record: Callable[[AuditRecord], None] = lambda record: None,
        evidence: str | Path | None = "audit",
        transport: Transport | None = None,
        op: str = "average",
    ) -> None:
        """Collective: every rank makes one, at the same point, before the first backward pass.

        `model`: the plain one or its DDP wrapper. `optimizer`: Horovod's DistributedOptimizer, to
        be checked by itself; or what `hvdtrain.distribute` gave, which in a single process leaves
        nothing to check. `parts`: look at one of so many parts of the gradients at each audit.
        `compression`: none or fp16, and `op`: average or sum, as the optimizer exchanges.
        `evidence`: the folder for the gradients of a mismatch, or None. `transport`: by default a
        ring over the ranks of the job that this process is in. Raises UsageError for a wrong
        argument, or where there is no job. An error of hvdtrain that the script does not catch,
        such as AuditMismatch, ends it with one message, and with the exit code of that error.
        """
        report_uncaught()
        if every < 1 or parts < 1:
            raise UsageError(f"GradientAudit: every={every}, parts={parts}: must be above 0")
        if compression not in ("none", "fp16"):
            raise UsageError(f"GradientAudit: compression={compression!r}: none or fp16")
        if op not in ERROR_BOUNDS:
            raise UsageError(f"GradientAudit: op={op!r}: {' or '.join(ERROR_BOUNDS)}")
        _refuse_sparse(model, optimizer)
        self._on_record = on_record
        self._step = 1
        ring = transport or _ring_of_this_job()
        self._progress = Progress(ring.rank, ring.size, every)
        atexit.register(self._progress.warn_if_idle)
        _notice_first_backward(model, self._progress)
        self._auditor = Auditor(
            model,
            ring,
            every,
            self._note,
            BoundCheck(ring, Reduction(op, compression)),
            parts,
            evidence=None if evidence is None else Path(evidence),
        )
        self._auditor.begin(self._step)
        if optimizer is not None and not isinstance(joined(), SingleProcess):
            self._follow(optimizer)

    def check(self) -> None:
        """Collective: after each step's gradients are reduced, before they are clipped or used.

        Compares at every `every`-th call. Raises AuditMismatch on all ranks when a gradient is
        further from the reference than rounding explains.
        """
        self._progress.calls += 1
        self._auditor.end(self._step)
        self._step += 1
        self._auditor.begin(self._step)

    @property
    def checked(self) -> int:
        """Audited steps so far."""
        return self._progress.checked

    @property
    def failed(self) -> int:
        """Those of them with a mismatch."""
        return self._progress.failed

    @property
    def worst_error_over_bound(self) -> float:
        """The largest error of all audited steps, measured in its bound."""
        return self._progress.worst

    def summary(self) -> str:
        """Return a line about all audits so far: how many, how many failed, and the worst error."""
        return self._progress.summary()

    def close(self) -> None:
        """Collective: let go of the connections. The end of the process does it too."""
        self._auditor.close()

    def _note(self, record: AuditRecord) -> None:
        self._progress.checked += 1
        self._progress.failed += not record.ok
        self._progress.worst = max(self._progress.worst, record.worst_error_over_bound)
        self._on_record(record)

    def _follow(self, optimizer: Any) -> None:
        """Check whenever Horovod's optimizer has reduced; step() and clipping both call it."""
        synchronize = getattr(optimizer, "synchronize", None)
        if synchronize is None:
            raise UsageError(
                f"GradientAudit: {type(optimizer).__name__} is not Horovod's DistributedOptimizer: "
                "leave the optimizer out, and call check() after each backward pass"
            )

        def synchronize_and_check() -> None:
            self._auditor.look()
            synchronize()
            self.check()

        self._progress.follows = True
        optimizer.synchronize = synchronize_and_check


def _refuse_sparse(model: torch.nn.Module, optimizer: Any) -> None:
    """Rows that are looked up twice are added in an order that no bound covers, unless gradients
    are made dense first: by `hvdtrain.distribute`, or by Horovod's optimizer where it is told so.
    """
    if joined() is not None or getattr(optimizer, "sparse_as_dense", False):
        return
    layers = [name for name, layer in model.named_modules() if getattr(layer, "sparse", False)]
    if layers:
        raise UsageError(
            f"GradientAudit: layer {layers[0]} makes sparse gradients, whose sums have no known "
            "bound. Give hvd.DistributedOptimizer sparse_as_dense=True, or the layer sparse=False"
        )


def _notice_first_backward(model: torch.nn.Module, progress: Progress) -> None:
    hooks: list[Any] = []

    def notice(_: torch.Tensor) -> None:
        progress.trains = True
        for hook in hooks:
            hook.remove()

    for parameter in model.parameters():
        if parameter.requires_grad:
            hooks.append(parameter.register_post_accumulate_grad_hook(notice))


def _ring_of_this_job() -> Transport:
    """Collective: a ring over the ranks of the job that this process is in, however it joined."""
    workers = joined()
    if workers is not None:
        return workers.ring()
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        from hvdtrain.exchange.torch_ring import ring_of_torch_distributed

        ring = ring_of_torch_distributed()
        Topology.from_environment().check_joined(ring.size)
        return ring
    if "horovod.torch" in sys.modules:
        from hvdtrain.exchange.horovod import ring_of_horovod

        return ring_of_horovod()
    raise UsageError(
        "GradientAudit: this process is in no job: call hvdtrain.init(), "
        "hvd.init() or torch.distributed.init_process_group() before"
    )
