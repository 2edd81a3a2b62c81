"""The argument parser; flags as tables of a command; those that several commands share."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from hvdtrain.config import TrainConfig
from hvdtrain.config.fields import Check, wrong_values
from hvdtrain.config.options import build_config, nearest, train_options
from hvdtrain.errors import UsageError, attempt, closest
from hvdtrain.launcher.hosts import Host, parse_host_list, read_hostfile
from hvdtrain.launcher.sites import hosts_of_site
from hvdtrain.launcher.ssh import SshOptions
from hvdtrain.topology import Topology

if TYPE_CHECKING:
    from hvdtrain.evidence.trials import Training

NEGATABLE = {"action": argparse.BooleanOptionalAction}  # of a flag: --name, or --no-name
CONTROLLERS = ("auto", "gloo", "mpi")
SECONDS = Check(lambda s: 0 < s < math.inf, "={:g}: must be a number of seconds above 0")
FOLDER = Check(
    lambda path: path.is_dir() or not path.exists(), "={}: is not a folder; choose another"
)


USUAL_TITLE = "usual flags"
USUAL = (  # those that `hvdtrain train --help` shows
    *("config", "model", "data", "epochs", "global_batch_size", "lr", "virtual_workers"),
    *("audit_every", "experiment", "resume"),
)


class Parser(argparse.ArgumentParser):
    """A parser that accepts `_` for `-` in flags, and raises UsageError, for one rank to report.

    Its help begins with the usual flags, if it has such; then --help-all shows the rest.
    """

    shows_all = False

    def format_help(self) -> str:
        """Return the help, with a usage line that leaves most flags to the lines below."""
        flags = [action for action in self._actions if action.option_strings and action.required]
        required = [f"{action.option_strings[0]} {action.metavar}" for action in flags]
        words = [
            f"{action.metavar} ..." if action.nargs == "+" else str(action.metavar)
            for action in self._actions
            if not action.option_strings
        ]
        self.usage = " ".join([self.prog, *required, "[flags]", *words])
        every = self._action_groups
        usual = [group for group in every if group.title == USUAL_TITLE]
        rest = [group for group in every if group not in usual]
        self._action_groups = usual + ([self._optionals] if usual and not self.shows_all else rest)
        try:
            return super().format_help()
        finally:
            self._action_groups = every

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        self.shows_all = "--help-all" in words
        separator = words.index("--") if "--" in words else len(words)
        spelled = [self._spell(word) for word in words[:separator]]
        return super().parse_known_args(spelled + words[separator:], namespace)

    def _spell(self, word: str) -> str:
        flag, equals, value = word.partition("=")
        dashed = flag.replace("_", "-")
        is_flag = flag.startswith("--") and dashed in self._option_string_actions
        return f"{dashed}{equals}{value}" if is_flag else word

    def explain(self, unknown: Sequence[str]) -> list[str]:
        """Return the problems of arguments that were not recognised.

        Words are one only if no flag is: otherwise they may belong to that flag.
        """
        flags = {name.lstrip("-").replace("-", "_"): name for name in self._option_string_actions}
        problems = []
        for flag in (text.partition("=")[0] for text in unknown if text.startswith("-")):
            near = flags.get(nearest(flag.lstrip("-").replace("-", "_"), flags) or "")
            hint = f"did you mean {near}?" if near else f"see {self.prog} --help"
            problems.append(f"{flag}: no such flag; {hint}")
        if unknown and not problems:
            problems.append(f"not understood: {' '.join(unknown)} (see {self.prog} --help)")
        return problems

    def error(self, message: str) -> NoReturn:
        match = re.match(r"argument (\w+): invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if match and match[1].isupper():  # a command, not the value of a flag
            commands = re.findall(r"[\w-]+", match[3])
            near = closest(match[2], commands)
            hint = f"did you mean {near}?" if near else f"choose from {', '.join(commands)}"
            message = f"{match[2]}: no such command; {hint}"
        raise UsageError(f"{message} (see {self.prog} --help)")


@dataclass(frozen=True)
class Flag:
    """A flag or an argument of a command, and the check of its value."""

    name: str  # such as --batch-size, or source; after a space, another spelling of it
    help: str
    type: Callable[[str], Any] = str  # bool: the flag takes no value
    default: Any = None
    metavar: str | None = None
    choices: Iterable[str] | None = None
    check: Check | None = None
    more: Mapping[str, Any] = field(default_factory=dict)  # what else argparse takes

    @property
    def spelling(self) -> str:
        """Return its name as messages have it: the long one of two."""
        return self.name.split()[-1]

    @property
    def dest(self) -> str:
        """Return the name of its value among the parsed arguments."""
        return str(self.more.get("dest", self.spelling.lstrip("-").replace("-", "_")))


@dataclass(frozen=True)
class Section:
    """Flags below a title of their own; without one, flags of which at most one may be given."""

    title: str
    flags: Sequence[Flag | Section]


Flags = Sequence[Flag | Section]


class Command(NamedTuple):
    """A command: its line in the list of all, the description in its own help, its flags, and what
    runs it.

    `run` receives the parsed arguments, the problems of those that were not recognised, which it
    raises together with its own, and the place of this process among the workers. It returns the
    exit code.
    """

    help: str
    description: str
    flags: Flags
    run: Callable[[dict[str, Any], list[str], Topology], int]


def add_command(parsers: Any, name: str, command: Command) -> Parser:
    """Add the parser of a command. The lines of a description of several lines are kept."""
    kept = argparse.RawDescriptionHelpFormatter
    formatter = kept if "\n" in command.description.rstrip() else argparse.HelpFormatter
    parser: Parser = parsers.add_parser(
        name,
        help=command.help,
        description=command.description,
        formatter_class=formatter,
        allow_abbrev=False,
    )
    add_all(parser, command.flags)
    parser.set_defaults(run=command.run, explain=parser.explain)
    return parser


def add_all(parser: argparse._ActionsContainer, flags: Flags) -> None:
    """Add these flags to a parser, or to a group of its flags."""
    for flag in flags:
        if isinstance(flag, Flag):
            value = {"type": flag.type, "metavar": flag.metavar, "choices": flag.choices}
            kind = {"action": "store_true"} if flag.type is bool else value
            default = {} if flag.default is None else {"default": flag.default}
            options: dict[str, Any] = {**kind, **default, **flag.more}
            parser.add_argument(*flag.name.split(), help=flag.help, **options)
        elif flag.title:
            add_all(parser.add_argument_group(flag.title), flag.flags)
        else:
            add_all(parser.add_mutually_exclusive_group(), flag.flags)


def wrong_flags(flags: Flags, arguments: Mapping[str, Any]) -> list[str]:
    """Return a message for each flag whose check fails."""
    checked = [(flag, flag.check) for flag in each_flag(flags) if flag.check]
    return wrong_values([(flag.spelling, arguments[flag.dest], check) for flag, check in checked])


def each_flag(flags: Flags) -> Iterator[Flag]:
    """Yield the flags, those within sections too."""
    for flag in flags:
        yield from each_flag(flag.flags) if isinstance(flag, Section) else [flag]


def train_flag(name: str, text: str = "", **changes: Any) -> Flag:
    """Return the flag of an option of `train`: its type, default, choices, check and help.

    `text`: other help; `changes`: of the other fields, for a command where they differ.
    """
    option = train_options()[name]
    is_switch = option.type is bool
    flag = Flag(
        " ".join(option.spellings),
        text or option.help,
        option.type,
        option.default,
        metavar=None if option.choices else option.type.__name__.upper(),
        choices=option.choices or None,
        check=option.check,
        more=NEGATABLE if is_switch else {},
    )
    flag = replace(flag, **changes)
    default = "" if flag.default is None or is_switch else f" (default: {flag.default})"
    return replace(flag, help=(flag.help + default).replace("%", "%%"))


def replacements(names: Sequence[str]) -> Flags:
    """Return the flags of `train` that replace what a run was trained with; without defaults."""
    text = "replace the value used in training, as in train"
    return [train_flag(name, text, default=None) for name in names]


def flags_of_train() -> Flags:
    """Return a flag for each option, the usual ones first; --config and what prints and exits."""
    flags = {"config": Flag("--config", "read options; flags win", metavar="FILE.yaml")}
    sections: dict[str, list[Flag]] = defaultdict(list)
    for name, option in train_options().items():
        # The default is that of the YAML file, if it has one.
        flags[name] = replace(train_flag(name), default=argparse.SUPPRESS)
        if name not in USUAL:
            sections[option.group].append(flags[name])
    return [
        Section(USUAL_TITLE, [flags[name] for name in USUAL]),
        Flag("--help-all", "show every flag and exit", bool, more={"action": "help"}),
        Flag("--print-config", "print the configuration and exit", bool),
        *(Section(title, rest) for title, rest in sections.items()),
    ]


TRAIN_FLAGS = flags_of_train()
TRIAL_FLAGS = (  # of a command that runs a `train` command several times
    Flag("--controller", "use this controller (gloo)", default="gloo", choices=CONTROLLERS[1:]),
    Flag(
        "train",
        "verify this command, or -- python SCRIPT ... with a hvdtrain.Loop",
        metavar="-- train ...",
        more={"nargs": "*"},
    ),
)
SSH_FLAGS = (  # named as in horovodrun
    Section(
        "",
        (
            Flag("-H --hosts", "use these hosts and slots", metavar="A:2,B:4"),
            Flag("--hostfile -hostfile", "read hosts, one per line: NAME slots=N", metavar="FILE"),
        ),
    ),
    Flag("-p --ssh-port", "connect to this sshd port", int, metavar="PORT"),
    Flag("-i --ssh-identity-file", "log in with this key", Path, metavar="FILE"),
)
HOSTS_TITLE = "hosts (default: those of Slurm or the MPI Operator, else this machine)"
HOST_FLAGS = Section(
    HOSTS_TITLE,
    (
        *SSH_FLAGS,
        Flag(
            "--network-interface",
            "connect hosts over this interface (default: detected)",
            metavar="NAME",
        ),
    ),
)
TRUST_CODE = Flag(
    "--trust-code",
    "run code named by the checkpoint, even if the command line does not name it",
    bool,
)


def read_train_flags(prog: str, flags: Sequence[str]) -> TrainConfig:
    """Return the configuration of a `train` command that another command starts."""
    parser = Parser(prog=prog, allow_abbrev=False)
    add_all(parser, TRAIN_FLAGS)
    arguments, unknown = parser.parse_known_args(flags)
    if arguments.print_config:
        raise UsageError("--print-config starts no workers: give it to `hvdtrain train`")
    return build_config(vars(arguments), parser.explain(unknown))


def read_training(
    arguments: dict[str, Any], problems: list[str], command: str, usage: str
) -> tuple[Training, TrainConfig | None]:
    """Return the training of TRIAL_FLAGS, and its configuration: None for a script, or if
    `problems` grow.

    `command`: the name of the command that runs it; `usage`: its own flags.
    """
    from hvdtrain.evidence.trials import Training, chosen_flags

    words = [part for part in arguments["train"] if part != "--"]
    controller: str = arguments["controller"]
    if words[:1] != ["train"]:
        if not any(word.endswith(".py") for word in words):
            problems.append(
                f"usage: hvdtrain {command} {usage} -- train ..., or -- python SCRIPT.py ..."
            )
        return Training(words, controller, is_script=True), None
    problems += chosen_flags(words[1:], command)
    config = attempt(problems, lambda: read_train_flags("train", words[1:]))
    return Training(words[1:], controller), config


def find_hosts(arguments: dict[str, Any]) -> tuple[Host, ...]:
    """Return the hosts of the flags, else of the site, else none."""
    if arguments["hosts"] is not None:
        return parse_host_list(arguments["hosts"])
    if arguments["hostfile"] is not None:
        return read_hostfile(Path(arguments["hostfile"]))
    return hosts_of_site(os.environ)


def ssh_options(arguments: dict[str, Any]) -> SshOptions:
    return SshOptions(arguments["ssh_port"], arguments["ssh_identity_file"])
