"""All commands and flags, as in flags.txt: `python -m tests.unit.cli.test_flags` writes it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.cli import COMMANDS, GROUPS, make_parser
from hvdtrain.cli.flags import USUAL
from hvdtrain.config.options import train_options

GOLDEN = Path(__file__).parents[1] / "flags.txt"
STORED, OWN_FOLDER = "as in training, unless it is given", "plots have a folder of their own"
LISTS = "one for each of several measurements"
# Flags that have the name of one of train's, and another type or default, with the reason.
OTHERS = {
    **{
        f"evaluate --{name}": STORED
        for name in ("model", "data", "data-dir", "device", "skip-bad-samples")
    },
    **{f"replay --{name}": STORED for name in ("model", "data", "data-dir", "device")},
    "predict --model": STORED,
    **{
        f"{command} --output": OWN_FOLDER
        for command in (
            *(f"bench {bench}" for bench in ("scaling", "start", "peers", "classic")),
            *("compare", "plan"),
        )
    },
    "report --output": OWN_FOLDER,
    **{
        f"bench {bench} --{flag}": LISTS
        for bench in ("scaling", "network")
        for flag in ("batch-size", "workers")
    },
    **{f"bench {bench} --workers": "of the job: its flag is -np" for bench in ("start", "peers")},
    **{f"bench peers --{flag}": LISTS for flag in ("batch-size", "data")},
    **{
        f"bench {bench} --device": "a measurement names what it measures"
        for bench in ("step", "checkpoint", "ring", "audit")
    },
    "bench classic --data": "Fashion-MNIST where it is present",
    "bench classic --model": "both, unless one is given",
    "compare --global-batch-size": "there is no --batch-size beside it",
    "compare --dtype": "systems agree to rounding in float64",
    "plan --model": "a profile replaces it, which must not be given beside it",
    "plan --data": "a profile replaces it, which must not be given beside it",
    "plan --profile": "a file of another kind",
}


def describe(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield a line for each flag and argument of a parser, then those of its commands."""
    commands = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            commands += action.choices.values()
        elif "--help" not in action.option_strings:
            names = "/".join(action.option_strings) or action.dest
            values = "|".join(map(str, action.choices or ())) or action.metavar or ""
            yield f"{parser.prog} {names} {values}: {action.help or ''}"
    for command in commands:
        yield from describe(command)


def test_commands_and_flags_stay() -> None:
    """Fails when a command or flag is lost, renamed or has other choices, or its help changes."""
    found, golden = list(describe(make_parser())), GOLDEN.read_text("utf-8").splitlines()
    assert found == golden, "if meant: python -m tests.unit.cli.test_flags"


def parsers_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers_of(command)


def test_flags_of_the_name_of_one_of_train_are_like_it() -> None:
    """Fails when such a flag has another type or default without a reason, or a reason is left."""
    options, others = train_options(), set()
    for parser in parsers_of(make_parser()):
        for action in parser._actions:
            option = options.get(action.dest)
            if option is None or not action.option_strings or parser.prog == "hvdtrain train":
                continue
            kind = bool if isinstance(action, argparse.BooleanOptionalAction) else action.type
            if (kind, action.default) != (option.type, option.default):
                name = action.dest.replace("_", "-")
                others.add(f"{parser.prog.removeprefix('hvdtrain ')} --{name}")
    assert others == OTHERS.keys()


def test_help_shows_the_commands_in_three_groups() -> None:
    """Fails when a command is in no group of the help, or in two."""
    text = make_parser().format_help()
    titles = [f"\n{title}:\n" for title in ("train", "trust", "measure")]
    places = [text.index(title) for title in titles]
    assert places == sorted(places) and list(GROUPS) == ["train", "trust", "measure"]
    for title, begins, ends in zip(GROUPS, places, [*places[1:], len(text)], strict=True):
        lines = [line.split()[0] for line in text[begins:ends].splitlines() if line[2:3].strip()]
        assert tuple(lines[1:] if lines[0] == f"{title}:" else lines) == GROUPS[title]
    assert len(set(COMMANDS)) == len(COMMANDS)


def test_help_of_train_begins_with_ten_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails when a usual flag does not lead the help, or another stands before --help-all."""
    flags = [f"--{name.replace('_', '-')}" for name in USUAL]
    rest = {f"--{name.replace('_', '-')}" for name in train_options()} - set(flags)
    for asked, complete in (("--help", False), ("--help-all", True)):
        with pytest.raises(SystemExit):
            make_parser().parse_known_args(["train", asked])
        lines = capsys.readouterr().out.splitlines()
        shown = [line.split()[0].rstrip(",") for line in lines if line.startswith("  -")]
        assert shown[: len(flags) + 1] == [*flags, "-h"] and len(flags) == 10
        assert rest <= {word.strip(",") for line in lines for word in line.split()} or not complete
        assert bool(rest & set(shown)) == complete


def test_usage_lines_are_short() -> None:
    """Fails when the usage of a command lists flags that need not be given."""
    for parser in parsers_of(make_parser()):
        usage = parser.format_help().splitlines()[0]
        assert usage.startswith(f"usage: {parser.prog} ") and len(usage) <= 100, usage


if __name__ == "__main__":
    GOLDEN.write_text("".join(f"{line}\n" for line in describe(make_parser())), "utf-8")
