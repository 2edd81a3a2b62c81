"""Commands on runs with forged files: each must end with one clear error, or its result.

    python -m tests.campaigns.forged [--minutes 10] [--seed 0] [--command NAME ...]

Prints each forgery on which a command ended with a trace, another exit code than a documented one,
or what steers a terminal, with the file that was made. Exits with 1 if there were any.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path

from hypothesis import given, seed, settings

from tests.unit.forging import COMMANDS, FORGED, FORGING, forged_files, make_run, problem_of

AT_A_TIME = 10  # forgeries of a file, before those of the next


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--command", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    asked = parser.parse_args()
    ends_s = time.monotonic() + 60 * asked.minutes
    tried: collections.Counter[str] = collections.Counter()
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="hvdtrain-forged-") as folder:
        run = make_run(Path(folder))
        for number in itertools.count(asked.seed):
            for name, commands in FORGED.items():
                for command in sorted({*commands} & {*asked.command}):
                    if time.monotonic() > ends_s:
                        print(f"{sum(tried.values()):,} forgeries, {wrong} wrong: {dict(tried)}")
                        return 1 if wrong else 0
                    tried[command] += AT_A_TIME
                    for content, problem in attempts(run, name, command, number):
                        wrong += 1
                        print(f"WRONG {command}, {name}: {content[:3000]!r}\n{problem[-3000:]}")
                        sys.stdout.flush()
    return 1


def attempts(run: Path, name: str, command: str, number: int) -> list[tuple[bytes, str]]:
    """Try some forgeries of a file; return those on which the command ended wrongly, and how."""
    found = []
    original = (run / name).read_text()

    @seed(random.Random(f"{number} {name} {command}").getrandbits(64))
    @settings(FORGING, max_examples=AT_A_TIME)
    @given(forged_files(name, original))
    def attempt(content: bytes) -> None:
        if problem := problem_of(run, name, content, command):
            found.append((content, problem))

    warnings.simplefilter("ignore")  # of NaN in plots
    attempt()
    return found


if __name__ == "__main__":
    sys.exit(main())
