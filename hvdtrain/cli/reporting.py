"""`hvdtrain report RUN ...`: plots of runs, and one page that compares them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import EXIT_OK, UsageError
from hvdtrain.log import say

if TYPE_CHECKING:
    from hvdtrain.lab.report.runs import Run

FOLDER = "report"


def add_report_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `hvdtrain report`."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="where plots and page go (default: RUN/report, and report for several runs)",
    )


def run(arguments: dict[str, Any], unknown: list[str]) -> int:
    """Read all runs, then write their report. Returns the exit code."""
    if unknown:
        raise UsageError(f"not understood: {' '.join(unknown)} (see hvdtrain report --help)")
    paths: list[Path] = arguments["runs"]
    folder = arguments["output"] or (paths[0] / FOLDER if len(paths) == 1 else Path(FOLDER))
    runs = _read(paths, folder)
    from hvdtrain.lab.report.page import (
        write_report,  # matplotlib starts here, once the runs are good
    )

    say(str(write_report(runs, folder)))
    return EXIT_OK


def _read(paths: list[Path], folder: Path) -> list[Run]:
    """The runs; raises UsageError with all that is wrong with them and with the folder."""
    from hvdtrain.lab.report.runs import read_runs

    problems: tuple[str, ...] = ()
    if folder.exists() and not folder.is_dir():
        problems = (f"--output={folder}: is not a folder; choose another --output",)
    try:
        runs = read_runs(paths)
    except UsageError as error:
        raise UsageError(*error.problems, *problems) from None
    if problems:
        raise UsageError(*problems)
    return runs
