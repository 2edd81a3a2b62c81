"""The audit in a training loop that is not ours: Horovod's, or torch's DistributedDataParallel.

    from hvdtrain import GradientAudit
    audit = GradientAudit(model, optimizer)      # after hvd.DistributedOptimizer(...)

With a Horovod optimizer that is all: whenever it has synchronized its gradients, they are checked
before they are clipped or used. In any other loop, DDP's for one, there is one line more, between
`loss.backward()` and whatever comes next:

    audit.check()
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hvdtrain.audit.auditor import Auditor, AuditRecord
from hvdtrain.audit.bound import BoundCheck
from hvdtrain.errors import UsageError
from hvdtrain.exchange import Reduction, SingleProcess, joined
from hvdtrain.ring import Transport
from hvdtrain.ring.bound import ERROR_BOUNDS
from hvdtrain.topology import Topology

DEFAULT_EVERY = 100


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
        argument, or where there is no job.
        """
        if every < 1 or parts < 1:
            raise UsageError(f"GradientAudit: every={every}, parts={parts}: must be above 0")
        if compression not in ("none", "fp16"):
            raise UsageError(f"GradientAudit: compression={compression!r}: none or fp16")
        if op not in ERROR_BOUNDS:
            raise UsageError(f"GradientAudit: op={op!r}: {' or '.join(ERROR_BOUNDS)}")
        _refuse_sparse(model, optimizer)
        self.checked = 0  # audited steps so far
        self.worst_error_over_bound = 0.0
        self._on_record = on_record
        self._step = 1
        ring = transport or _ring_of_this_job()
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
        self._auditor.end(self._step)
        self._step += 1
        self._auditor.begin(self._step)

    def close(self) -> None:
        """Collective: let go of the connections. The end of the process does it too."""
        self._auditor.close()

    def _note(self, record: AuditRecord) -> None:
        self.checked += 1
        self.worst_error_over_bound = max(
            self.worst_error_over_bound, record.worst_error_over_bound
        )
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
            synchronize()
            self.check()

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


def _ring_of_this_job() -> Transport:
    """Collective: a ring over the ranks of the job that this process is in, however it joined."""
    workers = joined()
    if workers is not None:
        return workers.ring()
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        from hvdtrain.peers import ring_of_torch_distributed

        ring = ring_of_torch_distributed()
        Topology.from_environment().check_joined(ring.size)
        return ring
    if "horovod.torch" in sys.modules:
        from hvdtrain.comm import ring_of_horovod

        return ring_of_horovod()
    raise UsageError(
        "GradientAudit: this process is in no job: call hvdtrain.init(), "
        "hvd.init() or torch.distributed.init_process_group() before"
    )
