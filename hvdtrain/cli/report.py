"""`hvdtrain report RUN ...`: plots of runs, and a page that compares them."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hvdtrain.cli.flags import Command, Flag
from hvdtrain.config.fields import SCHEME
from hvdtrain.errors import EXIT_OK, UsageError, attempt
from hvdtrain.log import say
from hvdtrain.topology import Topology

FOLDER = "report"
FLAGS = (
    Flag("runs", "read this run's folder", metavar="RUN", more={"nargs": "+"}),
    Flag(
        "--output",
        "write plots and page to DIR (default: RUN/report; report for several, or in storage)",
        Path,
        metavar="DIR",
    ),
)


def run(arguments: dict[str, Any], problems: list[str], topology: Topology) -> int:
    """Read all runs, write their report, and return the exit code. Raises UsageError."""
    from hvdtrain.records.storage import local_copy
    from hvdtrain.report.runs import read_runs

    names: list[str] = arguments["runs"]
    beside = Path(names[0]) if len(names) == 1 and SCHEME not in names[0] else Path()
    folder = arguments["output"] or beside / FOLDER
    with ExitStack() as stack:
        paths = [Path(stack.enter_context(local_copy(name))) for name in names]
        runs = attempt(problems, lambda: read_runs(paths))
    if not arguments["output"] and folder.is_symlink():
        problems.append(f"{folder}: is a symbolic link, which is not followed; give --output DIR")
    if folder.exists() and not folder.is_dir():
        problems.append(f"--output={folder}: is not a folder; choose another --output")
    if problems or runs is None:
        raise UsageError(*problems)
    from hvdtrain.report import page  # imports matplotlib: only for readable runs

    say(str(page.write_report(runs, folder)))
    return EXIT_OK


COMMAND = Command(
    "plot runs, and compare them on one page",
    "Read the folders of runs, including killed and unfinished ones, and write plots (PNG) and "
    "index.html: one page with all plots, the results of each run, and the options in which they "
    "differ.",
    FLAGS,
    run,
)
