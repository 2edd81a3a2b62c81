"""The audit of any training loop: with Horovod, or with torch's DistributedDataParallel.

    from hvdtrain import GradientAudit
    audit = GradientAudit(model, optimizer)      # after hvd.DistributedOptimizer(...)

A Horovod optimizer needs nothing else: its gradients are checked whenever it has synchronized them,
before they are clipped or used. Any other loop, such as with DDP, needs after `loss.backward()`:

    audit.check()

`audit.summary()` returns a line about all audits so far. A process that checked nothing prints a
warning at its end.
"""

import atexit
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hvdtrain.audit.auditor import Auditor, AuditRecord, audit_line
from hvdtrain.audit.checks import BoundCheck
from hvdtrain.errors import UsageError, every_problem, refuse
from hvdtrain.exchange import Reduction, SingleProcess, joined
from hvdtrain.log import complain, counted, report_uncaught
from hvdtrain.ring import Transport
from hvdtrain.ring.bound import ERROR_BOUNDS
from hvdtrain.topology import Topology


@dataclass
class AuditCounts:
    """The counts of a script's audits. They hold no reference to the model, and may outlive it."""

    rank: int
    ranks: int
    every: int
    follows: bool = False  # whether an optimizer calls check()
    trains: bool = False  # whether a backward pass has reached the model
    resumed: int = 0  # number of steps before the first
    calls: int = 0  # number of calls of check()
    checked: int = 0
    failed: int = 0
    worst: float = 0.0

    def summary(self) -> str:
        """Return a line about all audits so far."""
        if self.checked:
            return audit_line(self.checked, self.failed, self.worst)
        if self.ranks == 1:
            return "audit: nothing compared: a single worker exchanges nothing"
        return f"audit: nothing compared in {counted(self.calls, 'step')}{self._reason()}"

    def warn_if_idle(self) -> None:
        """Print a warning if an audit was due, but nothing was checked."""
        due = self.trains if self.calls == 0 else self.resumed + self.calls >= self._first
        crashed = hasattr(sys, "last_value")  # the error is then printed instead
        if due and not self.checked and self.ranks > 1 and self.rank == 0 and not crashed:
            complain(f"hvdtrain: warning: {self.summary()}")

    @property
    def _first(self) -> int:
        return (self.resumed // self.every + 1) * self.every

    def _reason(self) -> str:
        if self.calls > 0 and self.resumed + self.calls < self._first:
            return f": the first audit is due at step {self._first}"
        if self.calls > 0:
            return ": no backward pass has reached the model that GradientAudit was given"
        if self.follows:
            return ": the optimizer that GradientAudit was given has reduced no gradients"
        return ": check() was never called"


class GradientAudit:
    """An audit of reduced gradients against the ring reference, every `every` steps."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        every: int = 100,
        parts: int = 1,
        compression: str = "none",
        on_record: Callable[[AuditRecord], None] = lambda record: None,
        evidence: str | Path | None = "audit",
        transport: Transport | None = None,
        op: str = "average",
        steps_done: int = 0,
    ) -> None:
        """Collective: construct on every rank at the same point, before the first backward pass.

        `model`: the plain model or its DDP wrapper. `optimizer`: Horovod's DistributedOptimizer,
        whose steps are then checked automatically; or the result of `hvdtrain.distribute`, which in
        a single process leaves nothing to check. `parts`: cover one of so many parts of the
        gradients in each audit. `compression`: none or fp16, and `op`: average or sum, as in the
        optimizer. `evidence`: the folder for the gradients of a mismatch. `transport`: by default a
        ring over this job's ranks. `steps_done`: those of a resumed run, so that steps are counted
        on. Raises UsageError for an invalid argument, or without a job. An error of hvdtrain that
        is not caught ends the script with one message and its exit code.
        """
        report_uncaught()
        problems = check_options(every, parts, compression, op)
        refuse(f"GradientAudit: {problem}" for problem in problems)
        _refuse_sparse(model, optimizer)
        self._on_record, ring = on_record, transport or _ring_of_this_job()
        self._progress = AuditCounts(ring.rank, ring.size, every, resumed=steps_done)
        atexit.register(self._progress.warn_if_idle)
        _notice_first_backward(model, self._progress)
        check = BoundCheck(ring, Reduction(op, compression))
        folder = None if evidence is None else Path(evidence)
        self._auditor = Auditor(model, ring, every, self._note, check, parts, evidence=folder)
        self._auditor.begin(steps_done + 1)
        if optimizer is not None and not isinstance(joined(), SingleProcess):
            self._follow(optimizer)

    def check(self) -> None:
        """Collective: compare the reduced gradients, at every `every`-th call.

        Call it at each step, after the reduction and before gradients are clipped or used. Raises
        AuditMismatch on all ranks if a gradient is beyond its rounding bound.
        """
        self._progress.calls += 1
        step = self._progress.resumed + self._progress.calls
        self._auditor.reduced(step)
        self._auditor.begin(step + 1)

    @property
    def checked(self) -> int:
        """Return the number of audited steps so far."""
        return self._progress.checked

    @property
    def failed(self) -> int:
        """Return the number of audited steps with a mismatch."""
        return self._progress.failed

    @property
    def worst_error_over_bound(self) -> float:
        """Return the largest error of all audited steps, in units of its bound."""
        return self._progress.worst

    def summary(self) -> str:
        """Return a line about all audits so far: how many, how many failed, and the worst error."""
        return self._progress.summary()

    def close(self) -> None:
        """Collective: close the connections. The end of the process does so too."""
        self._auditor.close()

    def _note(self, record: AuditRecord) -> None:
        self._progress.checked += 1
        self._progress.failed += not record.ok
        self._progress.worst = max(self._progress.worst, record.worst_error_over_bound)
        self._on_record(record)

    def _follow(self, optimizer: Any) -> None:
        """Check after each `optimizer.synchronize()`, which both step() and clipping call."""
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


def check_options(every: int, parts: int, compression: str, op: str = "average") -> list[str]:
    """Return the problems of options of an audit."""
    return every_problem(
        (every < 1 or parts < 1, f"every={every}, parts={parts}: must be above 0"),
        (compression not in ("none", "fp16"), f"compression={compression!r}: none or fp16"),
        (op not in ERROR_BOUNDS, f"op={op!r}: {' or '.join(ERROR_BOUNDS)}"),
    )


def _refuse_sparse(model: torch.nn.Module, optimizer: Any) -> None:
    """Raise UsageError for sparse gradients, unless they are made dense before the exchange.

    Rows that are looked up twice are added in an order that no bound covers. `hvdtrain.distribute`
    makes gradients dense, and so does Horovod's optimizer with `sparse_as_dense`.
    """
    if joined() is not None or getattr(optimizer, "sparse_as_dense", False):
        return
    layers = [name for name, layer in model.named_modules() if getattr(layer, "sparse", False)]
    if layers:
        raise UsageError(
            f"GradientAudit: layer {layers[0]} makes sparse gradients, whose sums have no known "
            "bound. Give hvd.DistributedOptimizer sparse_as_dense=True, or the layer sparse=False"
        )


def _notice_first_backward(model: torch.nn.Module, progress: AuditCounts) -> None:
    def notice(_: torch.Tensor) -> None:
        progress.trains = True
        for hook in hooks:
            hook.remove()

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(notice) for parameter in trainable]


def _ring_of_this_job() -> Transport:
    """Collective: return a ring over the ranks of this process's job, however it was joined."""
    workers = joined()
    if workers is not None:
        return workers.ring()
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        from hvdtrain.exchange.connect import ring_of_torch_distributed

        ring = ring_of_torch_distributed()
        Topology.from_environment().check_joined(ring.size)
        return ring
    if "horovod.torch" in sys.modules:
        from hvdtrain.exchange.horovod import ring_of_horovod

        return ring_of_horovod()
    raise UsageError(
        "GradientAudit: this process has not joined a job: call hvdtrain.init(), "
        "hvd.init() or torch.distributed.init_process_group() first"
    )
