"""Which audit a run makes of its exchange."""

from __future__ import annotations

from pathlib import Path

from hvdtrain.audit import Auditor, NoAudit
from hvdtrain.audit.bound import BoundCheck
from hvdtrain.audit.exact import ExactCheck
from hvdtrain.cli.report import NoReport, Report
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange
from hvdtrain.training import Job


def refuse_unknown_order(config: TrainConfig, job: Job, exchange: Exchange) -> None:
    """Raises UsageError when bits are to be equal that nobody can foretell."""
    if config.check.audit != "exact" or config.check.audit_every == 0 or exchange.size == 1:
        return
    if job.device.type != "cpu":
        raise UsageError(
            f"--audit=exact: the order of summation on {job.device} is not known: use --audit bound"
        )
    exchange.summation_order()


def make_audit(
    config: TrainConfig, job: Job, exchange: Exchange, report: Report | NoReport
) -> Auditor | NoAudit:
    """Collective: connect the ring, where there is something to audit."""
    settings, compression = config.check, config.precision.compression
    if settings.audit_every == 0 or exchange.size == 1:
        return NoAudit()
    ring = exchange.ring()
    return Auditor(
        job.model,
        ring,
        settings.audit_every,
        report.audited,
        ExactCheck(ring, exchange.summation_order(), compression)
        if settings.audit == "exact"
        else BoundCheck(ring, compression),
        settings.audit_parts,
        config.run.seed,
        evidence=Path(config.run.output) / config.experiment / "audit",
    )
