"""`hvdtrain report RUN ...`: plots of runs, and one page that compares them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.cli.flags import refuse_unknown
from hvdtrain.errors import EXIT_OK, UsageError
from hvdtrain.log import say
from hvdtrain.topology import Topology

if TYPE_CHECKING:
    from hvdtrain.lab.report.runs import Run

FOLDER = "report"
HELP = "plots of runs, and one page that compares them"
DESCRIPTION = (
    "Read what runs have left, also those that were killed or still go on, and write plots (PNG) "
    "and index.html: one page that holds them all, with what each run came to and the options in "
    "which they differ."
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="where plots and page go (default: RUN/report, and report for several runs)",
    )


def run(arguments: dict[str, Any], unknown: list[str], topology: Topology) -> int:
    """Read all runs, then write their report. Returns the exit code."""
    refuse_unknown(unknown, "report")
    paths: list[Path] = arguments["runs"]
    folder = arguments["output"] or (paths[0] / FOLDER if len(paths) == 1 else Path(FOLDER))
    runs = _read(paths, folder)
    from hvdtrain.lab.report import page  # matplotlib starts here, once the runs are good

    say(str(page.write_report(runs, folder)))
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
