"""Options of a training run by name, one for each field of the configuration's groups."""

import dataclasses
import os
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from hvdtrain.config import TrainConfig
from hvdtrain.config.effects import idle_problems
from hvdtrain.config.fields import Check, flag_of
from hvdtrain.documents import DEEPEST, read_text
from hvdtrain.errors import UsageError, attempt, closest, refuse

MAY_NAME_CODE = ("model", "data", "task")  # run code named by a file only if trusted
BATCH_SIZES = {"batch_size", "global_batch_size"}
ELSEWHERE = {  # names in other programs
    "learning_rate": "lr",
    "optimizer": "opt",
    "scheduler": "sched",
    "lr_scheduler": "sched",
    "dataset": "data",
    "arch": "model",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "num_workers": "workers",
    "grad_clip": "clip_grad",
    "early_stopping_patience": "patience",
    "early_stopping_threshold": "min_delta",
}


@dataclass(frozen=True)
class Option:
    """One field of one group of the configuration."""

    group: str
    name: str
    type: type
    optional: bool
    default: Any
    help: str
    choices: tuple[str, ...]
    learns: bool
    short: str
    check: Check | None

    @property
    def spellings(self) -> list[str]:
        """Return the flag, after its alternative spelling if it has one."""
        return [*filter(None, [self.short]), flag_of(self.name)]


@cache
def train_options() -> dict[str, Option]:
    """Return every option of `hvdtrain train` by name. Names are unique over the groups."""
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
                **field.metadata,
            )
    return options


def as_flat_dict(config: TrainConfig) -> dict[str, Any]:
    """Return every option's value by name, the content of config.yaml."""
    return {
        name: getattr(getattr(config, option.group), name)
        for name, option in train_options().items()
    }


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the known option closest to `name`, if any is close."""
    near = closest(name, [*names, *ELSEWHERE])
    return ELSEWHERE.get(near, near) if near else None


LOOP_OPTIONS = "HVDTRAIN_OPTIONS"  # options of a script's loop that replace its own, as JSON


def from_python(name: str, value: Any) -> Any:
    """Return an option's value that is given in Python; text may be given as a path or an int,
    a float as an int.

    Raises ValueError if it is of another type than the option.
    """
    option = train_options()[name]
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if option.type is str and type(value) is int:
        value = str(value)  # as of a flag: bucket_bytes=0
    accepted = (int, float) if option.type is float else option.type
    is_truth = isinstance(value, bool)
    fits = isinstance(value, accepted) and is_truth == (option.type is bool)
    if fits:
        return float(value) if option.type is float else value
    if value is None and option.optional:
        return None
    if value is None:
        raise ValueError(f"{name}=None: is not a value: leave it out, or give {option.default!r}")
    kind = type(value).__name__
    raise ValueError(f"{name}={value!r}: expected {option.type.__name__}, not {kind}")


def explicit_options(arguments: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the values of those of `names` that the command line gives."""
    return {name: arguments[name] for name in names if arguments.get(name) is not None}


