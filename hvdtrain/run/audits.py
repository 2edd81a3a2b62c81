"""Which audit a run makes of its exchange."""

from __future__ import annotations

from hvdtrain.audit import Auditor, NoAudit
from hvdtrain.audit.bound import BoundCheck
from hvdtrain.audit.exact import ExactCheck
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange
from hvdtrain.ring.orders import KnownOrder
from hvdtrain.run.ledger import Ledger
from hvdtrain.train.loop import Job


def find_order(config: TrainConfig, job: Job, exchange: Exchange) -> KnownOrder | None:
    """The order of summation that an exact audit needs; None where no audit is to be exact.

    Raises UsageError when bits are to be equal that nobody can foretell.
    """
    if config.check.audit != "exact" or not _has_audits(config, exchange):
        return None
    if job.device.type != "cpu":
        raise UsageError(
            f"--audit=exact: the order of summation on {job.device} is not known: use --audit bound"
        )
    return exchange.summation_order()


def make_audit(
    config: TrainConfig,
    job: Job,
    exchange: Exchange,
    order: KnownOrder | None,
    ledger: Ledger,
) -> Auditor | NoAudit:
    """Collective: connect the ring, where there is something to audit; exactly, with an `order`."""
    if not _has_audits(config, exchange):
        return NoAudit()
    settings, reduction = config.check, job.reduction
    ring = exchange.ring()
    return Auditor(
        job.model,
        ring,
        settings.audit_every,
        ledger.audited,
        ExactCheck(ring, order, reduction) if order else BoundCheck(ring, reduction),
        settings.audit_parts,
        config.run.seed,
        evidence=config.folder / "audit",
    )


def _has_audits(config: TrainConfig, exchange: Exchange) -> bool:
    return config.check.audit_every > 0 and exchange.size > 1
