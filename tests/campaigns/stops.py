"""Every stop: each signal, to each set of processes, with and without readers, by each starter.

    python -m tests.campaigns.stops [STARTER ...]

Prints a line for each, and exits with 1 if a job did not save, ended with another exit code than
that of its signal, or left a process.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path

from tests.parallel.stops import READERS, SCOPES, SIGNALS, STARTERS, Stop, stop_job


def main() -> int:
    starters = sys.argv[1:] or STARTERS
    wrong = 0
    for parts in itertools.product(starters, SIGNALS, SCOPES, READERS):
        stop = Stop(*parts)
        with tempfile.TemporaryDirectory() as folder:
            try:
                ended = stop_job(stop, Path(folder))
                problem, output = ended.problem(stop), ended.output
            except AssertionError as error:
                problem, output = str(error), (Path(folder) / "output").read_text()
        wrong += bool(problem)
        print(f"{'WRONG' if problem else 'right'}  {stop}{': ' if problem else ''}{problem}")
        print(output[-3000:] if problem else "", end="", flush=True)
    print(f"{wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