def known_options(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a checkpoint's options that this version has. Raises ValueError."""
    options = train_options()
    return {name: from_python(name, value) for name, value in recorded.items() if name in options}


MOST_BRACKETS = 1000
BOOLEANS = {"true": True, "false": False}
NULL = "tag:yaml.org,2002:null"


def read_options(file: Path, options: dict[str, Option]) -> tuple[dict[str, Any], list[str]]:
    """Return the values in the file, and its problems, each with file and line.

    Values are parsed like the flag of the same name (plain YAML parses 1e-3 as text and 2024-06-30
    as a date). Raises UsageError if the file is not a readable mapping.
    """
    import yaml

    try:
        root = _composed(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--config={file}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or error
        raise UsageError(f"{file}{line}: not valid YAML: {reason}") from error
    if root is None:
        return {}, []
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{file}:1: must contain lines of the form NAME: VALUE")
    values: dict[str, Any] = {}
    problems = []
    for key_node, value_node in root.value:
        name = str(key_node.value).replace("-", "_")
        try:
            values[name] = _value(name, value_node, options, values)
        except ValueError as error:
            problems.append(f"{file}:{key_node.start_mark.line + 1}: {error}")
    return values, problems


def read_recorded(path: Path) -> dict[str, Any]:
    """Return the configuration that a run has recorded: options of their types, the command of a
    script and the number of its loop. Of options that this version does not know it is the text.

    Raises OSError, and ValueError with the first problem.
    """
    import yaml

    try:
        root = _composed(read_text(path), aliases=False)
    except yaml.YAMLError as error:
        raise ValueError(
            f"is not valid YAML: {getattr(error, 'problem', None) or error}"
        ) from error
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("does not hold named values")
    options = train_options()
    values: dict[str, Any] = {}
    for key, node in root.value:
        name = str(key.value)
        if name in options:
            values[name] = _value(name, node, options, values)
        elif name == "script":
            if not isinstance(node, yaml.SequenceNode) or not node.value:
                raise ValueError("script: expected its path and arguments")
            values[name] = [str(argument.value) for argument in node.value]
        elif name == "loop":
            values[name] = int(str(node.value))
        elif isinstance(node, yaml.ScalarNode):
            values[name] = None if node.tag == NULL else str(node.value)
    return values


def _composed(text: str, aliases: bool = True) -> Any:
    """Return the nodes of a YAML document. Raises YAMLError, and ValueError for one that is nested
    too deeply, or has `aliases` that are not allowed: a small text may mean any number of values.
    """
    import yaml

    if not aliases and text.count("[") > MOST_BRACKETS:  # which take PyYAML seconds
        raise ValueError(f"is nested more than {DEEPEST} deep")
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"is nested more than {DEEPEST} deep")
        if isinstance(event, yaml.AliasEvent) and not aliases:
            raise ValueError("has aliases (*name), which are not read")
    return yaml.compose(text, Loader=yaml.SafeLoader)


def _value(name: str, node: Any, options: dict[str, Option], seen: dict[str, Any]) -> Any:
    """Return the value of a node in its option's type. Raises ValueError with the reason."""
    option = options.get(name)
    if option is None:
        near = nearest(name, options)
        raise ValueError(f"unknown option {name!r}" + (f"; did you mean {near}?" if near else ""))
    if name in seen:
        raise ValueError(f"{name} is given twice")
    if not isinstance(node.value, str):
        raise ValueError(f"{name}: expected a single value")
    if node.tag == NULL and option.optional:
        return None
    try:
        return BOOLEANS[node.value.lower()] if option.type is bool else option.type(node.value)
    except (ValueError, KeyError):
        kind = option.type.__name__
        raise ValueError(f"{name}: {node.value[:40]!r} is not of type {kind}") from None


def build_config(
    arguments: Mapping[str, Any],
    problems: Sequence[str] = (),
    recorded: Mapping[str, Any] | None = None,
) -> TrainConfig:
    """Return the configuration from defaults, overridden by the YAML file, then by flags.

    `arguments`: the parsed arguments; `problems`: of those that the parser did not recognise.
    `recorded`: values of an earlier run, in place of defaults. Raises UsageError with these, and
    every problem of the flags, the file and all groups.
    """
    options = train_options()
    defaults = {name: option.default for name, option in options.items()}
    flags = {name: value for name, value in arguments.items() if name in options}
    file = arguments.get("config")
    in_file, all_problems = ({}, []) if file is None else read_options(Path(file), options)
    if BATCH_SIZES & flags.keys():  # one that is given as a flag replaces both of the file
        in_file = {name: value for name, value in in_file.items() if name not in BATCH_SIZES}
    chosen = in_file | flags
    values = dict(recorded or {}) | chosen
    all_problems += problems
    groups: dict[str, Any] = {}
    for group, group_type in typing.get_type_hints(TrainConfig).items():
        fields = {name: value for name, value in values.items() if options[name].group == group}
        groups[group] = attempt(all_problems, partial(group_type, **fields))
    all_problems += idle_problems(chosen, defaults | values, defaults, flags)
    refuse(all_problems)
    return TrainConfig(**groups)


def dump_yaml(config: TrainConfig) -> str:
    """Return the configuration as YAML that `--config` reads, with the global batch it means."""
    import yaml

    values = as_flat_dict(config)
    if config.batch.batch_size is None:
        values["global_batch_size"] = config.batch.resolve(workers=1)
    return str(yaml.safe_dump(values, sort_keys=False)).rstrip()
