"""Assembly of a run's audits and of its trace, from the configuration."""

from __future__ import annotations

import socket
from dataclasses import replace

import torch

from hvdtrain.audit import Auditor, Audits
from hvdtrain.audit.checks import BoundCheck, CanonicalCheck, ExactCheck
from hvdtrain.audit.compute import ComputeAudit
from hvdtrain.audit.trace import StepConditions, Tracer
from hvdtrain.config import TrainConfig
from hvdtrain.errors import UsageError
from hvdtrain.exchange import Exchange, known_order_of, run_on_all
from hvdtrain.records.ledger import Ledger
from hvdtrain.records.machine import changes, machine
from hvdtrain.ring.orders import KnownOrder
from hvdtrain.train.job import Job
from hvdtrain.train.step import Audit


def find_order(config: TrainConfig, job: Job, exchange: Exchange) -> KnownOrder | None:
    """Return the order of sums for an exact audit, if it matters. Raises UsageError if unknown."""
    is_canonical = config.batch.virtual_workers is not None
    if config.check.audit != "exact" or is_canonical or not _has_audits(config, exchange):
        return None
    if job.device.type != "cpu":
        raise UsageError(
            f"--audit=exact: the order of summation on {job.device} is not known: use --audit bound"
        )
    return exchange.summation_order()


def make_audits(
    config: TrainConfig,
    job: Job,
    exchange: Exchange,
    order: KnownOrder | None,
    since: int,
    ledger: Ledger,
) -> Audits:
    """Collective: return the audits and the trace of the run, which begins after step `since`."""
    each: list[Audit] = []
    if _has_audits(config, exchange):
        each.append(_make_auditor(config, job, exchange, order, ledger))
    if every := config.check.trace_every:
        each.append(_make_tracer(every, config, job, exchange, since, ledger))
    if config.check.audit_compute and exchange.size > 1:
        each.append(_make_compute_audit(config, job, exchange, ledger))
    return Audits(*each)


def _make_tracer(
    every: int, config: TrainConfig, job: Job, exchange: Exchange, since: int, ledger: Ledger
) -> Tracer:
    """Return the trace of every K-th step, and of the last one, which the final checkpoint holds.

    If one process could not add as these ranks do, it can only compute the first step after each
    checkpoint again, so these are recorded as well, with sums to compare.
    """
    is_virtual = config.batch.virtual_workers is not None
    order = None if is_virtual else known_order_of(exchange, job.device)
    repeats = is_virtual or order is not None
    setting = StepConditions(job.total_steps, torch.get_num_threads())
    if not is_virtual:
        setting = replace(
            setting,
            since=since,
            order=order.name if order else None,
            weights=config.batch.weights(exchange.size),
            bucket_bytes=job.reduction.bucket_bytes,
        )
    saved_at = (job.intervals.checkpoint or job.total_steps, job.sampler.steps_per_epoch)

    def is_due(step: int) -> bool:
        after_checkpoint = any((step - 1) % interval == 0 for interval in saved_at)
        is_regular = step % every == 0 or step == job.total_steps
        return is_regular or (after_checkpoint and not repeats)

    return Tracer(job, exchange, setting, is_due, ledger.traced, keeps_sums=not repeats)


def _make_compute_audit(
    config: TrainConfig, job: Job, exchange: Exchange, ledger: Ledger
) -> ComputeAudit:
    """Collective: return the audit of the computation. Raises AgreedFailure where bits of equal
    computations may differ.
    """
    hosts = exchange.all_gather_object(socket.gethostname(), "hvdtrain.compute_audit.hosts")
    machines = exchange.all_gather_object(machine(job.device), "hvdtrain.compute_audit.machines")

    def make() -> ComputeAudit:
        if others := changes(machines[0], machines[exchange.rank]):
            raise UsageError(
                f"--audit-compute: bits of this rank may differ from those of rank 0: {others[0]}. "
                "Leave --audit-compute out, or use equal workers"
            )
        every, seed = config.check.audit_compute, config.run.seed
        return ComputeAudit(job, exchange, hosts, every, seed, ledger.recomputed)

    return run_on_all(exchange, "compute_audit", make)


def _make_auditor(
    config: TrainConfig, job: Job, exchange: Exchange, order: KnownOrder | None, ledger: Ledger
) -> Auditor:
    """Collective: return the auditor: bit by bit with an `order`, else within a bound.

    Canonical sums are always checked bit by bit.
    """
    settings, reduction = config.check, job.reduction
    ring = exchange.ring()
    check: BoundCheck | CanonicalCheck | ExactCheck = BoundCheck(ring, reduction)
    if config.batch.virtual_workers is not None:
        check = CanonicalCheck(ring, config.batch.virtual_workers)
    elif order:
        check = ExactCheck(ring, order, reduction)
    return Auditor(
        job.model,
        ring,
        settings.audit_every,
        ledger.audited,
        check,
        settings.audit_parts,
        config.run.seed,
        evidence=config.folder / "audit",
        messages=(lambda: job.messages(job.reduction.bucket_bytes)) if order else None,
    )


def _has_audits(config: TrainConfig, exchange: Exchange) -> bool:
    return config.check.audit_every > 0 and exchange.size > 1
