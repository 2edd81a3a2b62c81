"""All commands and flags, as in flags.txt: `python -m tests.unit.test_flags` writes it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from hvdtrain.cli import make_parser

GOLDEN = Path(__file__).with_name("flags.txt")


def describe(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield a line for each flag and argument of a parser, then those of its commands."""
    commands = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            commands += action.choices.values()
        elif not isinstance(action, argparse._HelpAction):
            names = "/".join(action.option_strings) or action.dest
            values = "|".join(map(str, action.choices or ())) or action.metavar or ""
            yield f"{parser.prog} {names} {values}: {action.help or ''}"
    for command in commands:
        yield from describe(command)


def test_commands_and_flags_stay() -> None:
    """Fails when a command or flag is lost, renamed or has other choices, or its help changes."""
    found, golden = list(describe(make_parser())), GOLDEN.read_text("utf-8").splitlines()
    assert found == golden, "if meant: python -m tests.unit.test_flags"


if __name__ == "__main__":
    GOLDEN.write_text("".join(f"{line}\n" for line in describe(make_parser())), "utf-8")
