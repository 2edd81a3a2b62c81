"""Output of rank 0: a header, progress, a line per epoch, and the result.

On a terminal, progress is a live bar; to a pipe (always under horovodrun) a line per interval.
"""

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.nn.modules.dropout import _DropoutNd
from tqdm import tqdm

from hvdtrain import __version__
from hvdtrain.audit.auditor import audit_line
from hvdtrain.config.plugins import PLACES
from hvdtrain.data import VirtualShares
from hvdtrain.data.splits import is_endless
from hvdtrain.documents import HEAD
from hvdtrain.exchange import Exchange, SingleProcess
from hvdtrain.log import counted, duration, rate, say
from hvdtrain.records.stragglers import lines_of
from hvdtrain.train.batchnorm import SyncBatchNorm, has_batch_norm
from hvdtrain.train.checkpoint import step_of
from hvdtrain.train.devices import shown
from hvdtrain.train.evaluate import Evaluation
from hvdtrain.train.job import Job
from hvdtrain.train.metering import Totals

SHARES_SHOWN = 8  # workers whose parts of the batch are listed one by one


# Of a script: some libraries hand out their models in this mode.
EVALUATED = "  note     the model is in evaluation mode, as the script left it: no dropout is drawn"


class Console:
    """An observer that prints to standard output."""

    def __init__(self, total_steps: int, live: bool, step: int = 0) -> None:
        """`live`: show a progress bar. `step`: the last one before a resume."""
        self._total_steps = total_steps
        self._bar = tqdm(total=total_steps, initial=step, unit="step") if live else None

    def interval_end(self, totals: Totals, lr: float, gpu: Mapping[str, float]) -> None:
        used = gpu_figures(gpu)
        if self._bar is not None:
            self._bar.update(totals.step - self._bar.n)
            gpu_part = {"gpu": used} if used else {}
            self._bar.set_postfix({"loss": f"{totals.loss:.4f}", "lr": f"{lr:.4g}"} | gpu_part)
            return
        say(
            f"step {totals.step}/{self._total_steps} {totals.step / self._total_steps:.0%}  "
            f"epoch {totals.epoch}  loss {totals.loss:.4f}  "
            + "".join(f"{name} {value:.3f}  " for name, value in totals.metrics.items())
            + f"{rate(totals.samples_per_s)} samples/s  {totals.step_s:.3g} s/step  lr {lr:.4g}  "
            + (f"GPU {used}  " if used else "")
            + f"{duration(totals.step_s * (self._total_steps - totals.step))} left"
        )

    def epoch_end(self, totals: Totals, evaluation: Evaluation | None, lr: float) -> None:
        valid = f"{_evaluated(evaluation)}; " if evaluation else ""
        self._write(
            totals.step,
            f"epoch {totals.epoch} ended: train {_figures(totals.loss, totals.metrics)}; {valid}"
            f"{rate(totals.samples_per_s)} samples/s, lr {lr:.4g}, {duration(totals.seconds)}",
        )

    def evaluated(self, totals: Totals, evaluation: Evaluation) -> None:
        self._write(totals.step, f"step {totals.step}: {_evaluated(evaluation)}")

    def notes(self, step: int, lines: Iterable[str]) -> None:
        """Print remarks on the steps up to `step`."""
        for line in lines:
            self._write(step, line)

    def _write(self, step: int, line: str) -> None:
        """Print a line after a step, above the bar if there is one."""
        if self._bar is None:
            say(line)
        else:
            self._bar.update(step - self._bar.n)
            self._bar.write(line)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _evaluated(evaluation: Evaluation) -> str:
    shown = {n: value for n, value in evaluation.metrics.items() if n != "accuracy_top5"}
    return f"valid {_figures(evaluation.loss, shown)}"


def _figures(loss: float, metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in {"loss": loss, **metrics}.items())


def gpu_figures(gpu: Mapping[str, float]) -> str:
    """Return the figures of a `GpuMeter` as text: '1,234 MiB 87%'; '' without a GPU."""
    forms = {"memory_mib": "{:,.0f} MiB", "utilisation_percent": "{:.0f}%"}
    return " ".join(form.format(gpu[name]) for name, form in forms.items() if name in gpu)


def is_live(exchange: Exchange, stream: TextIO) -> bool:
    """Return whether to show a progress bar: `stream` is a terminal, and there is no launcher."""
    return isinstance(exchange, SingleProcess) and stream.isatty()


