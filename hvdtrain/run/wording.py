"""Messages in the words of a script: its options as keywords, where `train` has flags."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from hvdtrain.config.options import Option, train_options
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.run.script import OPTIONS

# --name, --name=value, and --name followed by a word, which may be its value.
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*[a-z0-9])(?:=([^\s:;,]+)| (\w+(?:\.\w+)*))?")
# What a script decides itself, by other means than an option.
OWN = {"lr": "the learning rate", "warmup_epochs": "a warmup of the learning rate"}


@contextmanager
def in_words_of_script() -> Iterator[None]:
    """Let errors raised within the context name keywords of hvdtrain.Loop instead of flags."""
    try:
        yield
    except HvdtrainError as error:
        error.args = tuple(
            as_options(argument) if isinstance(argument, str) else argument
            for argument in error.args
        )
        if isinstance(error, UsageError):
            error.problems = tuple(map(as_options, error.problems))
        raise


def as_options(text: str) -> str:
    """Return a message with experiment='a' for --experiment=a, and sync_bn=True for --sync-bn.

    Flags of other commands, such as those of `doctor`, stay.
    """
    options = train_options()
    return FLAG.sub(lambda match: _as_option(match, options), text)


def _as_option(match: re.Match[str], options: dict[str, Option]) -> str:
    name, value, word = match[1].replace("-", "_"), match[2], match[3]
    rest = "" if word is None else f" {word}"
    if name in OWN:
        return OWN[name] + rest
    if name not in OPTIONS:
        return match[0]
    option = options[name]
    if option.type is bool:
        return f"{name}=True{rest}"
    if value is None and word is not None and _is_value(word, option):
        value, rest = word, ""
    if value is None:
        return name + rest
    return f"{name}={value if option.type in (int, float) else repr(value)}{rest}"


def _is_value(word: str, option: Option) -> bool:
    """Return whether the word after a flag is its value, and not the next word of the sentence."""
    return word in (*option.choices, "auto") or word.replace(".", "").isdigit()
