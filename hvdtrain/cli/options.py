"""Flags and YAML keys from the configuration's fields; flags win over the file."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hvdtrain.config import TrainConfig
from hvdtrain.config.file import Option, nearest, read_options
from hvdtrain.errors import UsageError


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of ending the process, so that one rank can speak for all.

    Flags may be spelled with `_` in place of `-`.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        own = words.index("--") if "--" in words else len(words)
        spelled = [self._spell(word) for word in words[:own]]
        return super().parse_known_args(spelled + words[own:], namespace)

    def _spell(self, word: str) -> str:
        flag, equals, value = word.partition("=")
        dashed = flag.replace("_", "-")
        known = flag.startswith("--") and dashed in self._option_string_actions
        return f"{dashed}{equals}{value}" if known else word

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def train_options() -> dict[str, Option]:
    """Every option of `hvdtrain train`, by name. Names are unique over the groups."""
    options = {}
    for group, group_type in typing.get_type_hints(TrainConfig).items():
        hints = typing.get_type_hints(group_type)
        for field in dataclasses.fields(group_type):
            kinds = set(typing.get_args(hints[field.name])) or {hints[field.name]}
            (kind,) = kinds - {types.NoneType}
            options[field.name] = Option(
                group=group,
                name=field.name,
                type=kind,
                optional=types.NoneType in kinds,
                default=field.default,
                help=field.metadata["help"],
                choices=field.metadata["choices"],
                learns=field.metadata["learns"],
                short=field.metadata["short"],
            )
    return options


def add_train_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each option."""
    sections: dict[str, argparse._ArgumentGroup] = {}
    for option in train_options().values():
        section = sections.get(option.group) or parser.add_argument_group(option.group)
        sections[option.group] = section
        spellings = [f"--{option.name.replace('_', '-')}"]
        if option.short:
            spellings.insert(0, option.short)
        if option.type is bool:
            section.add_argument(
                *spellings,
                dest=option.name,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=option.help.replace("%", "%%"),
            )
            continue
        default = "" if option.default is None else f" (default: {option.default})"
        section.add_argument(
            *spellings,
            dest=option.name,
            type=option.type,
            choices=option.choices or None,
            default=argparse.SUPPRESS,
            metavar=None if option.choices else option.type.__name__.upper(),
            help=(option.help + default).replace("%", "%%"),
        )


def build_config(arguments: dict[str, Any], unknown: list[str]) -> TrainConfig:
    """The configuration from defaults, then the YAML file, then flags.

    `arguments`: what the parser found; `unknown`: what it could not place. Raises UsageError with
    every problem of the flags, the file and all groups.
    """
    options = train_options()
    flags = {name: value for name, value in arguments.items() if name in options}
    file = arguments.get("config")
    in_file, problems = ({}, []) if file is None else read_options(Path(file), options)
    values = in_file | flags
    for one, other in (("batch_size", "global_batch_size"), ("global_batch_size", "batch_size")):
        if one in flags and other not in flags:
            values.pop(other, None)
    problems += [_explain_unknown(text, options) for text in unknown if text.startswith("-")]
    groups: dict[str, Any] = {}
    for group, group_type in typing.get_type_hints(TrainConfig).items():
        own = {name: value for name, value in values.items() if options[name].group == group}
        try:
            groups[group] = group_type(**own)
        except UsageError as error:
            problems.extend(error.problems)
    if unknown and not problems:
        problems.append(f"not understood: {' '.join(unknown)}")
    if problems:
        raise UsageError(*problems)
    return TrainConfig(**groups)


def dump_yaml(config: TrainConfig) -> str:
    """The configuration as `--config` reads it."""
    import yaml

    return str(yaml.safe_dump(as_flat_dict(config), sort_keys=False)).rstrip()


def _explain_unknown(text: str, options: dict[str, Option]) -> str:
    flag = text.partition("=")[0]
    near = nearest(flag.lstrip("-").replace("-", "_"), options)
    return f"{flag}: no such flag" + (f"; did you mean --{near.replace('_', '-')}?" if near else "")


def as_flat_dict(config: TrainConfig) -> dict[str, Any]:
    """Every option's value by name: what config.yaml holds and `--config` reads."""
    return {
        name: getattr(getattr(config, option.group), name)
        for name, option in train_options().items()
    }
