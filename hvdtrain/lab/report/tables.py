"""Tables of the runs: their results, and the options in which they differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from hvdtrain.lab.report.runs import Record, Run, number

NOTHING = "–"
HASH_LETTERS = 12


@dataclass(frozen=True)
class Table:
    """A table: headings, and for each row its first cell and the others."""

    columns: list[str]
    rows: list[tuple[str, list[str]]]


def compare_runs(runs: Sequence[Run]) -> Table:
    """Return the table of results, one row per run."""
    columns: dict[str, Callable[[Run], str]] = {
        "status": status_of,
        "world size": lambda run: _count(run.summary, "world_size"),
        "controller": lambda run: _text(run.summary, "controller"),
        "global batch size": lambda run: _count(run.config, "global_batch_size"),
        "epochs": lambda run: _count(_reached(run), "epochs"),
        "steps": lambda run: _count(_reached(run), "steps"),
        "samples seen": lambda run: _count(_reached(run), "samples_seen"),
        "train loss": lambda run: _figure(_reached(run), "train_loss"),
        **{
            name.replace("_", " "): _column_of(name)
            for name in dict.fromkeys(name for run in runs for name in _evaluated(run))
        },
        "best": lambda run: _best(_final(run)),
        "samples/s": lambda run: _rate(run.summary),
        "audits": lambda run: _count(_audit(run), "checked"),
        "audits failed": lambda run: _count(_audit(run), "failed"),
        "worst error/bound": lambda run: _figure(_audit(run), "worst_error_over_bound"),
        "params sha256": lambda run: _text(_final(run), "params_sha256")[:HASH_LETTERS],
        "resumed from": lambda run: _count(run.summary, "resumed_from"),
    }
    rows = [(run.name, [cell(run) for cell in columns.values()]) for run in runs]
    return Table(list(columns), rows)


def compare_options(runs: Sequence[Run]) -> Table:
    """Return the table of options, one row each: all for one run, else those that differ.

    Runs without a configuration are left out, as they would differ in everything.
    """
    known = [run for run in runs if run.config]
    names = dict.fromkeys(name for run in known for name in run.config)
    rows = [(name, [_option(run, name) for run in known]) for name in names]
    if len(known) > 1:
        rows = [(name, values) for name, values in rows if len(set(values)) > 1]
    return Table([run.name for run in known], rows)


def status_of(run: Run) -> str:
    """Return how the run ended, as far as it is known."""
    if not run.summary:
        return "unknown: no summary"
    if run.went_on:
        return f"resumed after step {_count(run.summary, 'steps')}; unknown"
    return _text(run.summary, "status")


def notes_of(run: Run) -> list[str]:
    """Return remarks on the results: missing files, missing plots, errors."""
    notes = list(run.notes)
    if run.epochs and not run.steps:
        interval = _text(run.config, "log_interval")
        notes.append(
            "no throughput, time per phase and learning rate: no step was logged, as the run "
            f"reached step {_count(_reached(run), 'steps')}, and --log-interval was {interval}. "
            "Choose a smaller one"
        )
    if run.went_on:
        notes.append(
            "summary.json is of an earlier end, after which the run was resumed: it was killed, or "
            "is still going on; its figures are those last logged"
        )
    elif error := run.summary.get("error"):
        notes.append(str(error))
    return notes


def _reached(run: Run) -> Record:
    """Return the summary; where it is missing or outdated, the values last logged."""
    if final := _final(run):
        return final
    newest = max(run.steps + run.epochs, key=lambda record: number(record, "step"), default={})
    ended = max((number(record, "epoch") for record in run.epochs), default=0)
    return newest | {"steps": newest.get("step"), "epochs": ended} if newest else {}


def _final(run: Run) -> Record:
    return {} if run.went_on else run.summary


def _evaluated(run: Run) -> Record:
    """Return the valid_* values of the summary, or else of the last evaluated epoch."""
    evaluated = [record for record in run.epochs if "valid_loss" in record]
    source = (evaluated[-1] if evaluated else {}) | _final(run)
    return {
        name: value
        for name, value in source.items()
        if name.startswith("valid_")
        and name != "valid_samples"
        and math.isfinite(number(source, name))
    }


def _best(summary: Record) -> str:
    """Return the best result as text, e.g. 'valid accuracy 0.96 at step 207'."""
    held = summary.get("best")
    best: Record = held if isinstance(held, dict) else {}
    names = [name for name in best if name.startswith("valid_")]
    if not names:
        return NOTHING
    figure = _figure(best, names[0])
    return f"{names[0].replace('_', ' ')} {figure} at step {_count(best, 'step')}"


def _column_of(name: str) -> Callable[[Run], str]:
    return lambda run: _figure(_evaluated(run), name)


def _audit(run: Run) -> Record:
    """Return the totals of audits, of the summary or else of the records; empty without audits."""
    audit = _final(run).get("audit")
    if not isinstance(audit, dict):
        ratios = [number(record, "worst_error_over_bound") for record in run.audits]
        failed = sum(record.get("ok") is False for record in run.audits)
        worst = max((ratio for ratio in ratios if math.isfinite(ratio)), default=None)
        audit = {"checked": len(run.audits), "failed": failed, "worst_error_over_bound": worst}
    return audit if audit.get("checked") else {}


def _count(record: Record, name: str) -> str:
    value = number(record, name)
    return NOTHING if math.isnan(value) else f"{value:,.0f}"


def _figure(record: Record, name: str) -> str:
    value = number(record, name)
    return NOTHING if math.isnan(value) else f"{value:.4g}"


def _rate(summary: Record) -> str:
    value = number(summary, "samples_per_s")
    return NOTHING if math.isnan(value) else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _text(record: Record, name: str) -> str:
    value = record.get(name)
    return NOTHING if value is None else str(value)


def _option(run: Run, name: str) -> str:
    """Return the value as written in config.yaml; a dash where it is missing."""
    if name not in run.config:
        return NOTHING
    value: Any = run.config[name]
    if isinstance(value, dict | list):
        return str(yaml.safe_dump(value, default_flow_style=True).strip())
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
