"""The argument parser, and the flags that several commands share."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from hvdtrain.config import TrainConfig
from hvdtrain.config.options import build_config, nearest, train_options
from hvdtrain.errors import UsageError, closest
from hvdtrain.launcher.hosts import Host, parse_host_list, read_hostfile
from hvdtrain.launcher.sites import hosts_of_site
from hvdtrain.launcher.ssh import SshOptions

if TYPE_CHECKING:
    from hvdtrain.evidence.trials import Training

Result = TypeVar("Result")


class Parser(argparse.ArgumentParser):
    """A parser that accepts `_` for `-` in flags, and raises UsageError, for one rank to report."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
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


def add_train_flags(parser: argparse.ArgumentParser) -> None:
    """Add --config, --print-config, and a flag for each option."""
    parser.add_argument("--config", metavar="FILE.yaml", help="read options; flags win")
    parser.add_argument(
        "--print-config", action="store_true", help="print the configuration and exit"
    )
    sections: dict[str, argparse._ArgumentGroup] = {}
    for option in train_options().values():
        section = sections.get(option.group) or parser.add_argument_group(option.group)
        sections[option.group] = section
        default = "" if option.default is None else f" (default: {option.default})"
        kind: dict[str, Any] = {
            "type": option.type,
            "choices": option.choices or None,
            "metavar": None if option.choices else option.type.__name__.upper(),
        }
        if option.type is bool:
            default, kind = "", {"action": argparse.BooleanOptionalAction}
        section.add_argument(
            *([option.short] if option.short else []),
            f"--{option.name.replace('_', '-')}",
            dest=option.name,
            default=argparse.SUPPRESS,
            help=(option.help + default).replace("%", "%%"),
            **kind,
        )


def read_train_flags(prog: str, flags: Sequence[str]) -> TrainConfig:
    """Return the configuration of a `train` command that another command starts."""
    parser = Parser(prog=prog, allow_abbrev=False)
    add_train_flags(parser)
    arguments, unknown = parser.parse_known_args(flags)
    if arguments.print_config:
        raise UsageError("--print-config starts no workers: give it to `hvdtrain train`")
    return build_config(vars(arguments), parser.explain(unknown))


def add_trial_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a command that runs a `train` command several times."""
    parser.add_argument(
        "--controller", choices=("gloo", "mpi"), default="gloo", help="use this controller (gloo)"
    )
    parser.add_argument(
        "train",
        nargs="*",
        metavar="-- train ...",
        help="verify this command, or -- python SCRIPT ... with a hvdtrain.Loop",
    )


def read_training(
    arguments: dict[str, Any], problems: list[str], command: str, usage: str
) -> tuple[Training, TrainConfig | None]:
    """Return the training of `add_trial_flags`, and its configuration: None for a script, or if
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


def add_host_flags(parser: argparse.ArgumentParser, with_interface: bool = True) -> None:
    """Add the flags of hosts, ssh and the network interface, named as in horovodrun."""
    group = parser.add_argument_group(
        "hosts (default: those of Slurm or the MPI Operator, else this machine)"
    )
    hosts = group.add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", metavar="A:2,B:4", help="use these hosts and slots")
    hosts.add_argument(
        "--hostfile", "-hostfile", metavar="FILE", help="read hosts, one per line: NAME slots=N"
    )
    add = group.add_argument
    add("-p", "--ssh-port", type=int, metavar="PORT", help="connect to this sshd port")
    add("-i", "--ssh-identity-file", type=Path, metavar="FILE", help="log in with this key")
    if with_interface:
        add(
            "--network-interface",
            metavar="NAME",
            help="connect hosts over this interface (default: detected)",
        )


def find_hosts(arguments: dict[str, Any]) -> tuple[Host, ...]:
    """Return the hosts of the flags, else of the site, else none."""
    if arguments["hosts"] is not None:
        return parse_host_list(arguments["hosts"])
    if arguments["hostfile"] is not None:
        return read_hostfile(Path(arguments["hostfile"]))
    return hosts_of_site(os.environ)


def ssh_options(arguments: dict[str, Any]) -> SshOptions:
    return SshOptions(arguments["ssh_port"], arguments["ssh_identity_file"])


def attempt(problems: list[str], action: Callable[[], Result]) -> Result | None:
    """Return the result of `action`, or on UsageError extend `problems` and return None."""
    try:
        return action()
    except UsageError as error:
        problems.extend(error.problems)
        return None


def add_replacements(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Add the flags of `train` that replace what a run was trained with; without defaults."""
    options = train_options()
    for name in names:
        option = options[name]
        parser.add_argument(
            *([option.short] if option.short else []),
            f"--{name.replace('_', '-')}",
            dest=name,
            type=option.type,
            choices=option.choices or None,
            help="replace the value used in training, as in train",
        )


def add_trust_code(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="run code named by the checkpoint, even if the command line does not name it",
    )
