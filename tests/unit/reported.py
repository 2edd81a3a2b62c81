"""Runs to report: small run directories of known figures, and what was drawn of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hvdtrain.report.charts import Plot
from hvdtrain.report.plots import draw_plots
from hvdtrain.report.runs import read_runs

CONFUSION = [[5, 1, 0], [0, 7, 2], [0, 0, 9]]


def step_record(step: int, metric: str = "accuracy", **others: Any) -> dict[str, Any]:
    record = {"kind": "step", "step": step, "epoch": 1 + step // 10, "samples_seen": step * 8}
    record |= {"train_loss": 2 / step, f"train_{metric}": 1 - 1 / step, "lr": 0.1 / step}
    record |= {"samples_per_s": 100.0 + step, "gradient_norm": None}
    phases = {"data_s": 0.001, "compute_s": 0.004 + step / 1e4, "exchange_s": 0.002}
    return record | phases | {"update_s": 0.001} | others


def epoch_record(step: int, metric: str = "accuracy", **others: Any) -> dict[str, Any]:
    record = {"kind": "epoch", "step": step, "epoch": step // 10, "samples": 80}
    record |= {"train_loss": 3 / step, f"train_{metric}": 0.5, "samples_per_s": 90.0, "lr": 0.1}
    record |= {"valid_samples": 24, "valid_loss": 4 / step, f"valid_{metric}": 1 - 4 / step}
    return record | {"valid_class_accuracy": [0.5, None, 1.0]} | others


def audit_record(step: int, ratio: float | None, ok: bool = True) -> dict[str, Any]:
    record = {"step": step, "ok": ok, "parameters": 2, "elements": 9}
    return record | {"worst_error_over_bound": ratio, "worst_parameter": "w"}


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_run(folder: Path, metric: str = "accuracy", **options: Any) -> Path:
    """A finished run of 20 steps with three audits."""
    folder.mkdir(parents=True)
    config = {"model": "mlp", "lr": 0.1, "global_batch_size": 8, "experiment": folder.name}
    (folder / "config.yaml").write_text(yaml.safe_dump(config | options))
    summary = {"status": "finished", "world_size": 2, "controller": "gloo", "epochs": 2}
    summary |= {"steps": 20, "samples_seen": 160, "train_loss": 0.1, "valid_loss": 0.2}
    summary |= {f"valid_{metric}": 0.8125, "valid_samples": 24, "samples_per_s": 1234.5}
    summary |= {"audit": {"checked": 3, "failed": 1, "worst_error_over_bound": 7.5}}
    summary |= {"best": {"step": 10, "epoch": 1, f"valid_{metric}": 0.875}}
    summary |= {"params_sha256": "0123456789abcdef" * 4, "resumed_from": None}
    (folder / "summary.json").write_text(json.dumps(summary))
    steps = [step_record(step, metric) for step in range(2, 21, 2)]
    epochs = [epoch_record(step, metric) for step in (10, 20)]
    write_lines(folder / "metrics.jsonl", steps + epochs)
    audits = [audit_record(5, 0.3), audit_record(10, 7.5, ok=False), audit_record(15, None, False)]
    write_lines(folder / "audit.jsonl", audits)
    evaluation = {"step": 20, "samples": 24, "loss": 0.2, "confusion": CONFUSION}
    (folder / "evaluation.json").write_text(json.dumps(evaluation | {"classes": ["a", "b", "$c"]}))
    return folder


def plots_of(*folders: Path) -> dict[str, Plot]:
    plots, _ = draw_plots(read_runs(folders))
    return {plot.name: plot for plot in plots}


def lines_of(plot: Plot) -> list[tuple[str, list[float], list[float]]]:
    """(colour, steps, values) of every line that was drawn of records."""
    return [
        (str(line.get_color()), list(line.get_xdata()), list(line.get_ydata()))
        for line in plot.figure.axes[0].lines
        if len(np.atleast_1d(line.get_xdata())) > 2 or line.get_marker() in ("o", "D")
    ]
