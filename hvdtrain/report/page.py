"""The report of runs: PNG files, and one self-contained page with plots and tables."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hvdtrain import __version__
from hvdtrain.records.stragglers import lines_of
from hvdtrain.report.charts import Plot, look_of, write_plots
from hvdtrain.report.plots import draw_plots
from hvdtrain.report.runs import Record, Run, number
from hvdtrain.report.templates import HERE, load_template

PAGE = "index.html"
NOTHING = "–"
HASH_LETTERS = 12


@dataclass(frozen=True)
class Table:
    """A table: headings, and for each row its first cell and the others."""

    columns: list[str]
    rows: list[tuple[str, list[str]]]


def write_report(runs: Sequence[Run], folder: Path) -> Path:
    """Write plots and page to the folder, the page last; return the path of the page.

    Raises UsageError where they cannot be written.
    """
    plots, absent = draw_plots(runs)
    return write_page(
        HERE / "page.html.jinja",
        plots,
        folder,
        title=f"{len(runs)} runs compared" if len(runs) > 1 else f"Run {runs[0].name}",
        results=compare_runs(runs),
        colours=[look_of(i)["color"] for i in range(len(runs))],
        notes=[(run.name, notes) for run in runs if (notes := notes_of(run))],
        options=compare_options(runs),
        alone=len(runs) == 1,
        absent=absent,
    )


def write_page(template: Path, plots: Sequence[Plot], folder: Path, **values: Any) -> Path:
    """Write plots and a page with them and `values`, which are escaped; return its path.

    The template may include those in this folder. Raises UsageError where they cannot be written.
    """
    text = load_template(template).render({"plots": plots, "version": __version__, **values})
    return write_plots(plots, folder, {PAGE: text})[-1]


def compare_runs(runs: Sequence[Run]) -> Table:
    """Return the table of results, one column per run."""
    metrics = list(dict.fromkeys(name for run in runs for name in _evaluated(run)))
    results = [_results_of(run, metrics) for run in runs]
    return Table(
        columns=[run.name for run in runs],
        rows=[(name, [one[name] for one in results]) for name in results[0]],
    )


def _results_of(run: Run, metrics: Sequence[str]) -> dict[str, str]:
    """Return a cell for each row; `metrics`: the valid_* values of all runs."""
    final, reached, audit, evaluated = _final(run), _reached(run), _audit(run), _evaluated(run)
    speed_form = ".3g" if number(run.summary, "samples_per_s") < 100 else ",.0f"
    return {
        "status": _status_of(run),
        "world size": _show(run.summary, "world_size"),
        "controller": _text(run.summary, "controller"),
        "global batch size": _show(run.config, "global_batch_size"),
        "epochs": _show(reached, "epochs"),
        "steps": _show(reached, "steps"),
        "ended early": _text(run.summary, "end_reason"),
        "samples seen": _show(reached, "samples_seen"),
        "train loss": _show(reached, "train_loss", ".4g"),
        **{name.replace("_", " "): _show(evaluated, name, ".4g") for name in metrics},
        "best": _best(final),
        "samples/s": _show(run.summary, "samples_per_s", speed_form),
        "audits": _show(audit, "checked"),
        "audits failed": _show(audit, "failed"),
        "worst error/bound": _show(audit, "worst_error_over_bound", ".4g"),
        "params sha256": _text(final, "params_sha256")[:HASH_LETTERS],
        "resumed from": _show(run.summary, "resumed_from"),
    }


def compare_options(runs: Sequence[Run]) -> Table:
    """Return the table of options, one row each: all of a single run, else those that differ.

    Runs without a configuration are left out, as they would differ in everything.
    """
    configured = [run for run in runs if run.config]
    rows = [
        (name, [_option(run, name) for run in configured])
        for name in dict.fromkeys(name for run in configured for name in run.config)
    ]
    if len(configured) > 1:
        rows = [(name, values) for name, values in rows if len(set(values)) > 1]
    return Table(["value"] if len(runs) == 1 else [run.name for run in configured], rows)


def _status_of(run: Run) -> str:
    """Return how the run ended, as far as it is known."""
    if not run.summary:
        return "unknown: no summary"
    if run.went_on:
        return f"resumed after step {_show(run.summary, 'steps')}; unknown"
    return _text(run.summary, "status")


def notes_of(run: Run) -> list[str]:
    """Return remarks on the results: missing files, missing plots, errors."""
    notes = list(run.notes)
    if run.epochs and not run.steps:
        notes.append(
            "no throughput, time per phase and learning rate: no step was logged, as the run "
            f"reached step {_show(_reached(run), 'steps')}, and --log-interval was "
            f"{_text(run.config, 'log_interval')}. Choose a smaller one"
        )
    notes += lines_of(_final(run).get("stragglers", ()))
    if run.went_on:
        notes.append(
            "summary.json is of an earlier end, after which the run was resumed: it was killed, or "
            "is still going on; its figures are those last logged"
        )
    elif error := run.summary.get("error"):
        notes.append(str(error))
    return notes


def _final(run: Run) -> Record:
    return {} if run.went_on else run.summary


def _reached(run: Run) -> Record:
    """Return the summary; where it is missing or outdated, the values last logged."""
    if final := _final(run):
        return final
    newest = max(run.steps + run.epochs, key=lambda record: number(record, "step"), default={})
    ended = max((number(record, "epoch") for record in run.epochs), default=0)
    return newest | {"steps": newest.get("step"), "epochs": ended} if newest else {}


def _evaluated(run: Run) -> Record:
    """Return the valid_* values of the summary, or else of the last evaluation."""
    source = (run.evaluations[-1] if run.evaluations else {}) | _final(run)
    return {
        name: value
        for name, value in source.items()
        if name.startswith("valid_")
        and name != "valid_samples"
        and math.isfinite(number(source, name))
    }


def _best(summary: Record) -> str:
    """Return the best result as text, e.g. 'valid accuracy 0.96 at step 207'."""
    best: Record = summary.get("best") or {}
    names = [name for name in best if name.startswith("valid_")]
    if not names:
        return NOTHING
    return (
        f"{names[0].replace('_', ' ')} {_show(best, names[0], '.4g')} at step {_show(best, 'step')}"
    )


def _audit(run: Run) -> Record:
    """Return the totals of audits, of the summary or else of the records; empty without audits."""
    audit: Record = _final(run).get("audit", run.audited)
    return audit if audit.get("checked") else {}


def _show(record: Record, name: str, form: str = ",.0f") -> str:
    """Return a number as text; a dash where it is missing or not finite."""
    value = number(record, name)
    return NOTHING if math.isnan(value) else f"{value:{form}}"


def _text(record: Record, name: str) -> str:
    value = record.get(name)
    return NOTHING if value is None else str(value)


def _option(run: Run, name: str) -> str:
    """Return the value as written in config.yaml; a dash where it is missing."""
    if name not in run.config:
        return NOTHING
    value = run.config[name]
    if isinstance(value, dict | list):
        return str(yaml.safe_dump(value, default_flow_style=True).strip())
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