def header(job: Job, exchange: Exchange, model: str) -> str:
    """Return the lines that describe model, data, workers, batch and length of a run."""
    data, sampler, size = job.data, job.sampler, exchange.size
    parameters = sum(parameter.numel() for parameter in job.model.parameters())
    dtype = str(next(job.model.parameters()).dtype).removeprefix("torch.")
    shares = job.feed.shares.sizes(sampler.global_batch_size)
    virtual = isinstance(job.feed.shares, VirtualShares)
    kind = "virtual worker" if virtual else "worker"
    few = " + ".join(map(str, shares[:SHARES_SHOWN]))
    parts = f"{min(shares)} to {max(shares)} on each {kind}" if shares[SHARES_SHOWN:] else few
    workers = "1 worker" if size == 1 else f"{size} workers ({exchange.controller})"
    if virtual:
        workers += f" for {counted(len(shares), kind)}"
    trained = "endless" if is_endless(data.train) else f"{len(data.train):,}"
    epochs = -(-job.total_steps // sampler.steps_per_epoch)
    optimizer_names = " and ".join(type(optimizer).__name__.lower() for optimizer in job.optimizers)
    peak_lr = max(float(group["lr"]) for group in job.optimizers[0].param_groups)
    # A rate that varies is below its peak at the first step (warm-up) or at the last.
    ends = (0, job.total_steps - 1)
    rates = "at first "
    if job.schedule is not None:
        rates = "up to " if any(job.schedule(step) != peak_lr for step in ends) else ""
    return "\n".join(
        [
            f"hvdtrain {__version__}",
            f"  model    {model}, {parameters:,} parameters, {dtype}",
            f"  data     {data.name}, {trained} train and {len(data.valid):,} valid "
            f"samples{', ' if data.note else ''}{data.note}",
            f"  workers  {workers}, on {shown(job.device)}, "
            f"{counted(torch.get_num_threads(), 'compute thread')} each",
            f"  batch    {sampler.global_batch_size} samples a step = {parts}",
            f"  steps    {job.total_steps} in {epochs} epoch{'s' if epochs > 1 else ''}",
            f"  update   {optimizer_names}, learning rate {rates}{peak_lr:.4g}",
            *([] if job.model.training else [EVALUATED]),
            *(_notes_on_workers(job.model, kind) if len(shares) > 1 else ()),
        ]
    )


def _notes_on_workers(model: torch.nn.Module, kind: str) -> Iterator[str]:
    """Yield what several workers, of this kind, do otherwise than one."""
    if any(isinstance(layer, _DropoutNd) and layer.p > 0 for layer in model.modules()):
        yield f"  note     dropout draws other masks on each {kind}"
    if has_batch_norm(model, SyncBatchNorm):
        yield "  note     batch norm uses the statistics of the whole batch"
    elif has_batch_norm(model):
        way_out = " (--sync-bn: the whole batch's)" if kind == "worker" else ""
        yield f"  note     batch norm uses each {kind}'s own statistics{way_out}"


def final_lines(summary: Mapping[str, Any], config: Mapping[str, Any], folder: str) -> str:
    """Return the last lines of a finished run; `config`: its options."""
    figure = "loss" if summary.get("valid_accuracy") is None else "accuracy"
    valid = summary.get(f"valid_{figure}")  # None where nothing is evaluated
    trained = summary.get("train_loss")  # None where no step was made
    result = "" if trained is None else f"; training loss {trained:.4f}"
    if valid is not None:
        result = f"; validation {figure} {valid:.4f} on {summary.get('valid_samples') or 0:,}"
    best = summary.get("best") or {}
    run = shlex.quote(folder)
    data = config.get("data", "")  # a folder is to be confirmed
    named = f" --data {shlex.quote(data)}" if data.partition(":")[0] in PLACES else ""
    named = " --trust-code" if config.get("script") else named  # which is run up to its loop
    evaluation = "" if valid is None else f"hvdtrain evaluate {run}{named}, or "
    return "\n".join(
        [
            f"finished: {_course(summary)}{result}",
            *([f"ended early: {summary['end_reason']}"] if summary.get("end_reason") else ()),
            *(
                f"best: validation {name.removeprefix('valid_')} {value:.4f} after step "
                f"{best.get('step', 0):,}, epoch {best.get('epoch')}; evaluate, predict and export "
                "use its checkpoint"
                for name, value in best.items()
                if name.startswith("valid_") and value is not None
            ),
            *_checks(summary),
            f"parameters sha256 {summary['params_sha256']}",
            f"written to {folder}; next: {evaluation}hvdtrain report {run}",
        ]
    )


def _course(summary: Mapping[str, Any]) -> str:
    """Return the length of a run, its speed, its time and its memory, as far as it has them."""
    counts = {"epochs": "epoch", "steps": "step", "samples_seen": "sample"}
    parts = [counted(summary[name], noun) for name, noun in counts.items()]
    speed = summary["samples_per_s"]  # None where no step was made
    if speed is not None and math.isfinite(speed):
        parts.append(f"{rate(speed)} samples/s")
    if wall_s := summary.get("wall_s"):
        parts.append(f"{duration(wall_s)} in all")
    memory = {"peak_memory_mib": "MiB", "peak_gpu_mib": "MiB of the GPU"}
    parts += [f"{summary[name]:,} {unit}" for name, unit in memory.items() if summary.get(name)]
    return ", ".join(parts)


def _checks(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line each on samples left out, slow ranks, audits and trace, if there are any."""
    if bad := summary.get("bad_samples"):
        times = counted(bad, "time")
        yield f"samples that could not be read were left out {times}, over all epochs"
    yield from lines_of(summary.get("stragglers", ()))
    audit, computed = summary.get("audit", {}), summary.get("compute_audit", {})
    if checked := audit.get("checked"):
        yield audit_line(checked, audit.get("failed"), audit.get("worst_error_over_bound") or 0)
    if checked := computed.get("checked"):
        yield (
            f"audit of the computation: gradients of {counted(checked, 'step')} computed by "
            f"another rank as well, {computed.get('failed')} failed"
        )
    if (trace := summary.get("trace")) and trace.keys() >= HEAD.keys():
        yield (
            f"trace: {counted(trace['records'], 'record')}, to step {trace['step']}; "
            f"sha256 {trace['sha256']}"
        )


def way_on(checkpoints: Sequence[Path], is_script: bool = False) -> str:
    """Return how to continue after a stop; `checkpoints`: newest first. `is_script`: the run is of
    a script with a loop of its own.
    """
    if not checkpoints:
        return "stopped before a checkpoint was saved"
    how = 'script with resume="auto"' if is_script else "command with --resume auto"
    return f"saved at step {step_of(checkpoints[0].name):,}: the same {how} continues from there"
