"""Output of rank 0: a header, progress, a line per epoch, and the result.

On a terminal, progress is a live bar; to a pipe (always under horovodrun) a line per interval.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.nn.modules.dropout import _DropoutNd
from tqdm import tqdm

from hvdtrain import __version__
from hvdtrain.config.plugins import PLACES
from hvdtrain.data import VirtualShares
from hvdtrain.documents import HEAD
from hvdtrain.exchange import Exchange, SingleProcess
from hvdtrain.log import counted, duration, rate, say
from hvdtrain.train.batchnorm import SyncBatchNorm, has_batch_norm
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
            shown = {"loss": f"{totals.loss:.4f}", "lr": f"{lr:.4g}"}
            self._bar.set_postfix(shown | ({"gpu": used} if used else {}))
            return
        left_s = totals.step_s * (self._total_steps - totals.step)
        say(
            f"step {totals.step}/{self._total_steps} {totals.step / self._total_steps:.0%}  "
            f"epoch {totals.epoch}  loss {totals.loss:.4f}  "
            + "".join(f"{name} {value:.3f}  " for name, value in totals.metrics.items())
            + f"{rate(totals.samples_per_s)} samples/s  {totals.step_s:.3g} s/step  lr {lr:.4g}  "
            + (f"GPU {used}  " if used else "")
            + f"{duration(left_s)} left"
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
    if len(shares) > SHARES_SHOWN:
        shares_text = f"{min(shares)} to {max(shares)} on each {kind}"
    else:
        shares_text = " + ".join(map(str, shares))
    workers = "1 worker" if size == 1 else f"{size} workers ({exchange.controller})"
    if virtual:
        workers += f" for {counted(len(shares), kind)}"
    epochs = -(-job.total_steps // sampler.steps_per_epoch)
    optimizer_names = " and ".join(type(optimizer).__name__.lower() for optimizer in job.optimizers)
    peak_lr = max(float(group["lr"]) for group in job.optimizers[0].param_groups)
    # A rate that varies is below its peak at the first step (warm-up) or at the last.
    ends = (0, job.total_steps - 1)
    varies = job.schedule is not None and any(job.schedule(step) != peak_lr for step in ends)
    rates = "up to " if varies else "at first " if job.schedule is None else ""
    return "\n".join(
        [
            f"hvdtrain {__version__}",
            f"  model    {model}, {parameters:,} parameters, {dtype}",
            f"  data     {data.name}, {len(data.train):,} train and {len(data.valid):,} valid "
            f"samples{', ' if data.note else ''}{data.note}",
            f"  workers  {workers}, on {shown(job.device)}, "
            f"{counted(torch.get_num_threads(), 'compute thread')} each",
            f"  batch    {sampler.global_batch_size} samples a step = {shares_text}",
            f"  steps    {job.total_steps} in {epochs} epoch{'s' if epochs > 1 else ''}",
            f"  update   {optimizer_names}, learning rate {rates}{peak_lr:.4g}",
            *([] if job.model.training else [EVALUATED]),
            *_notes_on_workers(job.model, len(shares), kind),
        ]
    )


def _notes_on_workers(model: torch.nn.Module, shares: int, kind: str) -> list[str]:
    """Return what several workers, of this kind, do otherwise than one."""
    if shares == 1:
        return []
    notes = []
    if any(isinstance(layer, _DropoutNd) and layer.p > 0 for layer in model.modules()):
        notes.append(f"  note     dropout draws other masks on each {kind}")
    if any(isinstance(layer, SyncBatchNorm) for layer in model.modules()):
        notes.append("  note     batch norm uses the statistics of the whole batch")
    elif has_batch_norm(model):
        way_out = " (--sync-bn: the whole batch's)" if kind == "worker" else ""
        notes.append(f"  note     batch norm uses each {kind}'s own statistics{way_out}")
    return notes


def final_lines(summary: Mapping[str, Any], config: Mapping[str, Any], folder: str) -> str:
    """Return the last lines of a finished run; `config`: its options."""
    speed = summary["samples_per_s"]  # None where no step was made
    figure = "loss" if summary.get("valid_accuracy") is None else "accuracy"
    valid = summary.get(f"valid_{figure}")  # None where nothing is evaluated
    trained = summary.get("train_loss")  # None where no step was made
    training = "" if trained is None else f"; training loss {trained:.4f}"
    lines = [
        f"finished: {counted(summary['epochs'], 'epoch')}, {counted(summary['steps'], 'step')}, "
        f"{counted(summary['samples_seen'], 'sample')}"
        + (f", {rate(speed)} samples/s" if speed is not None and math.isfinite(speed) else "")
        + (f", {duration(summary['wall_s'])} in all" if summary.get("wall_s") else "")
        + (f", {summary['peak_memory_mib']:,} MiB" if summary.get("peak_memory_mib") else "")
        + (f", {summary['peak_gpu_mib']:,} MiB of the GPU" if summary.get("peak_gpu_mib") else "")
        + (
            training
            if valid is None
            else f"; validation {figure} {valid:.4f} on {summary.get('valid_samples') or 0:,}"
        )
    ]
    best = summary.get("best") or {}
    for name in [name for name in best if name.startswith("valid_") and best[name] is not None]:
        step, epoch = best.get("step", 0), best.get("epoch")
        lines.append(
            f"best: validation {name.removeprefix('valid_')} {best[name]:.4f} after step "
            f"{step:,}, epoch {epoch}; evaluate, predict and export use its checkpoint"
        )
    if summary.get("bad_samples"):
        times = counted(summary["bad_samples"], "time")
        lines.append(f"samples that could not be read were left out {times}, over all epochs")
    audit = summary.get("audit", {})
    if audit.get("checked"):
        lines.append(
            f"audit: {counted(audit['checked'], 'step')} compared with the ring reference, "
            f"{audit.get('failed')} failed; worst error "
            f"{audit.get('worst_error_over_bound') or 0:.2f} of the rounding bound"
        )
    computed = summary.get("compute_audit", {})
    if computed.get("checked"):
        lines.append(
            f"audit of the computation: gradients of {counted(computed['checked'], 'step')} "
            f"computed by another rank as well, {computed.get('failed')} failed"
        )
    if (trace := summary.get("trace")) and trace.keys() >= HEAD.keys():
        records = counted(trace["records"], "record")
        lines.append(f"trace: {records}, to step {trace['step']}; sha256 {trace['sha256']}")
    lines.append(f"parameters sha256 {summary['params_sha256']}")
    run = shlex.quote(folder)
    data = config.get("data", "")  # a folder is to be confirmed
    named = f" --data {shlex.quote(data)}" if data.partition(":")[0] in PLACES else ""
    evaluation = "" if valid is None else f"hvdtrain evaluate {run}{named}, or "
    lines.append(f"written to {folder}; next: {evaluation}hvdtrain report {run}")
    return "\n".join(lines)


def way_on(checkpoints: Sequence[Path], is_script: bool = False) -> str:
    """Return how to continue after a stop; `checkpoints`: newest first. `is_script`: the run is of
    a script with a loop of its own.
    """
    if not checkpoints:
        return "stopped before a checkpoint was saved"
    saved = int(checkpoints[0].name.partition("-")[2])
    how = (
        'the same script with resume="auto"' if is_script else "the same command with --resume auto"
    )
    return f"saved at step {saved:,}: {how} continues from there"
